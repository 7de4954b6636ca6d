"""The Document of a forgetting report."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from holdfast.report.document import Column, Document, Figure, Section, Table, Tone
from holdfast.report.plot import bars, drift_map, lines
from holdfast.report.verdict import GRADES, verdict
from holdfast.report.words import Change, between, change_of, nats, percent, plain, score_text

if TYPE_CHECKING:
    from holdfast.evaluate.report import Divergence, Drift, DriftRow, ForgettingReport, Score

_GRADES: dict[str, Tone] = {
    "nothing": "good", "little": "good", "some": "warn", "much": "bad", "unknown": "info",
}  # fmt: skip
_TONES: dict[str, Tone] = {"lost": "bad", "not finite": "bad", "gained": "good"}
_HEADINGS = {
    "share": "Change in points",
    "nll": "Change of the loss, nats per token",
    "perplexity": "Change of the perplexity, %",
}
#: Rows of a drift table on the page, and in a terminal.
_ROWS, _BRIEF = 50, 10


def document(report: ForgettingReport) -> Document:
    answer = verdict(report)
    drift = report.drift
    return Document(
        kind="forgetting report",
        answer=answer,
        badge="Not known" if answer.forgotten == "unknown" else GRADES[answer.forgotten],
        tone=_GRADES[answer.forgotten],
        names=(report.base, report.tuned),
        sections=(
            Section(
                "Before and after",
                "Red is lost and green is gained. Gray is within chance: the 95 % interval of the "
                "change includes 0.",
                tuple(_change_figures(report.scores)),
                (_score_table(report.scores),),
            ),
            Section(
                "Predictions",
                "How far the tuned model's predictions are from the base model's on the same "
                "inputs. Context-free inputs are texts that the base model generated.",
                tables=(_divergence_table(report.divergences),),
            ),
            Section(
                "Weights",
                "How far the weights moved, in percent of their norm.",
                (drift_map(drift),) if drift and drift.layers else (),
                _drift_tables(drift) if drift else (),
            ),
            Section(
                "During training",
                "KL on texts sampled from the base was a training signal."
                if any(d.trained_on for d in report.divergences)
                else "",
                figures=tuple(lines(plain(c.name), {c.name: c}, "step", {}) for c in report.curves),
            ),
            Section("Not measured", notes=report.notes),
            Section.facts(
                "How it was measured", Settings=report.settings, Versions=report.versions
            ),
        ),
        download="forgetting-report.json",
    )


def _change_figures(scores: Sequence[Score]) -> Iterator[Figure]:
    """The changes of the scores, one figure per unit, the worst on top.

    The targets come last, in figures of their own: they are meant to change, and by more.
    """
    changes = [(score, change_of(score)) for score in scores]
    panels: dict[tuple[bool, str, bool], list[tuple[Score, Change]]] = {}
    for score, change in sorted(changes, key=lambda row: row[1].loss, reverse=True):
        heading = _HEADINGS.get(change.kind, f"Change of {change.unit}")
        panel = score.role == "target", heading, score.lower_is_better
        panels.setdefault(panel, []).append((score, change))
    for (target, heading, lower), rows in sorted(panels.items(), key=lambda item: item[0][0]):
        title = f"The target: {heading[0].lower()}{heading[1:]}" if target else heading
        yield bars(title, rows, lower)


def _score_table(scores: Sequence[Score]) -> Table:
    ordered = sorted(scores, key=lambda score: score.role == "target")
    columns: dict[Column, Callable[[Score], str]] = {
        Column("test"): lambda s: plain(s.name) + " (target)" * (s.role == "target"),
        Column("metric", rank=1): lambda s: plain(s.metric),
        Column("before"): lambda s: score_text(s.metric, s.before.value),
        Column("after"): lambda s: score_text(s.metric, s.after.value),
        Column("change"): lambda s: change_of(s).signed,
        Column("95 % interval", rank=2): lambda s: change_of(s).interval,
        Column("n", rank=3): lambda s: f"{s.change.n:,}",
        Column("outcome", rank=4): lambda s: change_of(s).outcome,
    }
    tones = tuple(_TONES.get(change_of(score).outcome, "") for score in ordered)
    return Table.of("Scores", ordered, columns, tones=tones, opened=True)


def _divergence_table(divergences: Sequence[Divergence]) -> Table:
    columns: dict[Column, Callable[[Divergence], str]] = {
        Column("inputs"): lambda d: plain(d.name),
        Column("KL(base‖tuned), nats"): lambda d: f"{nats(d.kl.value)} per {plain(d.per)}",
        Column("95 % interval", rank=2): lambda d: between(d.kl.low, d.kl.high),
        Column("sequences", rank=3): lambda d: f"{d.kl.n:,}",
        Column("predictions", rank=4): lambda d: f"{d.predictions:,}",
        Column("how", rank=5, prose=True): _how,
    }
    return Table.of("Divergence of the predictions", divergences, columns, opened=True)


def _how(divergence: Divergence) -> str:
    said = [plain(divergence.how)] if divergence.how else []
    return "; ".join([*said, *["a training signal, no evidence"] * divergence.trained_on])


def _drift_tables(drift: Drift) -> tuple[Table, ...]:
    odd = {
        "holds NaN or infinity": drift.not_finite,
        "the tuned model lacks it": drift.only_base,
        "the base model lacks it": drift.only_tuned,
    }
    rows = tuple((plain(name), reason) for reason, names in odd.items() for name in names)
    columns = Column("name"), Column("reason")
    return (
        _drift_table("Drift by layer", drift.layers, drift.total),
        _drift_table("Drift by kind of parameter", drift.kinds),
        _drift_table("Drift by tensor", drift.tensors),
        Table("Tensors that were not compared", columns, rows, page_only=True),
    )


def _drift_table(title: str, drifts: Sequence[DriftRow], total: DriftRow | None = None) -> Table:
    """The rows that moved most relative to their norm, after the total."""
    top = heapq.nlargest(_ROWS, drifts, key=lambda row: (row.relative, row.distance))
    columns: dict[Column, Callable[[DriftRow], str]] = {
        Column("name"): lambda row: "all weights" if row is total else plain(row.name),
        Column("relative"): lambda row: percent(row.relative),
        Column("distance"): lambda row: f"{row.distance:.4g}",
        Column("norm"): lambda row: f"{row.norm:.4g}",
        Column("weights"): lambda row: f"{row.size:,}",
    }
    note = f"The {len(top)} of {len(drifts)} that moved most." if len(top) < len(drifts) else ""
    rows = [total, *top] if total else top
    return Table.of(title, rows, columns, note=note, brief=_BRIEF + 1, page_only=total is None)
