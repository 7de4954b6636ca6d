"""The Document of scored samples: their losses under the pretrained model, and their weights."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.report.document import Answer, Column, Document, Section, Table
from holdfast.report.words import digits, percent, plain

__all__ = ["document"]

_BAR, _TEXT = 30, 60  # characters


def document(summary: Mapping[str, Any], *, level: str, by_row: bool) -> Document:
    """Figures, histogram and both ends.

    Args:
        summary: the figures of ``holdfast score``.
        level: what has a weight: ``"samples"`` or ``"tokens"``.
        by_row: whether samples are named by their row in the data.
    """
    size, weights, tau = (summary[key] for key in ("effective_size", "weights", "tau"))
    rows, samples, median = (summary[key] for key in ("rows", "samples", "median_loss"))
    of_rows = "" if rows == samples else f" of {rows} row{'s' if rows != 1 else ''}"
    facts = {
        "samples": f"{samples}{of_rows}{', cut to length' if rows < samples else ''}",
        "without targets": f"{summary['without_targets']}",
        f"median loss{' (τ)' if tau == median else ''}": f"{median:.4g}",
        **({} if tau == median else {"τ": f"{tau:.4g}"}),
        "mean weight": f"{summary['mean_weight']:.3g}",
        "effective size": f"{size:.0f} of {weights} {level} ({percent(size / weights)})",
    }
    columns = (Column("figure"), Column("value", prose=True))
    named = Column("row" if by_row else "sample")
    tables = (
        Table("Summary", columns, tuple(facts.items())),
        _histogram(summary["histogram"]),
        *(_ends(end.title(), named, summary[end]) for end in ("hardest", "easiest")),
    )
    answer = Answer(f"{plain(summary['data'])} under {plain(summary['model'])}")
    sections = (Section("Scores", tables=tables),)
    return Document("scored samples", answer, "", "info", (), sections)


def _histogram(bins: Sequence[Mapping[str, float]]) -> Table:
    most = max(row["samples"] for row in bins)
    rows = []
    for row in bins:
        ends, bar = f"{row['low']:.3g} – {row['high']:.3g}", round(_BAR * row["samples"] / most)
        rows.append((ends, f"{row['samples']:.0f}", "█" * bar))
    columns = (Column("loss"), Column("samples"), Column("", prose=True))
    return Table("Losses", columns, tuple(rows))


def _ends(title: str, named: Column, samples: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for sample in samples:
        weight, text = sample["weight"], plain(str(sample["text"]))
        mean = statistics.fmean(weight) if isinstance(weight, list) else weight
        where = sample["index"] if sample["row"] is None else sample["row"]
        text = text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"
        rows.append((f"{where}", digits(sample["loss"], 3), digits(mean, 3), text))
    columns = (named, Column("loss"), Column("weight"), Column("text", rank=1, prose=True))
    return Table(title, columns, tuple(rows))
