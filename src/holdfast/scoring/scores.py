"""Scores: the losses of a dataset at the pretrained weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.io.files import write_whole


@dataclass(frozen=True, repr=False)
class Scores:
    """The losses of a dataset at the pretrained weights, in the order of the data.

    Attributes:
        losses: one value per sample; NaN for a sample without targets.
        counts: the number of targets of each sample (target tokens, or 1).
        token_losses: the losses of each sample's targets, with ``tokens=True``.
        about: fingerprints of model and data, and the options.
    """

    losses: Tensor
    counts: Tensor
    token_losses: list[Tensor] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def excluded(self) -> list[int]:
        """The samples without targets (all labels −100), which get weight 0."""
        return [int(i) for i in (self.counts == 0).nonzero().flatten()]

    def __repr__(self) -> str:
        scored = self.losses[self.counts > 0]
        middle = f", median loss {scored.median():.4g}" if len(scored) else ""
        tokens = ", with token losses" if self.token_losses is not None else ""
        return f"Scores({len(self)} samples, {len(self.excluded)} without targets{middle}{tokens})"

    def __len__(self) -> int:
        return len(self.losses)

    def split(self, token_values: Tensor) -> list[Tensor]:
        """Cut values for all tokens (as ``Flow.weigh`` returns them) into one tensor per sample.

        Example:
            >>> import torch
            >>> scores = Scores(torch.ones(2), torch.tensor([1, 2]))
            >>> scores.split(torch.tensor([0.1, 0.2, 0.3]))
            [tensor([0.1000]), tensor([0.2000, 0.3000])]
        """
        if len(token_values) != int(self.counts.sum()):
            raise ValueError(
                f"{len(token_values)} values do not fit the {int(self.counts.sum())} target tokens"
            )
        return list(token_values.split(self.counts.tolist()))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write ``scores.safetensors`` and ``scores.json`` into a directory."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"losses": self.losses, "counts": self.counts}
        if self.token_losses is not None:
            tensors["token_losses"] = torch.cat([torch.empty(0), *self.token_losses])
        write_whole(folder / "scores.safetensors", lambda path: save_file(tensors, path))
        # Written last: where it exists, the tensors are complete.
        text = json.dumps(dict(self.about), indent=2, sort_keys=True) + "\n"
        write_whole(folder / "scores.json", lambda path: path.write_text(text))

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Scores:
        folder = Path(directory)
        try:
            about = json.loads((folder / "scores.json").read_text())
            tensors = load_file(folder / "scores.safetensors")
            losses, counts = tensors["losses"], tensors["counts"]
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{folder} contains no scores: {error}") from error
        except (ValueError, KeyError, safetensors.SafetensorError) as error:
            raise ValueError(
                f"the scores in {folder} cannot be read; remove the directory to score again: "
                f"{error!r}"
            ) from error
        tokens = None
        if "token_losses" in tensors:
            tokens = list(tensors["token_losses"].split(counts.tolist()))
        return cls(losses, counts, tokens, about)
