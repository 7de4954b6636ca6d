"""The Document of a sweep over α."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from holdfast.report.document import Column, Document, Figure, Section, Table
from holdfast.report.forgetting import settings_section
from holdfast.report.frontier import MOST, Axis, Point, frontier
from holdfast.report.plot import ACCENT, GAINED, Span
from holdfast.report.recommend import key_of, loss_of, recommend_alpha
from holdfast.report.verdict import source_of
from holdfast.report.words import NONE, kind_of, level, nats, percent, plain

if TYPE_CHECKING:
    from holdfast.evaluate.report import Score
    from holdfast.evaluate.sweep import Sweep


class Quantity(NamedTuple):
    """Something that was measured at each α, as a row of the table and as an axis of a plot."""

    role: str  # "target", "retained" or "distance"
    row: tuple[str, ...]
    axis: Axis
    worst: float = 0.0  # the worst loss at any α


def document(sweep: Sweep) -> Document:
    """Recommended α, frontier, distances and one table."""
    answer = recommend_alpha(sweep)
    chosen, first = answer.alpha, sweep.points[0].report
    found = [*_scores(sweep), *_distances(sweep)]
    heads = [f"α {p.alpha:g}{' ★' if p.alpha == chosen else ''}" for p in sweep.points]
    table = Table(
        "By α",
        (Column("measured"), Column("in", rank=1), *map(Column, heads)),
        tuple(quantity.row for quantity in found),
        "" if chosen is None else "★ is the recommended α.",
        opened=True,
    )
    alphas = _alphas(sweep)
    distances = [_figure(sweep, alphas, q.axis, chosen) for q in found if q.role == "distance"]
    notes = dict.fromkeys(note for point in sweep.points for note in point.report.notes)
    return Document(
        kind="sweep over α",
        answer=answer,
        badge="No recommendation" if chosen is None else f"α = {chosen:g}",
        tone="info" if chosen is None else "good",
        names=(sweep.base, sweep.tuned),
        sections=(
            _frontier(sweep, found, chosen),
            Section(
                "Distance from the base",
                "How far the predictions and the weights are from the base model's at each α.",
                tuple(distances),
            ),
            Section("All figures", tables=(table,) if found else ()),
            Section("Not measured", notes=tuple(notes)),
            settings_section(first),
        ),
        download="sweep.json",
        version=first.versions.get("holdfast", ""),
    )


def _frontier(sweep: Sweep, found: list[Quantity], chosen: float | None) -> Section:
    """The target against each retained test; without one of the two, the other against α."""
    targets = [q.axis for q in found if q.role == "target"][:1]
    tests = [q for q in found if q.role == "retained"]
    worst = sorted(tests, key=lambda q: q.worst, reverse=True)[:MOST]
    drawn = [q.axis for q in tests if q in worst]
    if targets and drawn:
        title = "What is learned and what is kept"
        about = "Right is better on the target, up is better on what should be kept; labels are α."
    else:
        title, about = "What is kept" if drawn else "What is learned", "Up is better."
    about += " The dotted line is the base; whiskers are 95 % intervals of the change from it."
    if chosen is not None:
        about += " Green is recommended."
    if len(tests) > MOST:
        about += f" These are the {MOST} of {len(tests)} tests that lose most; the table has all."
    across = targets[0] if targets and drawn else _alphas(sweep)
    figures = (_figure(sweep, across, y, chosen) for y in drawn or targets)
    return Section(title, about, tuple(figures))


def _figure(sweep: Sweep, x: Axis, y: Axis, chosen: float | None) -> Figure:
    ends = {0.0: "base", 1.0: "tuned"}
    points = []
    for point, *spans in zip(sweep.points, x.spans, y.spans, strict=True):
        shown = zip((x, y), spans, strict=True)
        details = [f"{axis.title}: {span.value:.4g}{axis.suffix}" for axis, span in shown]
        name = ends.get(point.alpha, f"{point.alpha:g}")
        points.append(Point(name, GAINED if point.alpha == chosen else ACCENT, tuple(details)))
    return frontier(points, x, y, path=True)


def _alphas(sweep: Sweep) -> Axis:
    return Axis("α, from the base to the tuned model", [Span(p.alpha) for p in sweep.points])


def _scores(sweep: Sweep) -> Iterator[Quantity]:
    """The scores, targets first; intervals are those of the change."""
    found = [{key_of(score): score for score in point.report.scores} for point in sweep.points]
    keys = dict.fromkeys(key for row in found for key in row)
    for key in sorted(keys, key=lambda key: key[2] != "target"):
        name, metric, role = key
        scores = [row.get(key) for row in found]
        one = next(score for score in scores if score)
        scale = 100 if kind_of(metric) == "share" else 1
        texts = (level(metric, score.after.value) if score else NONE for score in scores)
        axis = Axis(
            f"{plain(name)}, {plain(metric)}",
            [_span(score, scale) if score else Span(math.nan) for score in scores],
            one.before.value * scale,
            one.lower_is_better,
            " %" if scale == 100 else "",
        )
        label = plain(name) + " (target)" * (role == "target")
        worst = max(loss_of(point.report, key) for point in sweep.points)
        yield Quantity(role, (label, plain(metric), *texts), axis, worst)


def _span(score: Score, scale: float) -> Span:
    low, high = (
        None if bound is None or score.change.n == 1 else (score.before.value + bound) * scale
        for bound in (score.change.low, score.change.high)
    )
    return Span(score.after.value * scale, low, high)


def _distances(sweep: Sweep) -> Iterator[Quantity]:
    """The divergences of the predictions and the drift of the weights."""
    found = [{(d.name, d.per): d for d in point.report.divergences} for point in sweep.points]
    for key in dict.fromkeys(key for row in found for key in row):
        rows = [row.get(key) for row in found]
        unit = f"nats per {plain(key[1])}"
        title = f"Predictions on {source_of(next(row for row in rows if row))}, {unit}"
        spans = [Span(d.kl.value, d.kl.low, d.kl.high) if d else Span(math.nan) for d in rows]
        texts = (nats(d.kl.value) if d else NONE for d in rows)
        row = (f"predictions, {plain(key[0])}", unit, *texts)
        yield Quantity("distance", row, Axis(title, spans))
    drifts = [point.report.drift for point in sweep.points]
    if any(drifts):
        spans = [Span(100 * d.total.relative if d else math.nan) for d in drifts]
        texts = (percent(d.total.relative) if d else NONE for d in drifts)
        axis = Axis("Weights, ‖θ − θ*‖ / ‖θ*‖", spans, suffix=" %")
        yield Quantity("distance", ("weights", "of their norm", *texts), axis)
