"""The frontier between what was learned and what was kept: one point per model.

The target is to the right and a retained test upwards; better is always to the right and up.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.report.document import Figure
from holdfast.report.plot import (
    ACCENT,
    GAINED,
    JSON,
    LOST,
    NO_BOX,
    Span,
    axis,
    drawable,
    escape,
    layout,
    whiskers,
)
from holdfast.report.words import cut, plain

__all__ = ["MOST", "Axis", "Point", "frontier", "pareto"]

#: Retained tests that are drawn at most; the tables have all.
MOST = 6
#: Pixels of a plot's inside: over the whole page, over half of it, on a phone.
_WHOLE, _HALF, _PHONE = 910, 420, 215
#: A value that is worse than the worst quarter by this many interquartile ranges is out of view.
_FAR = 10
#: Points are drawn in this order.
_ORDER = (ACCENT, LOST, GAINED)
#: Pixels: of a letter, of a line of text, of a point's radius, and room for text at the right.
_LETTER, _LINE, _DOT, _MARGIN = 7.0, 15.0, 6.0, 30.0
_PLACES = (
    "top right", "middle right", "bottom right", "top left", "middle left", "bottom left",
    "top center", "bottom center",
)  # fmt: skip
_SOFT = "var(--whisker-soft)"

Pair = tuple[float, float]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Point:
    """A model.

    Attributes:
        name: its label.
        color: green is recommended, red is standard fine-tuning.
        hover: the details, one line each.
    """

    name: str
    color: str
    hover: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """One measured quantity of all models.

    Attributes:
        title: what it is.
        spans: the value of each model, with its interval.
        seeds: the value of each run of each model; empty if there is only one.
        start: of the model before fine-tuning; None draws nothing.
        lower_is_better: whether the axis is reversed; None if neither end is better.
        suffix: of the numbers.
    """

    title: str
    spans: Sequence[Span]
    seeds: Sequence[Sequence[float]] = ()
    start: float | None = None
    lower_is_better: bool | None = None
    suffix: str = ""

    @property
    def sign(self) -> int:
        """−1 if the axis is reversed."""
        return -1 if self.lower_is_better else 1

    def view(self, *more: float | None) -> Pair:
        """The worse and the better end; a value far worse than all others is out of view."""
        rows = self.seeds or self.spans
        values = sorted(self.sign * x for row in rows for x in row if x is not None and drawable(x))
        if len(values) > 3:
            low, _, high = statistics.quantiles(values, method="inclusive")
            values = [x for x in values if x >= low - _FAR * max(high - low, 1e-3 * abs(low))]
        values += [self.sign * x for x in more if x is not None and drawable(x)]
        low, high = min(values, default=0.0), max(values, default=1.0)
        room = 0.09 * (high - low) or 0.1 * abs(high) or 1.0
        return self.sign * (low - room), self.sign * (high + room)


def frontier(
    points: Sequence[Point], x: Axis, y: Axis, *, path: bool = False, wide: bool = False
) -> Figure:
    """Draw models by two quantities; the figure's title is that of ``y``.

    Args:
        points: the models, in the order of the axes' values.
        x, y: the axes.
        path: join all points in their order; else join those that no other beats on both axes.
        wide: take the whole width of the page.
    """
    across, up, seen = _view(x, y)
    joined = seen
    if not path:
        both = [(x.sign * x.spans[i].value, y.sign * y.spans[i].value) for i in seen]
        joined = [seen[k] for k in pareto(both)]
    line = [(x.spans[i].value, y.spans[i].value) for i in joined]
    order = sorted(seen, key=lambda i: _ORDER.index(points[i].color))
    traces = [_trace("lines", line, line={"color": _SOFT, "width": 1.5}), *_dots(x, y, order)]
    height = 480 if wide else 330
    made = layout(height, int(_MARGIN), shapes=[], annotations=[])
    made["margin"]["t"] = 26
    right, upwards = ("" if a.lower_is_better is None else "better →" for a in (x, y))
    title = ", ".join(filter(None, [escape(cut(x.title, 40)), right]))
    made["xaxis"] = axis(title, range=list(across), ticksuffix=x.suffix)
    made["yaxis"] = axis(upwards, range=list(up), ticksuffix=y.suffix)
    start: tuple[Pair, str] | None = None
    if y.start is not None and drawable(y.start):
        made["shapes"] = [_level(y.start)]
        if x.start is not None and _inside(across, x.start):
            start = (x.start, y.start), "bottom right"
            traces.append(_start_point(x.start, y.start))
        elif x.start is not None:
            start = (across[1], y.start), "top left"
            made["annotations"] = [_start_name(y.start)]
    drawn = [points[i] for i in order]
    spans = [(x.spans[i], y.spans[i]) for i in order]

    def plot(width: float) -> JSON:
        labels = _labels(drawn, spans, (across, up), (width, height - 70), start)
        return {"data": [*traces, _markers(drawn, spans, labels)], "layout": made}

    alt = "; ".join(", ".join([plain(p.name), *p.hover]) for p in drawn[:20])
    return Figure(y.title, plot(_WHOLE if wide else _HALF), plot(_PHONE), alt, wide)


def out_of_view(points: Sequence[Point], x: Axis, y: Axis) -> list[str]:
    """The models that a plot leaves out: not finite, or far worse than the rest."""
    seen = _view(x, y)[2]
    return [plain(point.name) for i, point in enumerate(points) if i not in seen]


def pareto(points: Sequence[Pair]) -> list[int]:
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


def placed(
    names: Sequence[str],
    points: Sequence[Pair],
    width: float,
    height: float,
    occupied: Sequence[Box] = (),
) -> list[str | None]:
    """A text position for each name, first come first served; None where there is no room.

    Args:
        names: the texts, the most important first.
        points: the position of each, in pixels from the top left.
        width, height: of the plot, in pixels.
        occupied: boxes (left, top, right, bottom) that the names must not cover.
    """
    taken = list(occupied)
    found: list[str | None] = []
    for name, point in zip(names, points, strict=True):
        found.append(None)
        dots = [(x - _DOT, y - _DOT, x + _DOT, y + _DOT) for x, y in points if (x, y) != point]
        for place in _PLACES:
            box = _beside(name, point, place)
            inside = box[0] >= 0 and box[1] >= -_LINE and box[3] <= height
            inside = inside and box[2] <= width + _MARGIN - _DOT
            if inside and not any(_meet(box, other) for other in (*taken, *dots)):
                taken.append(box)
                found[-1] = place
                break
    return found


def _view(x: Axis, y: Axis) -> tuple[Pair, Pair, list[int]]:
    """The range across and upwards, and the models inside."""
    across, up = x.view(), y.view(y.start)
    if x.start is not None and drawable(x.start):
        # Near enough to show the model before fine-tuning without squeezing the rest?
        if abs(x.start - across[0]) < 0.6 * abs(across[1] - across[0]):
            across = x.view(x.start)
    pairs = zip(x.spans, y.spans, strict=True)
    seen = [
        i for i, (a, b) in enumerate(pairs) if _inside(across, a.value) and _inside(up, b.value)
    ]
    return across, up, seen


def _inside(view: Pair, value: float) -> bool:
    return min(view) <= value <= max(view)


def _labels(
    points: Sequence[Point],
    spans: Sequence[tuple[Span, Span]],
    view: tuple[Pair, Pair],
    inner: Pair,
    start: tuple[Pair, str] | None,
) -> list[tuple[str, str]]:
    """Text and position of each name, the last first; no text where there is no room."""
    (left, right), (bottom, top) = view

    def pixel(x: float, y: float) -> Pair:
        return (x - left) / (right - left) * inner[0], (top - y) / (top - bottom) * inner[1]

    pixels = [pixel(x.value, y.value) for x, y in spans]
    taken = [_beside("pretrained", pixel(*start[0]), start[1])] if start else []
    names = [cut(plain(point.name), 22) for point in points]
    places = placed(names[::-1], pixels[::-1], *inner, taken)[::-1]
    return [
        (name, place) if place else ("", "top right")
        for name, place in zip(names, places, strict=True)
    ]


def _markers(
    points: Sequence[Point],
    spans: Sequence[tuple[Span, Span]],
    labels: Sequence[tuple[str, str]],
) -> JSON:
    """The points with their names, and their intervals as whiskers."""
    marked = [point.color != ACCENT for point in points]
    texts = [escape(text) for text, _ in labels]
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": [x.value for x, _ in spans],
        "y": [y.value for _, y in spans],
        "text": [f"<b>{t}</b>" if t and m else t for t, m in zip(texts, marked, strict=True)],
        "textposition": [place for _, place in labels],
        "textfont": {
            "size": 12,
            "color": [p.color if m else "var(--ink)" for p, m in zip(points, marked, strict=True)],
        },
        "cliponaxis": False,
        "marker": {
            "size": [14 if point.color == GAINED else 10 for point in points],
            "color": [point.color for point in points],
            "opacity": 1,
            "line": {"width": 2, "color": "var(--card)"},
        },
        "error_x": {**whiskers([x for x, _ in spans], _SOFT), "width": 0},
        "error_y": {**whiskers([y for _, y in spans], _SOFT), "width": 0},
        "customdata": [
            "<br>".join([f"<b>{escape(plain(p.name))}</b>", *map(escape, p.hover)]) for p in points
        ],
        "hovertemplate": f"%{{customdata}}{NO_BOX}",
    }


def _dots(x: Axis, y: Axis, order: Sequence[int]) -> list[JSON]:
    """Every seed, faint."""
    if not (x.seeds and y.seeds):
        return []
    pairs = [
        pair
        for i in order
        if len(x.seeds[i]) > 1
        for pair in zip(x.seeds[i], y.seeds[i], strict=False)
        if all(map(drawable, pair))
    ]
    marker = {"size": 5, "color": "var(--same)", "opacity": 0.7}
    return [_trace("markers", pairs, marker=marker)] if pairs else []


def _start_point(x: float, y: float) -> JSON:
    """The model before fine-tuning."""
    line = {"width": 2, "color": "var(--same)"}
    marker = {"symbol": "diamond-open", "size": 10, "color": "var(--same)", "line": line}
    font = {"size": 12, "color": "var(--ink-2)"}
    more = {"text": ["pretrained"], "textposition": "bottom right", "textfont": font}
    return _trace("markers+text", [(x, y)], marker=marker, **more)


def _start_name(y: float) -> JSON:
    """The name of the dotted line, at its right end."""
    return {
        "text": "pretrained",
        "x": 1,
        "xref": "paper",
        "xanchor": "right",
        "y": y,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12, "color": "var(--ink-2)"},
    }


def _level(value: float) -> JSON:
    """A dotted line over the whole width: the model before fine-tuning."""
    line = {"color": "var(--same)", "width": 1.5, "dash": "dot"}
    ends = {"x0": 0, "x1": 1, "xref": "paper", "y0": value, "y1": value}
    return {"type": "line", "layer": "below", "line": line, **ends}


def _trace(mode: str, pairs: Sequence[Pair], **more: object) -> JSON:
    x, y = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return {"type": "scatter", "mode": mode, "x": x, "y": y, "hoverinfo": "skip", **more}


def _beside(text: str, point: Pair, place: str) -> Box:
    """The box of a text at a place beside its point."""
    x, y = point
    wide = _LETTER * len(text)
    up, _, side = place.partition(" ")
    left = {"right": x + _DOT, "left": x - _DOT - wide, "center": x - wide / 2}[side]
    top = {"top": y - _DOT - _LINE, "middle": y - _LINE / 2, "bottom": y + _DOT}[up]
    return left, top, left + wide, top + _LINE


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
