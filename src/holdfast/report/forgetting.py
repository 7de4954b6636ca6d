"""The Document of a forgetting report."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.report.document import Column, Document, Figure, Section, Table, Tone
from holdfast.report.drift_map import drift_map
from holdfast.report.plot import GAINED, LOST, SAME, Bar, Line, Span, bars, lines
from holdfast.report.verdict import verdict
from holdfast.report.words import NONE, Change, change_of, level, nats, percent, plain

if TYPE_CHECKING:
    from holdfast.evaluate.report import Divergence, Drift, DriftRow, ForgettingReport, Score

_LEVELS: dict[str, tuple[str, Tone]] = {
    "nothing": ("No loss found", "good"),
    "little": ("Little forgotten", "good"),
    "some": ("Some forgetting", "warn"),
    "much": ("Much forgotten", "bad"),
    "unknown": ("Not known", "info"),
}
#: Of an outcome: its name in a table, its tone, its color in a plot.
_OUTCOMES: dict[str, tuple[str, Tone, str]] = {
    "lost": ("lost", "bad", LOST),
    "gained": ("gained", "good", GAINED),
    "same": ("no measurable change", "", SAME),
    "unsure": ("no interval", "", SAME),
    "broken": ("not finite", "bad", LOST),
}
_HEADINGS = {
    "share": "Change in points",
    "nll": "Change of the loss, nats per token",
    "perplexity": "Change of the perplexity, %",
}
#: Rows of a drift table on the page, and in a terminal.
_ROWS, _BRIEF = 50, 10


def document(report: ForgettingReport) -> Document:
    """Verdict, scores, predictions, weights and training curves."""
    answer = verdict(report)
    badge, tone = _LEVELS[answer.level]
    drift, divergences = report.drift, report.divergences
    curves = [
        lines(plain(c.name), [Line(c.name, c.steps, c.values)], "step") for c in report.curves
    ]
    return Document(
        kind="forgetting report",
        answer=answer,
        badge=badge,
        tone=tone,
        names=(report.base, report.tuned),
        sections=(
            Section(
                "Before and after",
                "Red is lost and green is gained. Gray is within chance: the 95 % interval of the "
                "change includes 0.",
                tuple(_score_bars(report.scores)),
                (_score_table(report.scores),) if report.scores else (),
            ),
            Section(
                "Predictions",
                "How far the tuned model's predictions are from the base model's on the same "
                "inputs. Context-free inputs are texts that the base model generated.",
                tables=(_divergence_table(divergences),) if divergences else (),
            ),
            Section(
                "Weights",
                "How far the weights moved, in percent of their norm.",
                (drift_map(drift),) if drift and drift.layers else (),
                tuple(_drift_tables(drift)) if drift else (),
            ),
            Section("During training", figures=tuple(curves)),
            Section("Not measured", notes=report.notes),
            settings_section(report),
        ),
        download="forgetting-report.json",
        version=report.versions.get("holdfast", ""),
    )


def settings_section(report: ForgettingReport) -> Section:
    """How a report was measured."""
    settings, versions = report.settings, report.versions
    tables = Table.facts("Settings", settings), Table.facts("Versions", versions)
    return Section("How it was measured", tables=tuple(table for table in tables if table.rows))


def _score_bars(scores: Sequence[Score]) -> list[Figure]:
    """The changes of the scores, one figure per unit, the worst on top.

    The targets come last, in figures of their own: they are meant to change, and by more.
    """

    def loss(row: tuple[Score, Change]) -> float:
        change = row[1]
        return math.inf if change.outcome == "broken" else (-1, 1)[change.worse] * change.severity

    panels: dict[tuple[bool, str, bool], list[Bar]] = {}
    for score, change in sorted([(s, change_of(s)) for s in scores], key=loss, reverse=True):
        heading = _HEADINGS.get(change.kind, f"Change of {change.unit}")
        panel = score.role == "target", heading, score.lower_is_better
        panels.setdefault(panel, []).append(_change_bar(score, change))
    return [
        bars(f"The target: {heading[0].lower()}{heading[1:]}" if target else heading, rows, lower)
        for (target, heading, lower), rows in sorted(panels.items(), key=lambda item: item[0][0])
    ]


def _change_bar(score: Score, change: Change) -> Bar:
    before, after = (level(score.metric, e.value) for e in (score.before, score.after))
    outcome, _, color = _OUTCOMES[change.outcome]
    hover = (
        f"{before} → {after} {plain(score.metric)}: {outcome}",
        f"{change.signed}, 95 % interval {change.interval}",
        f"n = {score.change.n:,}",
    )
    span = Span(change.value, change.low, change.high)
    return Bar(score.name, span, change.figure, color, hover)


def _score_table(scores: Sequence[Score]) -> Table:
    """Before, after and the change of each test, targets last."""
    rows, tones = [], []
    for score in sorted(scores, key=lambda s: s.role == "target"):
        change = change_of(score)
        outcome, tone, _ = _OUTCOMES[change.outcome]
        tones.append(tone)
        rows.append(
            (
                plain(score.name) + (" (target)" if score.role == "target" else ""),
                plain(score.metric),
                level(score.metric, score.before.value),
                level(score.metric, score.after.value),
                change.signed,
                change.interval,
                f"{score.change.n:,}",
                outcome,
            )
        )
    columns = (
        Column("test"), Column("metric", rank=1), Column("before"), Column("after"),
        Column("change"), Column("95 % interval", rank=2), Column("n", rank=3),
        Column("outcome", rank=4),
    )  # fmt: skip
    return Table("Scores", columns, tuple(rows), tones=tuple(tones), opened=True)


def _divergence_table(divergences: Sequence[Divergence]) -> Table:
    rows = tuple(
        (
            plain(d.name),
            f"{nats(d.kl.value)} per {plain(d.per)}",
            _interval(d),
            f"{d.kl.n:,}",
            f"{d.predictions:,}",
            plain(d.how) if d.how else "",
        )
        for d in divergences
    )
    columns = (
        Column("inputs"), Column("KL(base‖tuned), nats"), Column("95 % interval", rank=2),
        Column("sequences", rank=3), Column("predictions", rank=4),
        Column("how", rank=5, prose=True),
    )  # fmt: skip
    return Table("Divergence of the predictions", columns, rows, opened=True)


def _interval(divergence: Divergence) -> str:
    low, high = divergence.kl.low, divergence.kl.high
    return NONE if low is None or high is None else f"{nats(low)} to {nats(high)}"


def _drift_tables(drift: Drift) -> list[Table]:
    """Drift by layer, kind and tensor, and the tensors that could not be compared."""
    tables = [
        _drift_table("Drift by layer", drift.layers, drift.total),
        _drift_table("Drift by kind of parameter", drift.kinds),
        _drift_table("Drift by tensor", drift.tensors),
    ]
    odd = {
        "holds NaN or infinity": drift.not_finite,
        "the tuned model lacks it": drift.only_base,
        "the base model lacks it": drift.only_tuned,
    }
    rows = tuple((plain(name), reason) for reason, names in odd.items() for name in names)
    columns = Column("name"), Column("reason")
    tables.append(Table("Tensors that were not compared", columns, rows, page_only=True))
    return [table for table in tables if table.rows]


def _drift_table(title: str, drifts: Sequence[DriftRow], total: DriftRow | None = None) -> Table:
    """The rows that moved most relative to their norm, after the total."""
    top = heapq.nlargest(_ROWS, drifts, key=lambda row: (row.relative, row.distance))
    named = [(plain(row.name), row) for row in top]
    rows = tuple(
        (name, percent(row.relative), f"{row.distance:.4g}", f"{row.norm:.4g}", f"{row.size:,}")
        for name, row in ([("all weights", total)] if total else []) + named
    )
    columns = tuple(map(Column, ("name", "relative", "distance", "norm", "weights")))
    note = f"The {len(top)} of {len(drifts)} that moved most." if len(top) < len(drifts) else ""
    return Table(title, columns, rows, note, brief=_BRIEF + 1, page_only=total is None)
