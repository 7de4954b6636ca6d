"""The Document of a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from holdfast.report.document import Column, Document, Figure, Section, Table
from holdfast.report.frontier import MOST, Axis, Mark, frontier
from holdfast.report.plot import ACCENT, GAINED
from holdfast.report.recommend import recommend_point
from holdfast.report.verdict import MERGED_ROWS, no_evidence, on_tokens, source_of
from holdfast.report.words import (
    NONE,
    Span,
    change_of,
    listed,
    nats,
    percent,
    plain,
    score_text,
    settings_text,
    symbol,
)

if TYPE_CHECKING:
    from holdfast.evaluate.report import ForgettingReport
    from holdfast.evaluate.sweep import Sweep


_ROLES = ("target", "retained", "distance")


class Quantity(NamedTuple):
    """Something that was measured at each point, as a row of the table and an axis of a plot."""

    role: str
    row: tuple[str, ...]
    axis: Axis
    worst: float = 0.0  # the worst loss at any point


def document(sweep: Sweep) -> Document:
    answer = recommend_point(sweep)
    chosen, first = answer.settings, sweep.points[0].report
    found, signal = list(_quantities(sweep)), _signal(sweep)
    names = listed([symbol(name) for name in sweep.points[0].settings])
    heads = [
        f"{settings_text(p.settings).replace(' = ', ' ')}{' ★' if p.settings == chosen else ''}"
        for p in sweep.points
    ]
    table = Table(
        f"By {names}",
        (Column("measured"), Column("in", rank=1), *map(Column, heads)),
        tuple(quantity.row for quantity in found),
        " ".join(
            filter(None, ["" if chosen is None else f"★ is the recommended {names}.", signal])
        ),
        opened=True,
    )
    first_setting = next(iter(sweep.points[0].settings))
    values = Axis(symbol(first_setting), [Span(p.settings[first_setting]) for p in sweep.points])
    distances = [q.axis for q in found if q.role == "distance"]
    notes = dict.fromkeys(note for point in sweep.points for note in point.report.notes)
    for drift in (point.report.drift for point in sweep.points):
        if drift is not None and drift.vocabulary is not None:
            notes[f"{on_tokens(drift.vocabulary)} {MERGED_ROWS}"] = None
    return Document(
        kind=f"sweep over {names}",
        answer=answer,
        badge="No recommendation" if chosen is None else settings_text(chosen),
        tone="info" if chosen is None else "good",
        names=(sweep.base, sweep.tuned),
        sections=(
            _frontier(sweep, values, found, chosen),
            Section(
                "Distance from the base",
                "How far the predictions and the weights are from the base model's at each "
                f"{names}.{f' {signal}' if signal else ''}",
                tuple(_figure(sweep, values, axis, chosen) for axis in distances),
            ),
            Section("All figures", tables=(table,)),
            Section("Not measured", notes=tuple(notes)),
            Section.facts(
                "How it was measured",
                Settings={"method": sweep.method, **first.settings},
                Versions=first.versions,
            ),
        ),
        download="sweep.json",
    )


def _signal(sweep: Sweep) -> str:
    """The sentence about divergences that were a training signal; empty without one."""
    found = (d for point in sweep.points for d in point.report.divergences if d.trained_on)
    trained = list(dict.fromkeys(map(source_of, found)))
    return no_evidence(listed(trained)) if trained else ""


def _frontier(
    sweep: Sweep, values: Axis, found: list[Quantity], chosen: dict[str, float] | None
) -> Section:
    """The target against each retained test; without one, the other against the setting."""
    targets = [q.axis for q in found if q.role == "target"][:1]
    tests = [q for q in found if q.role == "retained"]
    worst = sorted(tests, key=lambda q: q.worst, reverse=True)[:MOST]
    drawn = [q.axis for q in tests if q in worst]
    if targets and drawn:
        title = "What is learned and what is kept"
        about = (
            "Right is better on the target, up is better on what should be kept; labels are "
            f"{listed([symbol(name) for name in sweep.points[0].settings])}."
        )
    else:
        title, about = "What is kept" if drawn else "What is learned", "Up is better."
    about += " The dotted line is the base; whiskers are 95 % intervals of the change from it."
    if chosen is not None:
        about += " Green is recommended."
    if len(tests) > MOST:
        about += f" These are the {MOST} of {len(tests)} tests that lose most; the table has all."
    across = targets[0] if targets and drawn else values
    return Section(title, about, tuple(_figure(sweep, across, y, chosen) for y in drawn or targets))


def _figure(sweep: Sweep, x: Axis, y: Axis, chosen: dict[str, float] | None) -> Figure:
    marks = []
    for point, *spans in zip(sweep.points, x.spans, y.spans, strict=True):
        shown = zip((x, y), spans, strict=True)
        details = [f"{axis.title}: {span.value:.4g}{axis.suffix}" for axis, span in shown]
        values = ", ".join(f"{value:g}" for value in point.settings.values())
        name = values if point.kind == "merged" else point.kind
        marks.append(Mark(name, GAINED if point.settings == chosen else ACCENT, tuple(details)))
    return frontier(marks, x, y, path=len(sweep.points[0].settings) == 1)


def _quantities(sweep: Sweep) -> Iterator[Quantity]:
    """Targets first, distances last."""
    rows = [_measured(point.report) for point in sweep.points]
    keys = dict.fromkeys(key for row in rows for key in row)
    for key in sorted(keys, key=lambda key: _ROLES.index(key[0])):
        known = [row[key] for row in rows if key in row]
        spans = [row[key][0].spans[0] if key in row else Span(math.nan) for row in rows]
        texts = (row[key][1] if key in row else NONE for row in rows)
        axis = replace(known[-1][0], spans=spans)  # the first may be the base, which is untrained
        role, name, unit = key
        yield Quantity(role, (name, unit, *texts), axis, max(loss for *_, loss in known))


def _measured(report: ForgettingReport) -> dict[tuple[str, str, str], tuple[Axis, str, float]]:
    """Axis, text and loss at one point, by role, name and unit. Intervals are of the change."""
    found = {}
    for score in report.scores:
        low, high = (
            None if end is None or score.change.n == 1 else score.before.value + end
            for end in (score.change.low, score.change.high)
        )
        value, start, lower = score.after.value, score.before.value, score.lower_is_better
        axis = Axis.of_test(score.name, score.metric, [Span(value, low, high)], start, lower)
        name = plain(score.name) + " (target)" * (score.role == "target")
        text = score_text(score.metric, value)
        found[score.role, name, plain(score.metric)] = axis, text, change_of(score).loss
    for d in report.divergences:
        unit = f"nats per {plain(d.per)}"
        title = f"Predictions on {source_of(d)}, {unit}" + " (training signal)" * d.trained_on
        axis = Axis(title, [Span(d.kl.value, d.kl.low, d.kl.high)])
        found["distance", f"predictions, {plain(d.name)}", unit] = axis, nats(d.kl.value), 0.0
    if report.drift:
        share = report.drift.total.relative
        axis = Axis("Weights, ‖θ − θ*‖ / ‖θ*‖", [Span(100 * share)], suffix=" %")
        found["distance", "weights", "of their norm"] = axis, percent(share), 0.0
    return found
