"""What ``holdfast score`` found, for people and for programs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from holdfast.report import scored
from holdfast.report.document import Document

__all__ = ["Sample", "Scored"]

_SHOWN, _BINS = 5, 10  # samples of either end; bins of the histogram


@dataclass(frozen=True)
class Sample:
    """A line of ``weights.jsonl``.

    Attributes:
        index: in the order of the scores.
        row: of the data, from 0; None where it cannot be told.
        loss: None for a sample without targets.
        weight: or one a target token.
        targets: how many there are: target tokens, or 1.
    """

    index: int
    row: int | None
    loss: float | None
    weight: float | list[float]
    targets: int


@dataclass(frozen=True)
class Scored:
    """Losses and weights of a dataset.

    Attributes:
        model, data: what they are called.
        rows: how many the data has.
        tau: FLOW's temperature.
        losses, weights, targets: of each sample; weights may be one a target.
        owners: the row of each sample; None where that cannot be told.
        texts: how each begins.
    """

    model: str
    data: str
    rows: int
    tau: float
    losses: Sequence[float]
    weights: Sequence[float | list[float]]
    targets: Sequence[int]
    owners: Sequence[int] | None
    texts: Sequence[str]

    def samples(self) -> list[Sample]:
        """Each sample, in the data's order."""
        return [
            Sample(
                index=i,
                row=self.owners[i] if self.owners else None,
                loss=self.losses[i] if targets else None,
                weight=self.weights[i],
                targets=targets,
            )
            for i, targets in enumerate(self.targets)
        ]

    def summary(self) -> dict[str, Any]:
        """The figures as plain values."""
        known = [s for s in self.samples() if s.loss is not None]
        losses = [s.loss for s in known if s.loss is not None]
        flat = [w for s in known for w in _flat(s.weight)]
        ordered = sorted(known, key=lambda s: s.loss or 0.0)
        without = len(self.targets) - len(known)
        if self.owners is not None:
            without += self.rows - len(set(self.owners))
        return {
            "model": self.model,
            "data": self.data,
            "rows": self.rows,
            "samples": len(self.targets),
            "without_targets": without,
            "median_loss": statistics.median(losses),
            "tau": self.tau,
            "mean_weight": statistics.fmean(flat),
            "weights": len(flat),
            "effective_size": sum(flat) ** 2 / sum(w * w for w in flat),
            "hardest": [self._told(s) for s in ordered[::-1][:_SHOWN]],
            "easiest": [self._told(s) for s in ordered[:_SHOWN]],
            "histogram": _histogram(losses),
        }

    def document(self) -> Document:
        """The figures in the form that the terminal shows."""
        level = "tokens" if any(isinstance(w, list) for w in self.weights) else "samples"
        return scored.document(self.summary(), level=level, by_row=self.owners is not None)

    def _told(self, sample: Sample) -> dict[str, Any]:
        return {**asdict(sample), "text": self.texts[sample.index]}


def _flat(weight: float | list[float]) -> list[float]:
    return weight if isinstance(weight, list) else [weight]


def _histogram(losses: Sequence[float]) -> list[dict[str, float]]:
    """Bins of equal width up to the 99th percentile; the last bin holds everything above."""
    low, high = min(losses), max(losses)
    top = float(np.quantile(losses, 0.99, method="lower"))
    if top == low:
        return [{"low": low, "high": high, "samples": len(losses)}]
    edges = [*np.linspace(low, top, _BINS + 1)[:-1].tolist(), high]
    counts, _ = np.histogram(losses, edges)
    return [
        {"low": a, "high": b, "samples": n}
        for a, b, n in zip(edges, edges[1:], counts.tolist(), strict=False)
    ]
