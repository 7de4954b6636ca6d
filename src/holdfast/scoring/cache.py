"""The cache of scores.

<cache>/<key>/scores.safetensors, scores.json     the scores of a finished pass
<cache>/<key>.partial/about.json, part-…/         those of an unfinished pass, in parts
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast._torch.fingerprint import started_model_fingerprint
from holdfast.data import Source
from holdfast.io.files import write_whole
from holdfast.scoring.scores import Scores

_FORMAT = 1  # of the files, and of how a loss is computed: part of the key


def cache_folder(cache: bool | str | os.PathLike[str]) -> Path:
    """The cache directory; True is ``$HOLDFAST_CACHE`` or ``~/.cache/holdfast``."""
    if isinstance(cache, bool):
        cache = os.environ.get("HOLDFAST_CACHE") or Path.home() / ".cache" / "holdfast"
    return Path(cache)


class SampleScore(NamedTuple):
    """The loss of one sample, its number of targets, and the loss of each target."""

    loss: float
    targets: int
    tokens: Tensor | None


class PartialScores(dict[int, SampleScore]):
    """The samples scored so far, by index."""

    @classmethod
    def of(cls, part: Scores) -> PartialScores:
        tokens: Iterable[Tensor | None] = itertools.repeat(None)
        if part.token_losses is not None:
            # Copies: pickling a view would pickle the whole tensor.
            tokens = [piece.clone() for piece in part.token_losses]
        rows = map(SampleScore, part.losses.tolist(), part.counts.tolist(), tokens)
        return cls(zip(part.about["indices"], rows, strict=True))

    def scores(self, about: dict[str, Any]) -> Scores:
        rows = self.values()
        tokens = [row.tokens for row in rows if row.tokens is not None]
        return Scores(
            losses=torch.tensor([row.loss for row in rows], dtype=torch.float64),
            counts=torch.tensor([row.targets for row in rows], dtype=torch.int64),
            token_losses=tokens if len(tokens) == len(rows) else None,
            about=about,
        )

    def complete(self, about: dict[str, Any]) -> Scores:
        """Return all scores, after a check that no sample is missing and all losses are valid."""
        if not self:
            raise ValueError("the data is empty: there is nothing to score")
        for i in range(len(self)):
            if i not in self:
                raise ValueError(f"sample {i} was not scored: the data changed during the pass")
            if self[i].targets and not 0 <= self[i].loss < float("inf"):
                raise ValueError(
                    f"the loss of sample {i} is {self[i].loss}: losses must be finite and ≥ 0. "
                    "Check the sample and the model's dtype"
                )
        return PartialScores(sorted(self.items())).scores(about)


class ScoreCache:
    """The cache entry for one model, data and options."""

    def __init__(self, root: Path, about: dict[str, Any]) -> None:
        # The probe verifies the data behind a data_key; it is not part of the key.
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
        source: Source,
        options: dict[str, Any],
        data_key: str | None,
    ) -> ScoreCache | None:
        """The entry; None without a cache, or if the content cannot be fingerprinted."""
        if cache is False:
            return None
        weights = started_model_fingerprint(model)  # a GPU computes it while the data is read
        data = data_key or source.fingerprint()
        if data is None or None in options.values():
            what = "data" if data is None else "collate or task function"
            hint = "; pass data_key=" if data is None else ""
            warnings.warn(
                f"the scores are not cached: the content of the {what} has no fingerprint{hint}",
                stacklevel=3,
            )
            return None
        root = cache_folder(cache) / "scores"
        about = {
            "format": _FORMAT,
            "model": weights(),
            "data": data,
            **options,
            "probe": source.probe() if data_key else None,
        }
        return cls(root, about)

    def finished(self, source: Source) -> Scores | None:
        if not (self.done / "scores.json").is_file():
            return None
        scores = Scores.load(self.done)
        self._check(dict(scores.about), self.done)
        if source.total is not None and source.total != len(scores):
            raise ValueError(
                f"the scores cached for this data_key have {len(scores)} samples, and the data "
                f"has {source.total}: use another data_key for changed data, or remove {self.done}"
            )
        return scores

    def unfinished(self) -> PartialScores:
        rows = PartialScores()
        note = self.partial / "about.json"
        if note.is_file():
            self._check(json.loads(note.read_text()), self.partial)
            for part in sorted(self.partial.glob("part-*")):
                try:
                    rows.update(PartialScores.of(Scores.load(part)))
                except FileNotFoundError:  # a kill cut it short, or another process has finished
                    continue
                except (OSError, KeyError, ValueError) as error:
                    warnings.warn(f"skipping a part of an unfinished pass: {error}", stacklevel=4)
        else:
            self.partial.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.about)
            write_whole(note, lambda beside: beside.write_text(text))
        return rows

    def save_part(self, rows: PartialScores) -> None:
        if rows:
            rows.scores({"indices": list(rows)}).save(self.partial / f"part-{uuid.uuid4().hex}")

    def finish(self, scores: Scores) -> None:
        scores.save(self.done)
        shutil.rmtree(self.partial, ignore_errors=True)

    def _check(self, kept: dict[str, Any], where: Path) -> None:
        if kept.get("probe") != self.about["probe"]:
            raise ValueError(
                "the data differs from the data that was scored under this data_key: use another "
                f"data_key, or remove {where}"
            )
