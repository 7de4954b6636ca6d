"""What an encoder still knows of meaning: do texts that people find alike lie near each other?

Similarity("stsb", rows)                       # Spearman's correlation with what people said
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.adapters import without_peft
from holdfast._torch.batch import pad_id_of, to_device
from holdfast._torch.progress import progress_bar
from holdfast.data import Samples, pad_collate
from holdfast.evaluate.report import Estimate, Score
from holdfast.evaluate.stats import RESAMPLES, Array
from holdfast.io.labels import as_number, text_columns
from holdfast.io.models import Loaded
from holdfast.io.rows import Rows

__all__ = ["Numbers", "Similarity", "correlation", "pearson", "spearman"]

_SCORES = ("label", "score", "similarity")


@dataclass(frozen=True)
class Numbers:
    """What a model said of each sample, and what is true of it."""

    said: Sequence[float]
    true: Sequence[float]


@dataclass(frozen=True)
class Similarity:
    """How well the nearness of texts agrees with what people say of them.

    A text is the mean of the last hidden states of its tokens, as the model's body gives them; the
    nearness of two is the cosine between them. Works with or without a head, and whatever it is.

    Args:
        name: what to call it.
        rows: each with two texts (``sentence1`` and ``sentence2``, …) and a number (``label``,
            ``score`` or ``similarity``): the larger, the more alike.
        batch_size: texts at a time.
        role: of the row in the report.
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
        """The cosine of each pair."""
        tokenizer = loaded.need_tokenizer(f"the similarity of {self.name}")
        pairs = [self._row(i) for i in range(len(self.rows))]
        texts = sorted({text for one, other, _ in pairs for text in (one, other)})
        ids = [
            {"input_ids": list(tokenizer(t, truncation=True, max_length=loaded.limit)["input_ids"])}
            for t in texts
        ]
        found = dict(zip(texts, self._embedded(loaded, ids, progress), strict=True))
        said = [F.cosine_similarity(found[a], found[b], dim=0).item() for a, b, _ in pairs]
        return Numbers(said, [number for *_, number in pairs])

    def scores(self, before: Numbers, after: Numbers) -> list[Score]:
        """One row."""
        return [correlation(self.name, "spearman", before, after, self.role)]

    @torch.inference_mode()
    def _embedded(self, loaded: Loaded, ids: list[Any], progress: bool) -> list[Tensor]:
        model = without_peft(loaded.model)  # PEFT's own base_model is not the body
        body: Any = getattr(model, "base_model", model)
        collate = partial(pad_collate, pad_id=pad_id_of(loaded.model) or 0)
        found: dict[int, Tensor] = {}
        bar = progress_bar(len(ids), self.name, shown=progress)
        for indices, read in Samples(ids, collate, self.batch_size):
            batch = to_device(read(), loaded.device)
            states = getattr(body(**batch), "last_hidden_state", None)
            if states is None:
                raise ValueError(f"{type(body).__name__} gives no hidden states for {self.name}")
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
                f"({', '.join(_SCORES)}), and has {', '.join(map(str, row)) or 'nothing'}"
            )
        return row[columns[0]], row[columns[1]], score


def correlation(name: str, metric: str, before: Numbers, after: Numbers, role: str) -> Score:
    """Two models' correlation with the truth as a row of the report, with bootstrap intervals.

    The samples are resampled together: the same for both models.

    Args:
        name, role: of the row.
        metric: ``"spearman"`` or ``"pearson"``.
        before, after: of the base and of the tuned model, over the same samples.
    """
    measured = {"spearman": spearman, "pearson": pearson}[metric]
    groups = [_arrays(numbers) for numbers in (before, after)]
    n = len(before.said)
    values = [measured(*group) for group in groups]
    generator = np.random.default_rng(0)
    drawn = (generator.integers(0, n, size=n) for _ in range(RESAMPLES))
    resampled = np.asarray([_both(measured, groups, rows) for rows in drawn])
    old, new = (
        _interval(value, column, n) for value, column in zip(values, resampled.T, strict=True)
    )
    change = _interval(values[1] - values[0], resampled[:, 1] - resampled[:, 0], n)
    return Score(name, metric, lower_is_better=False, before=old, after=new, change=change,
                 role=role)  # fmt: skip


def spearman(said: Array, true: Array) -> float:
    """Spearman's ρ: the correlation of the ranks, equal values sharing theirs.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    1.0
    """
    return pearson(_ranks(said), _ranks(true))


def pearson(said: Array, true: Array) -> float:
    """Pearson's r; NaN where one of the two does not vary.

    >>> round(pearson(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])), 6)
    -1.0
    """
    x, y = said - said.mean(), true - true.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else float("nan")


def _ranks(values: Array) -> Array:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last: Array = np.cumsum(counts) - (counts - 1) / 2
    return last[place]


def _both(
    measured: Callable[[Array, Array], float], groups: Sequence[tuple[Array, Array]], rows: Any
) -> list[float]:
    return [measured(said[rows], true[rows]) for said, true in groups]


def _arrays(numbers: Numbers) -> tuple[Array, Array]:
    return np.asarray(numbers.said, np.float64), np.asarray(numbers.true, np.float64)


def _interval(value: float, resampled: Array, n: int) -> Estimate:
    known = resampled[np.isfinite(resampled)]
    if not np.isfinite(value) or not len(known):
        return Estimate(value, None, None, n)
    low, high = np.percentile(known, [2.5, 97.5])
    return Estimate(value, float(low), float(high), n)
