"""Scored samples: their losses under the pretrained model, their weights, and their Document."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from holdfast.report.document import Answer, Column, Document, Section, Table
from holdfast.report.words import digits, percent, plain

_SHOWN, _BINS = 5, 10  # samples of either end; bins of the histogram
_BAR, _TEXT = 30, 60  # characters


@dataclass(frozen=True)
class Sample:
    """A line of ``weights.jsonl``."""

    index: int  # in the order of the scores
    row: int  # of the data, from 0
    loss: float | None  # None for a sample without targets
    weight: float | list[float]  # of the sample, or one per target
    targets: int  # the number of target tokens, or 1


@dataclass(frozen=True)
class Scored:
    model: str
    data: str
    rows: int  # of the data; a row may give no sample, or several
    tau: float  # the temperature of the weights
    samples: Sequence[Sample]
    texts: Sequence[str]  # how each sample begins

    def summary(self) -> dict[str, Any]:
        known = [(s.loss, s) for s in self.samples if s.loss is not None]
        losses = [loss for loss, _ in known]
        weights = (s.weight if isinstance(s.weight, list) else [s.weight] for _, s in known)
        flat = list(itertools.chain.from_iterable(weights))
        known.sort(key=lambda pair: pair[0])
        ordered = [{**asdict(s), "text": self.texts[s.index]} for _, s in known]
        empty = self.rows - len({s.row for s in self.samples})
        return {
            "model": self.model,
            "data": self.data,
            "rows": self.rows,
            "samples": len(self.samples),
            "without_targets": len(self.samples) - len(known) + empty,
            "median_loss": statistics.median(losses),
            "tau": self.tau,
            "mean_weight": statistics.fmean(flat),
            "weights": len(flat),
            "effective_size": sum(flat) ** 2 / sum(w * w for w in flat),
            "hardest": ordered[::-1][:_SHOWN],
            "easiest": ordered[:_SHOWN],
            "histogram": _histogram(losses),
        }

    def document(self) -> Document:
        summary = self.summary()
        size, weights, median = (summary[k] for k in ("effective_size", "weights", "median_loss"))
        rows, samples = self.rows, len(self.samples)
        of_rows = "" if rows == samples else f" of {rows} row{'s' if rows != 1 else ''}"
        level = "tokens" if any(isinstance(s.weight, list) for s in self.samples) else "samples"
        facts = {
            "samples": f"{samples}{of_rows}{', cut to length' if rows < samples else ''}",
            "without targets": f"{summary['without_targets']}",
            f"median loss{' (τ)' if self.tau == median else ''}": f"{median:.4g}",
            **({} if self.tau == median else {"τ": f"{self.tau:.4g}"}),
            "mean weight": f"{summary['mean_weight']:.3g}",
            "effective size": f"{size:.0f} of {weights} {level} ({percent(size / weights)})",
        }
        columns = (Column("figure"), Column("value", prose=True))
        tables = (
            Table("Summary", columns, tuple(facts.items())),
            _bars(summary["histogram"]),
            *(_ends(end.title(), summary[end]) for end in ("hardest", "easiest")),
        )
        answer = Answer(f"{plain(self.data)} under {plain(self.model)}")
        sections = (Section("Scores", tables=tables),)
        return Document("scored samples", answer, "", "info", (), sections)


def _histogram(losses: Sequence[float]) -> list[dict[str, float]]:
    """Bins of equal width up to the 99th percentile; the last bin holds everything above."""
    low, high = min(losses), max(losses)
    top = float(np.quantile(losses, 0.99, method="lower"))
    if top == low:
        return [{"low": low, "high": high, "samples": len(losses)}]
    edges = [*np.linspace(low, top, _BINS + 1)[:-1].tolist(), high]
    counts, _ = np.histogram(losses, edges)
    bins = zip(edges[:-1], edges[1:], counts.tolist(), strict=True)
    return [{"low": low, "high": high, "samples": n} for low, high, n in bins]


def _bars(bins: Sequence[Mapping[str, float]]) -> Table:
    most = max(row["samples"] for row in bins)
    columns: dict[Column, Callable[[Mapping[str, float]], str]] = {
        Column("loss"): lambda row: f"{row['low']:.3g} – {row['high']:.3g}",
        Column("samples"): lambda row: f"{row['samples']:.0f}",
        Column("", prose=True): lambda row: "█" * round(_BAR * row["samples"] / most),
    }
    return Table.of("Losses", bins, columns)


def _ends(title: str, samples: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for sample in samples:
        weight, text = sample["weight"], plain(sample["text"])
        mean = statistics.fmean(weight) if isinstance(weight, list) else weight
        text = text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"
        rows.append((f"{sample['row']}", digits(sample["loss"], 3), digits(mean, 3), text))
    columns = (Column("row"), Column("loss"), Column("weight"))
    return Table(title, (*columns, Column("text", rank=1, prose=True)), tuple(rows))
