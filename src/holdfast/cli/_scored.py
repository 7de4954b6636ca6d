"""What ``holdfast score`` found, for people and for programs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Sample", "Scored"]

_SHOWN, _BINS, _BAR, _TEXT = 5, 10, 30, 60  # samples of either end; bins; characters


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

    def __str__(self) -> str:
        found = self.summary()
        what = "tokens" if any(isinstance(w, list) for w in self.weights) else "samples"
        share = 100 * found["effective_size"] / found["weights"]
        size = f"{found['effective_size']:.0f} of {found['weights']} {what} ({share:.0f} %)"
        tau = "" if self.tau == found["median_loss"] else f"{self.tau:.4g}"
        facts = {
            "samples": f"{found['samples']}" + self._on_rows(),
            "without targets": f"{found['without_targets']}",
            "median loss" + ("" if tau else " (τ)"): f"{found['median_loss']:.4g}",
            "τ": tau,
            "mean weight": f"{found['mean_weight']:.3g}",
            "effective size": size,
        }
        lines = [f"  {name:<18}{value}" for name, value in facts.items() if value]
        which = "sample" if self.owners is None else "row"
        head = f"  {which:>7}  {'loss':>6}  {'weight':>6}"
        parts = [
            "\n".join([f"{self.data} under {self.model}", *lines]),
            "\n".join(["Losses:", *_bars(found["histogram"])]),
            *(
                "\n".join([f"{title}:", head, *map(_line, found[key])])
                for title, key in (("Hardest", "hardest"), ("Easiest", "easiest"))
            ),
        ]
        return "\n\n".join(parts)

    def _on_rows(self) -> str:
        """Where rows and samples are not the same number."""
        if self.rows == len(self.targets):
            return ""
        if self.rows < len(self.targets):
            return f" of {self.rows} {'row' if self.rows == 1 else 'rows'}, cut to length"
        return f" of {self.rows} rows"

    def _told(self, sample: Sample) -> dict[str, Any]:
        return {**asdict(sample), "text": self.texts[sample.index]}


def _flat(weight: float | list[float]) -> list[float]:
    return weight if isinstance(weight, list) else [weight]


def _histogram(losses: Sequence[float]) -> list[dict[str, float]]:
    """Bins of equal width up to the 99th percentile; what lies above counts to the last."""
    ordered = sorted(losses)
    low, top = ordered[0], ordered[int(0.99 * (len(ordered) - 1))]
    width = (top - low) / _BINS
    if width == 0:
        return [{"low": low, "high": ordered[-1], "samples": len(ordered)}]
    counts = [0] * _BINS
    for loss in ordered:
        counts[min(_BINS - 1, int((loss - low) / width))] += 1
    ends = [low + i * width for i in range(1, _BINS)] + [ordered[-1]]
    starts = [low, *ends[:-1]]
    return [
        {"low": a, "high": b, "samples": n} for a, b, n in zip(starts, ends, counts, strict=True)
    ]


def _bars(bins: Sequence[dict[str, float]]) -> list[str]:
    most = max(row["samples"] for row in bins)
    lines = []
    for row in bins:
        eighths = round(8 * _BAR * row["samples"] / most)
        bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        lines.append(f"  {row['low']:>7.3g} – {row['high']:<7.3g} {bar} {row['samples']:.0f}")
    return lines


def _line(sample: dict[str, Any]) -> str:
    text, weight = str(sample["text"]), statistics.fmean(_flat(sample["weight"]))
    text = text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"
    where = sample["index"] if sample["row"] is None else sample["row"]
    return f"  {where:>7}  {sample['loss']:>6.3f}  {weight:>6.3f}  {text}"
