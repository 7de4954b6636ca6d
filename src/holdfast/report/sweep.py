"""The Document of a sweep over α."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from holdfast.report.document import Column, Document, Figure, Section, Table
from holdfast.report.forgetting import settings_section
from holdfast.report.frontier import MOST, Axis, Point, frontier
from holdfast.report.plot import ACCENT, GAINED, Span
from holdfast.report.recommend import (
    Key,
    key_of,
    loss_of,
    recommend_alpha,
    retained,
    targets_of,
)
from holdfast.report.verdict import source_of
from holdfast.report.words import NONE, kind_of, level, nats, percent, plain

if TYPE_CHECKING:
    from holdfast.evaluate.report import Score
    from holdfast.evaluate.sweep import Sweep

__all__ = ["document"]

T = TypeVar("T")


def document(sweep: Sweep) -> Document:
    """Recommended α, frontier, distances and one table."""
    answer = recommend_alpha(sweep)
    first = sweep.points[0].report
    notes = dict.fromkeys(note for point in sweep.points for note in point.report.notes)
    return Document(
        kind="sweep over α",
        answer=answer,
        badge="No recommendation" if answer.alpha is None else f"α = {answer.alpha:g}",
        tone="info" if answer.alpha is None else "good",
        names=(sweep.base, sweep.tuned),
        sections=(
            _frontier(sweep, answer.alpha),
            Section(
                "Distance from the base",
                "How far the predictions and the weights are from the base model's at each α.",
                tuple(_distances(sweep, answer.alpha)),
            ),
            Section("All figures", tables=(_table(sweep, answer.alpha),)),
            Section("Not measured", notes=tuple(notes)),
            settings_section(first),
        ),
        download="sweep.json",
        version=first.versions.get("holdfast", ""),
    )


def _frontier(sweep: Sweep, chosen: float | None) -> Section:
    """The target against each retained test; without one of the two, the other against α."""
    keys = list(dict.fromkeys(key_of(s) for p in sweep.points for s in retained(p.report)))
    worst = {key: max(loss_of(point.report, key) for point in sweep.points) for key in keys}
    drawn = sorted(keys, key=worst.__getitem__, reverse=True)[:MOST]
    tests = [_score_axis(sweep, key) for key in keys if key in drawn]
    found = targets_of(sweep)
    target = _score_axis(sweep, key_of(found[0][1])) if found else None
    if target and tests:
        title = "What is learned and what is kept"
        about = "Right is better on the target, up is better on what should be kept; labels are α."
    else:
        title, about = "What is kept" if tests else "What is learned", "Up is better."
    about += " The dotted line is the base; whiskers are 95 % intervals of the change from it."
    if chosen is not None:
        about += " Green is recommended."
    if len(keys) > MOST:
        about += f" These are the {MOST} of {len(keys)} tests that lose most; the table has all."
    across = target if target and tests else _alphas(sweep)
    upwards = tests or ([target] if target else [])
    return Section(title, about, tuple(_figure(sweep, across, y, chosen) for y in upwards))


def _distances(sweep: Sweep, chosen: float | None) -> list[Figure]:
    """The divergences of the predictions and the drift of the weights, over α."""
    found = [{d.name: d for d in point.report.divergences} for point in sweep.points]
    names = list(dict.fromkeys(name for row in found for name in row))[:MOST]
    axes = []
    for name in names:
        rows = [row.get(name) for row in found]
        one = next(row for row in rows if row)
        title = f"Predictions on {source_of(one)}, nats per {plain(one.per)}"
        axes.append(Axis(title, _spans(rows, lambda d: Span(d.kl.value, d.kl.low, d.kl.high))))
    drifts = [point.report.drift for point in sweep.points]
    if any(drifts):
        spans = _spans(drifts, lambda drift: Span(100 * drift.total.relative))
        axes.append(Axis("Weights, ‖θ − θ*‖ / ‖θ*‖", spans, suffix=" %"))
    return [_figure(sweep, _alphas(sweep), y, chosen) for y in axes]


def _figure(sweep: Sweep, x: Axis, y: Axis, chosen: float | None) -> Figure:
    ends = {0.0: "base", 1.0: "tuned"}
    points = []
    for point, *spans in zip(sweep.points, x.spans, y.spans, strict=True):
        shown = zip((x, y), spans, strict=True)
        hover = [f"{axis.title}: {span.value:.4g}{axis.suffix}" for axis, span in shown]
        name = ends.get(point.alpha, f"{point.alpha:g}")
        points.append(Point(name, GAINED if point.alpha == chosen else ACCENT, tuple(hover)))
    return frontier(points, x, y, path=True)


def _alphas(sweep: Sweep) -> Axis:
    spans = [Span(point.alpha) for point in sweep.points]
    return Axis("α, from the base to the tuned model", spans)


def _score_axis(sweep: Sweep, key: Key) -> Axis:
    """A score at each α, with the interval of its change around it."""
    rows = [{key_of(s): s for s in p.report.scores}.get(key) for p in sweep.points]
    score = next(row for row in rows if row)
    scale = 100 if kind_of(score.metric) == "share" else 1

    def span(row: Score) -> Span:
        low, high = (
            None if bound is None or row.change.n == 1 else (row.before.value + bound) * scale
            for bound in (row.change.low, row.change.high)
        )
        return Span(row.after.value * scale, low, high)

    return Axis(
        f"{plain(score.name)}, {plain(score.metric)}",
        _spans(rows, span),
        start=score.before.value * scale,
        lower_is_better=score.lower_is_better,
        suffix=" %" if scale == 100 else "",
    )


def _spans(rows: Sequence[T | None], span: Callable[[T], Span]) -> list[Span]:
    return [Span(float("nan")) if row is None else span(row) for row in rows]


def _table(sweep: Sweep, chosen: float | None) -> Table:
    """One row per measured quantity and one column per α, targets first."""
    reports = [point.report for point in sweep.points]
    scores = [{key_of(score): score for score in report.scores} for report in reports]
    keys = dict.fromkeys(key for row in scores for key in row)
    rows = []
    for key in sorted(keys, key=lambda key: key[2] != "target"):
        name, metric, role = key
        values = (level(metric, row[key].after.value) if key in row else NONE for row in scores)
        rows.append((plain(name) + " (target)" * (role == "target"), plain(metric), *values))
    moved = [{(d.name, d.per): d.kl.value for d in report.divergences} for report in reports]
    for name, per in dict.fromkeys(key for row in moved for key in row):
        values = (nats(row[name, per]) if (name, per) in row else NONE for row in moved)
        rows.append((f"predictions, {plain(name)}", f"nats per {plain(per)}", *values))
    drifts = [report.drift for report in reports]
    if any(drifts):
        values = (percent(drift.total.relative) if drift else NONE for drift in drifts)
        rows.append(("weights", "of their norm", *values))
    heads = [f"α {p.alpha:g}{' ★' if p.alpha == chosen else ''}" for p in sweep.points]
    columns = (Column("measured"), Column("in", rank=1), *map(Column, heads))
    note = "" if chosen is None else "★ is the recommended α."
    return Table("By α", columns, tuple(rows), note, opened=True)
