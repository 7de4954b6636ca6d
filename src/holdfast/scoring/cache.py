"""Where scores are kept: finished ones under their key, those of a pass under way beside it.

<cache>/<key>/scores.safetensors, scores.json
<cache>/<key>.partial/about.json, part-….safetensors     until the pass is finished
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from holdfast._torch.content import model_fingerprint
from holdfast.data import Batches, Samples
from holdfast.io.files import write_whole
from holdfast.scoring.scores import Scores

_FORMAT = 1  # of the files, and of how a loss is computed: part of the key


class Row(NamedTuple):
    """What is known of one sample: its loss, its number of targets, the losses of those."""

    loss: float
    targets: int
    tokens: Tensor | None


class Rows(dict[int, Row]):
    """Scored samples by index."""

    def save(self, path: Path) -> None:
        """Write the rows to a safetensors file."""
        rows = self.values()
        tensors = {
            "indices": torch.tensor(list(self), dtype=torch.int64),
            "losses": torch.tensor([row.loss for row in rows], dtype=torch.float64),
            "counts": torch.tensor([row.targets for row in rows], dtype=torch.int64),
        }
        if all(row.tokens is not None for row in rows):
            tensors["tokens"] = torch.cat([row.tokens for row in rows if row.tokens is not None])
        write_whole(path, lambda beside: save_file(tensors, beside))

    @classmethod
    def load(cls, path: Path) -> Rows:
        """Read the rows from a safetensors file."""
        part = load_file(path)
        counts = part["counts"].tolist()
        tokens: Iterable[Tensor | None] = [None] * len(counts)
        if "tokens" in part:
            # Copies: a view would be pickled with all that it is a view of.
            tokens = [piece.clone() for piece in part["tokens"].split(counts)]
        rows = zip(part["losses"].tolist(), counts, tokens, strict=True)
        return cls(zip(part["indices"].tolist(), map(Row._make, rows), strict=True))

    def scores(self, tokens: bool, about: dict[str, Any]) -> Scores:
        """All rows as one, after a check that each sample is there once and has a sound loss."""
        if not self:
            raise ValueError("there is nothing to score: the data is empty")
        missing = next((i for i in range(len(self)) if i not in self), None)
        if missing is not None:
            raise ValueError(f"sample {missing} was not scored: the data changed during the pass")
        for i in range(len(self)):
            row = self[i]
            if row.targets and not 0 <= row.loss < float("inf"):
                raise ValueError(
                    f"the loss of sample {i} is {row.loss}: losses must be finite and ≥ 0. Look at "
                    "the sample and at the model's dtype"
                )
        rows = [self[i] for i in range(len(self))]
        return Scores(
            losses=torch.tensor([row.loss for row in rows], dtype=torch.float64),
            counts=torch.tensor([row.targets for row in rows], dtype=torch.int64),
            token_losses=[row.tokens for row in rows if row.tokens is not None] if tokens else None,
            about=about,
        )


class Store:
    """The cache entry of one model × data × options."""

    def __init__(self, root: Path, about: dict[str, Any]) -> None:
        # The probe checks the data behind a user's key; it is not part of the key.
        named = {name: value for name, value in about.items() if name != "probe"}
        key = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:32]
        self.about = about
        self.done = root / key
        self.partial = root / f"{key}.partial"

    @classmethod
    def open(
        cls,
        cache: bool | str | os.PathLike[str],
        model: nn.Module,
        source: Samples | Batches,
        options: dict[str, Any],
        data_key: str | None,
    ) -> Store | None:
        """The entry, or None if nothing is to be kept or it cannot be told what is scored."""
        if cache is False:
            return None
        data = data_key or source.fingerprint()
        if data is None or None in options.values():
            what = "data" if data is None else "collate or task function"
            hint = ": give a data_key" if data is None else ""
            warnings.warn(
                f"the content of the {what} cannot be told, so the scores are not kept{hint}",
                stacklevel=3,
            )
            return None
        default = os.environ.get("HOLDFAST_CACHE") or Path.home() / ".cache" / "holdfast"
        root = Path(default if cache is True else cache) / "scores"
        about = {
            "format": _FORMAT,
            "model": model_fingerprint(model),
            "data": data,
            **options,
            "probe": source.probe() if data_key else None,
        }
        return cls(root, about)

    def finished(self, source: Samples | Batches) -> Scores | None:
        """The scores, if they are there and the data is still what it was."""
        if not (self.done / "scores.json").is_file():
            return None
        scores = Scores.load(self.done)
        self._check(dict(scores.about), self.done)
        if source.total is not None and source.total != len(scores):
            raise ValueError(
                f"the scores kept for this data_key are of {len(scores)} samples, the data has "
                f"{source.total}: give changed data another data_key, or remove {self.done}"
            )
        return scores

    def begun(self) -> Rows:
        """What an earlier pass that did not finish has left."""
        rows = Rows()
        note = self.partial / "about.json"
        if note.is_file():
            self._check(json.loads(note.read_text()), self.partial)
            for part in sorted(self.partial.glob("part-*.safetensors")):
                try:
                    rows.update(Rows.load(part))
                except FileNotFoundError:  # another process has finished the same pass
                    continue
                except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
                    warnings.warn(f"{part} cannot be read and is left out: {error}", stacklevel=4)
        else:
            self.partial.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.about)
            write_whole(note, lambda beside: beside.write_text(text))
        return rows

    def keep(self, rows: Rows) -> None:
        """Put aside what was scored since the last time."""
        if rows:
            # Another process that finished the same pass may have removed the folder.
            self.partial.mkdir(parents=True, exist_ok=True)
            rows.save(self.partial / f"part-{uuid.uuid4().hex}.safetensors")

    def finish(self, scores: Scores) -> None:
        """Keep the whole, and remove its parts."""
        scores.save(self.done)
        shutil.rmtree(self.partial, ignore_errors=True)

    def _check(self, kept: dict[str, Any], where: Path) -> None:
        if kept.get("probe") != self.about["probe"]:
            raise ValueError(
                "the data is not that of the scores kept for this data_key: give changed data "
                f"another data_key, or remove {where}"
            )
