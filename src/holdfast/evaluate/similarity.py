"""Does an encoder still place texts of similar meaning close to each other?

Similarity("stsb", rows)                       # Spearman correlation with human ratings
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.adapters import without_peft
from holdfast._torch.batch import pad_id_of, to_device
from holdfast._torch.imports import require
from holdfast._torch.progress import progress_bar
from holdfast.data import IndexedSource, pad_collate
from holdfast.evaluate.report import Estimate, Score
from holdfast.evaluate.stats import RESAMPLES, Array
from holdfast.io.labels import as_number, text_columns
from holdfast.io.models import Loaded
from holdfast.io.rows import Rows

__all__ = ["Numbers", "Similarity", "correlation", "pearson", "spearman"]

_SCORES = ("label", "score", "similarity")


@dataclass(frozen=True)
class Numbers:
    """The prediction of a model for each sample, and the true value."""

    predicted: Sequence[float]
    true: Sequence[float]


@dataclass(frozen=True)
class Similarity:
    """How well the similarity of embeddings agrees with human ratings.

    The embedding of a text is the mean of the body's last hidden states over its tokens. Two texts
    are compared by their cosine similarity. The model's head, if any, is not used.

    Args:
        name: the name in the report.
        rows: each with two texts (``sentence1`` and ``sentence2``, …) and a number (``label``,
            ``score`` or ``similarity``) that grows with the similarity.
        batch_size: texts per batch.
        role: the role in the report.
    """

    name: str
    rows: Rows
    batch_size: int = 64
    role: Literal["retained", "target"] = "retained"

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise ValueError(f"{self.name} has no rows")
        for number in range(len(self.rows)):
            self._row(number)

    def run(self, loaded: Loaded, *, progress: bool) -> Numbers:
        """Return the cosine similarity of each pair."""
        tokenizer = loaded.need_tokenizer(f"the similarity of {self.name}")
        pairs = [self._row(i) for i in range(len(self.rows))]
        texts = sorted({text for one, other, _ in pairs for text in (one, other)})
        ids = [
            {"input_ids": list(tokenizer(t, truncation=True, max_length=loaded.limit)["input_ids"])}
            for t in texts
        ]
        found = dict(zip(texts, self._embedded(loaded, ids, progress), strict=True))
        predicted = [F.cosine_similarity(found[a], found[b], dim=0).item() for a, b, _ in pairs]
        return Numbers(predicted, [number for *_, number in pairs])

    def scores(self, before: Numbers, after: Numbers) -> list[Score]:
        """Return one row."""
        return [correlation(self.name, "spearman", before, after, self.role)]

    @torch.inference_mode()
    def _embedded(self, loaded: Loaded, ids: list[Any], progress: bool) -> list[Tensor]:
        model = without_peft(loaded.model)  # PEFT's own base_model is not the body
        body: Any = getattr(model, "base_model", model)
        collate = partial(pad_collate, pad_id=pad_id_of(loaded.model) or 0)
        found: dict[int, Tensor] = {}
        bar = progress_bar(len(ids), self.name, shown=progress)
        for indices, read in IndexedSource(ids, collate, self.batch_size):
            batch = to_device(read(), loaded.device)
            states = getattr(body(**batch), "last_hidden_state", None)
            if states is None:
                raise ValueError(
                    f"{self.name} needs hidden states, which {type(body).__name__} does not return"
                )
            mask = batch["attention_mask"][:, :, None].to(torch.float32)
            means = (states.float() * mask).sum(1) / mask.sum(1)
            found |= dict(zip(indices, means.cpu(), strict=True))
            bar.update(len(indices))
        bar.close()
        return [found[i] for i in range(len(ids))]

    def _row(self, number: int) -> tuple[str, str, float]:
        row = self.rows[number]
        columns = text_columns(row)
        score = next((as_number(row[c]) for c in _SCORES if row.get(c) is not None), None)
        if len(columns) != 2 or score is None:
            raise ValueError(
                f"{self.name}: row {number} needs two texts (sentence1, sentence2) and a number "
                f"({', '.join(_SCORES)}), but has {', '.join(map(str, row)) or 'no columns'}"
            )
        return row[columns[0]], row[columns[1]], score


def correlation(name: str, metric: str, before: Numbers, after: Numbers, role: str) -> Score:
    """Return the correlation of two models' predictions with the truth as a score.

    The bootstrap intervals resample the same samples for both models.

    Args:
        name, role: name and role of the score.
        metric: ``"spearman"`` or ``"pearson"``.
        before, after: the predictions of the base and of the tuned model on the same samples.
    """
    measured = {"spearman": spearman, "pearson": pearson}[metric]
    pairs = [(np.asarray(n.predicted, float), np.asarray(n.true, float)) for n in (before, after)]
    n = len(before.predicted)
    values = [measured(*pair) for pair in pairs]
    generator = np.random.default_rng(0)
    drawn = (generator.integers(0, n, size=n) for _ in range(RESAMPLES))
    resampled = np.asarray([[measured(p[rows], t[rows]) for p, t in pairs] for rows in drawn])
    old, new = (
        _interval(value, column, n) for value, column in zip(values, resampled.T, strict=True)
    )
    change = _interval(values[1] - values[0], resampled[:, 1] - resampled[:, 0], n)
    return Score(name, metric, lower_is_better=False, before=old, after=new, change=change,
                 role=role)  # fmt: skip


def spearman(predicted: Array, true: Array) -> float:
    """Return Spearman's ρ, with average ranks for ties.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    1.0
    """
    rank = require("scipy.stats", extra="eval", what="rank correlation").rankdata
    return pearson(*rank([predicted, true], axis=1))


def pearson(predicted: Array, true: Array) -> float:
    """Return Pearson's r; NaN if one of the two is constant.

    >>> round(pearson(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])), 6)
    -1.0
    """
    x, y = predicted - predicted.mean(), true - true.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else float("nan")


def _interval(value: float, resampled: Array, n: int) -> Estimate:
    known = resampled[np.isfinite(resampled)]
    if not np.isfinite(value) or not len(known):
        return Estimate(value, None, None, n)
    low, high = np.percentile(known, [2.5, 97.5])
    return Estimate(value, float(low), float(high), n)
