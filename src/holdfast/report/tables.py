"""The tables of a report as text, which Markdown, the terminal and the page show."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.evaluate.report import Divergence, Drift, DriftRow, ForgettingReport, Score
from holdfast.report.words import between, change_of, count, level, nats, percent, plain

OUTCOMES = {
    "lost": "lost",
    "gained": "gained",
    "same": "no measurable change",
    "unsure": "no interval",
    "broken": "not finite",
}


@dataclass(frozen=True)
class Table:
    """A title, a head, rows of text, and a line below them."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def main_tables(report: ForgettingReport, most: int = 10) -> list[Table]:
    """Scores, divergences and the layers that moved the most: what fits on a screen."""
    tables = []
    if report.scores:
        tables.append(scores_table(report.scores))
    if report.divergences:
        tables.append(divergences_table(report.divergences))
    if report.drift is not None:
        tables.append(
            drift_table(
                "Drift of the weights by layer", report.drift.layers, most, report.drift.total
            )
        )
    return tables


def all_tables(report: ForgettingReport, most: int = 50) -> list[Table]:
    """Those, and drift by kind and tensor, and what only one of the models has."""
    tables = main_tables(report, most)
    if (drift := report.drift) is not None:
        tables.append(drift_table("Drift by kind of parameter", drift.kinds, most))
        tables.append(drift_table("Drift by tensor", drift.tensors, most))
        tables += odd_tables(drift)
    return tables


def scores_table(scores: Sequence[Score]) -> Table:
    """Before, after and the change of each thing that was tested, targets last."""
    rows = []
    for score in sorted(scores, key=lambda s: s.role == "target"):
        change = change_of(score)
        name = plain(score.name) + (" (target)" if score.role == "target" else "")
        rows.append(
            (
                name,
                plain(score.metric),
                level(score.metric, score.before.value),
                level(score.metric, score.after.value),
                change.signed,
                between(change.low, change.high, change.unit),
                count(score.change.n),
                OUTCOMES[change.outcome],
            )
        )
    head = ("test", "metric", "before", "after", "change", "95 % interval", "n", "outcome")
    return Table("Scores", head, tuple(rows))


def divergences_table(divergences: Sequence[Divergence]) -> Table:
    """How far the predictions moved."""
    rows = tuple(
        (
            plain(d.name),
            f"{nats(d.kl.value)} a {plain(d.per)}",
            "–"
            if d.kl.low is None or d.kl.high is None
            else f"{nats(d.kl.low)} to {nats(d.kl.high)}",
            count(d.kl.n),
            count(d.predictions),
            plain(d.how) if d.how else "",
        )
        for d in divergences
    )
    head = ("inputs", "KL(base‖tuned), nats", "95 % interval", "sequences", "predictions", "how")
    return Table("Divergence of the predictions", head, rows)


def drift_table(
    title: str, drifts: Sequence[DriftRow], most: int, total: DriftRow | None = None
) -> Table:
    """The rows that moved the most, relative to their norm; the total last."""
    top = heapq.nlargest(most, drifts, key=lambda row: (row.relative, row.distance))
    rows = [_drift_row(row, plain(row.name)) for row in top]
    if total is not None:
        rows.append(_drift_row(total, "all weights"))
    note = f"The {len(top)} of {len(drifts)} that moved the most." if len(top) < len(drifts) else ""
    return Table(title, ("name", "relative", "distance", "norm", "weights"), tuple(rows), note)


def odd_tables(drift: Drift) -> list[Table]:
    """The tensors that could not be compared."""
    odd = {
        "Tensors with NaN or infinity": drift.not_finite,
        "Tensors that the tuned model lacks": drift.only_base,
        "Tensors that the base model lacks": drift.only_tuned,
    }
    return [
        Table(t, ("name",), tuple((plain(n),) for n in names)) for t, names in odd.items() if names
    ]


def _drift_row(row: DriftRow, name: str) -> tuple[str, ...]:
    return name, percent(row.relative), f"{row.distance:.4g}", f"{row.norm:.4g}", count(row.size)
