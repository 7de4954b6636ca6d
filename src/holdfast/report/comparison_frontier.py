"""The frontier between what is learned and what is kept: a point for each recipe.

The target is to the right and what is kept upwards, better always to the right and up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.comparison.results import Summary
from holdfast.evaluate.report import Estimate
from holdfast.report.axes import Axis, Range, axis_of, drawable, inside, key_of, reaches, test_of
from holdfast.report.comparison_columns import tests_of
from holdfast.report.comparison_words import change_in, share, short_change
from holdfast.report.plot import JSON, NO_BOX, Plot, axis, base_layout, cut, escape, whiskers
from holdfast.report.point_labels import MARGIN, beside, placed
from holdfast.report.words import level, plain

__all__ = ["MOST", "color_of", "frontier_plot", "out_of_view", "pareto", "test_plots"]

#: Retained tests that are drawn at most; the tables have all.
MOST = 6
#: Pixels of a plot's inside: of one over the whole page, of one of a pair, and on a phone.
_WHOLE, _HALF, _PHONE = 910, 420, 215
#: Of most recipes, of standard fine-tuning, of the recommended one: drawn in this order.
_COLORS = ("var(--accent)", "var(--lost)", "var(--gained)")


@dataclass(frozen=True)
class _Point:
    """A recipe in a plot: medians, with the ranges of the seeds."""

    summary: Summary
    color: str
    x: Estimate
    y: Estimate


def frontier_plot(found: Sequence[Summary], chosen: str | None) -> Plot:
    """The target against the mean over the retained tests."""
    return _plot(found, chosen, _kept(found), 480, _WHOLE)


def out_of_view(found: Sequence[Summary]) -> list[str]:
    """The recipes that are too far off to be drawn there."""
    seen = [point.summary.label for point in _view(found, None, _kept(found))[3]]
    return [summary.label for summary in found if summary.label not in seen]


def test_plots(found: Sequence[Summary], chosen: str | None) -> list[Plot]:
    """The target against each retained test; of many, those that lose most."""

    def worst(key: tuple[str, str]) -> float:
        return max(-test.relative for s in found for test in s.retained if key_of(test) == key)

    keys = tests_of(found)
    drawn = sorted(keys, key=worst, reverse=True)[:MOST]
    axes = [axis_of(found, test_of(key)) for key in keys if key in drawn]
    return [_plot(found, chosen, one, 330, _HALF) for one in axes]


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """The points that no other beats on both, from left to right; more is better.

    >>> pareto([(1, 5), (2, 4), (1.5, 3), (3, 1)])
    [0, 1, 3]
    """
    order = sorted(range(len(points)), key=lambda i: points[i], reverse=True)
    found: list[int] = []
    for i in order:
        if not found or points[i][1] > points[found[-1]][1]:
            found.append(i)
    return found[::-1]


def color_of(summary: Summary, chosen: str | None) -> str:
    """Green is recommended, red is standard fine-tuning."""
    if summary.label == chosen:
        return _COLORS[2]
    return _COLORS[summary.recipe == "standard"]


def _plot(found: Sequence[Summary], chosen: str | None, y: Axis, height: int, width: int) -> Plot:
    """With a form of its own for phones, where the names have less room."""
    wide = _figure(found, chosen, y, height, width)
    return Plot(y.title, {**wide, "narrow": _figure(found, chosen, y, height, _PHONE)})


def _kept(found: Sequence[Summary]) -> Axis:
    values = [[100 * run.kept for run in summary.runs] for summary in found]
    return Axis("Mean change on the retained tests, relative to before", values, 0.0, False, " %")


def _view(
    found: Sequence[Summary], chosen: str | None, y: Axis
) -> tuple[Axis, Range, Range, list[_Point]]:
    """The target's axis, what is in view across and up, and the points there."""
    x = axis_of(found, lambda run: run.target)
    across, up = x.view(), y.view(y.start)
    if reaches(across, x.start):
        across = x.view(x.start)
    points = [
        _Point(summary, color_of(summary, chosen), *values)
        for summary, *values in zip(found, x.medians(), y.medians(), strict=True)
        if inside(across, values[0].value) and inside(up, values[1].value)
    ]
    return x, across, up, sorted(points, key=lambda point: _COLORS.index(point.color))


def _figure(found: Sequence[Summary], chosen: str | None, y: Axis, height: int, width: int) -> JSON:
    x, across, up, points = _view(found, chosen, y)
    layout = base_layout(height, margin={"l": 8, "r": MARGIN, "t": 26, "b": 8})
    right = f"{escape(cut(x.title, 40))}, better →"
    layout["xaxis"] = axis(range=list(across), ticksuffix=x.suffix, nticks=6, title=_title(right))
    layout["yaxis"] = axis(range=list(up), ticksuffix=y.suffix, nticks=6, title=_title("better →"))
    if drawable(y.start):
        layout["shapes"] = [_level(y.start)]
        layout["annotations"] = [] if inside(across, x.start) else [_pretrained(y.start)]
    traces = [
        _best(points, x, y),
        _dots(x, y, [found.index(point.summary) for point in points]),
        _points(points, _labels(points, (across, up), (width, height - 70), (x.start, y.start))),
        _start(x, y, across),
    ]
    return {"data": [trace for trace in traces if trace], "layout": layout}


def _labels(
    points: Sequence[_Point],
    view: tuple[Range, Range],
    inner: tuple[float, float],
    start: tuple[float, float],
) -> list[tuple[str, str]]:
    """Text and position of each name, the last first; no text where there is no room."""
    (left, right), (bottom, top) = view

    def pixel(x: float, y: float) -> tuple[float, float]:
        return (x - left) / (right - left) * inner[0], (top - y) / (top - bottom) * inner[1]

    pixels = [pixel(point.x.value, point.y.value) for point in points]
    if inside(view[0], start[0]):
        taken = beside("pretrained", pixel(*start), "bottom right")
    else:
        taken = beside("pretrained", pixel(right, start[1]), "top left")
    names = [cut(plain(point.summary.label), 22) for point in points]
    places = placed(names[::-1], pixels[::-1], *inner, [taken])[::-1]
    return [
        (name, place) if place else ("", "top right")
        for name, place in zip(names, places, strict=True)
    ]


def _points(points: Sequence[_Point], labels: Sequence[tuple[str, str]]) -> JSON:
    """The medians, with the seeds' ranges as whiskers."""
    marked = [point.color != _COLORS[0] for point in points]
    texts = [escape(text) for text, _ in labels]
    soft = {"color": "var(--whisker-soft)", "width": 0}
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": [point.x.value for point in points],
        "y": [point.y.value for point in points],
        "text": [f"<b>{t}</b>" if t and m else t for t, m in zip(texts, marked, strict=True)],
        "textposition": [place for _, place in labels],
        "textfont": {
            "size": 12,
            "color": [p.color if m else "var(--ink)" for p, m in zip(points, marked, strict=True)],
        },
        "cliponaxis": False,
        "marker": {
            "size": [14 if point.color == _COLORS[-1] else 10 for point in points],
            "color": [point.color for point in points],
            "opacity": 1,
            "line": {"width": 2, "color": "var(--card)"},
        },
        "error_x": {**whiskers([point.x for point in points]), **soft},
        "error_y": {**whiskers([point.y for point in points]), **soft},
        "customdata": [_hover(point) for point in points],
        "hovertemplate": f"%{{customdata}}{NO_BOX}",
    }


def _dots(x: Axis, y: Axis, seen: Sequence[int]) -> JSON | None:
    """Every seed, faint."""
    pairs = [
        pair
        for i in seen
        if len(x.seeds[i]) > 1
        for pair in zip(x.seeds[i], y.seeds[i], strict=False)
        if all(map(drawable, pair))
    ]
    marker = {"size": 5, "color": "var(--same)", "opacity": 0.7}
    return _trace("markers", pairs, marker=marker) if pairs else None


def _best(points: Sequence[_Point], x: Axis, y: Axis) -> JSON:
    """The line through what no other recipe beats on both."""
    signs = [-1 if one.lower_is_better else 1 for one in (x, y)]
    best = pareto([(signs[0] * point.x.value, signs[1] * point.y.value) for point in points])
    pairs = [(points[i].x.value, points[i].y.value) for i in best]
    return _trace("lines", pairs, line={"color": "var(--whisker-soft)", "width": 1.5})


def _start(x: Axis, y: Axis, across: Range) -> JSON | None:
    """The pretrained model, where it is in view."""
    if not (inside(across, x.start) and drawable(y.start)):
        return None
    line = {"width": 2, "color": "var(--same)"}
    marker = {"symbol": "diamond-open", "size": 10, "color": "var(--same)", "line": line}
    font = {"size": 12, "color": "var(--ink-2)"}
    more = {"text": ["pretrained"], "textposition": "bottom right", "textfont": font}
    return _trace("markers+text", [(x.start, y.start)], marker=marker, **more)


def _trace(mode: str, pairs: Sequence[tuple[float, float]], **more: object) -> JSON:
    return {
        "type": "scatter",
        "mode": mode,
        "x": [pair[0] for pair in pairs],
        "y": [pair[1] for pair in pairs],
        "hoverinfo": "skip",
        **more,
    }


def _hover(point: _Point) -> str:
    summary = point.summary
    best = ", recommended" if point.color == _COLORS[-1] else ""
    lines = [f"<b>{escape(plain(summary.label))}</b>{best}"]
    for test in (summary.target, *summary.retained[:MOST]):
        value = level(test.metric, test.after)
        lines.append(f"{escape(plain(test.name))}: {value} ({short_change(change_in(test))})")
    if summary.retained:
        lines.append(f"lost on average: {share(summary.loss)}")
    return "<br>".join(lines)


def _title(text: str) -> JSON:
    return {"text": text, "font": {"size": 12}, "standoff": 8}


def _level(value: float) -> JSON:
    """The pretrained model's, over the whole width."""
    line = {"color": "var(--same)", "width": 1.5, "dash": "dot"}
    ends = {"x0": 0, "x1": 1, "xref": "paper", "y0": value, "y1": value}
    return {"type": "line", "layer": "below", "line": line, **ends}


def _pretrained(value: float) -> JSON:
    """The name of that line, at its right end."""
    return {
        "text": "pretrained",
        "x": 1,
        "xref": "paper",
        "xanchor": "right",
        "y": value,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12, "color": "var(--ink-2)"},
    }
