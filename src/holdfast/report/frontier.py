"""The frontier between what was learned and what was kept: one point per model.

The target is to the right and a retained test upwards; better is always to the right and up.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.report.document import Figure
from holdfast.report.plot import ACCENT, GAINED, JSON, LOST, Span, escape, hover, whiskers
from holdfast.report.words import cut, plain

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

Pair = tuple[float, float]
Box = tuple[float, float, float, float]


class Point(NamedTuple):
    """A model: its label, its color and its details, one line each."""

    name: str
    color: str
    details: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """One measured quantity of all models."""

    title: str
    spans: Sequence[Span]  # of each model, with its interval or the range of its seeds
    start: float | None = None  # before fine-tuning; a dotted line if the axis points upwards
    lower_is_better: bool | None = None  # reverses the axis; None if neither end is better
    suffix: str = ""  # of the numbers

    @property
    def sign(self) -> int:
        """−1 if the axis is reversed."""
        return -1 if self.lower_is_better else 1

    def view(self, *more: float | None) -> Pair:
        """The worse and the better end; a value far worse than all others is out of view."""
        found = [x for span in self.spans for x in {*span} if x is not None]
        values = sorted(self.sign * x for x in found if _drawable(x))
        if len(values) > 3:
            low, _, high = statistics.quantiles(values, method="inclusive")
            values = [x for x in values if x >= low - _FAR * max(high - low, 1e-3 * abs(low))]
        values += [self.sign * x for x in more if x is not None and _drawable(x)]
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
    line = {
        "type": "scatter",
        "mode": "lines",
        "x": [x.spans[i].value for i in joined],
        "y": [y.spans[i].value for i in joined],
        "line": {"color": "var(--whisker-soft)", "width": 1.5},
        "hoverinfo": "skip",
    }
    order = sorted(seen, key=lambda i: _ORDER.index(points[i].color))
    drawn = [(points[i], x.spans[i], y.spans[i]) for i in order]
    height = 480 if wide else 330
    right, upwards = ("" if a.lower_is_better is None else "better →" for a in (x, y))
    title = ", ".join(filter(None, [escape(cut(x.title, 40)), right]))
    layout: JSON = {
        "height": height,
        "margin": {"r": _MARGIN, "t": 26},
        "xaxis": {"range": list(across), "ticksuffix": x.suffix, "title": {"text": title}},
        "yaxis": {"range": list(up), "ticksuffix": y.suffix, "title": {"text": upwards}},
    }
    if y.start is not None and _drawable(y.start):
        level = {"color": "var(--same)", "width": 1.5, "dash": "dot"}
        ends = {"x0": 0, "x1": 1, "xref": "paper", "y0": y.start, "y1": y.start}
        layout["shapes"] = [{"type": "line", "layer": "below", "line": level, **ends}]

    def plot(width: float) -> JSON:
        labels = _labels(drawn, (across, up), (width, height - 70))
        return {"data": [line, _markers(drawn, labels)], "layout": layout}

    alt = "; ".join(", ".join([plain(point.name), *point.details]) for point, _, _ in drawn[:20])
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
    found: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i], reverse=True):
        if not found or points[i][1] > points[found[-1]][1]:
            found.append(i)
    return found[::-1]


def placed(
    names: Sequence[str], points: Sequence[Pair], width: float, height: float
) -> list[str | None]:
    """A text position for each name, first come first served; None where there is no room.

    Points are in pixels from the top left of a plot of ``width`` × ``height``.
    """
    taken: list[Box] = []
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
    pairs = enumerate(zip(x.spans, y.spans, strict=True))
    seen = [i for i, (a, b) in pairs if _inside(across, a.value) and _inside(up, b.value)]
    return across, up, seen


def _drawable(value: float) -> bool:
    """Whether a value is finite and small enough to compute a range with."""
    return abs(value) < 1e100


def _inside(view: Pair, value: float) -> bool:
    return min(view) <= value <= max(view)


def _labels(
    drawn: Sequence[tuple[Point, Span, Span]], view: tuple[Pair, Pair], inner: Pair
) -> list[tuple[str, str]]:
    """Text and position of each name, the last first; no text where there is no room."""
    (left, right), (bottom, top) = view
    width, height = inner
    pixels = [
        (width * (x.value - left) / (right - left), height * (top - y.value) / (top - bottom))
        for _, x, y in drawn
    ]
    names = [cut(plain(point.name), 22) for point, _, _ in drawn]
    places = placed(names[::-1], pixels[::-1], *inner)[::-1]
    return [
        (escape(name), place) if place else ("", "top right")
        for name, place in zip(names, places, strict=True)
    ]


def _markers(drawn: Sequence[tuple[Point, Span, Span]], labels: Sequence[tuple[str, str]]) -> JSON:
    """The points with their names, and their intervals as whiskers."""
    colors = [point.color for point, _, _ in drawn]
    texts = zip(colors, labels, strict=True)
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": [x.value for _, x, _ in drawn],
        "y": [y.value for _, _, y in drawn],
        "text": [text if color == ACCENT else f"<b>{text}</b>" for color, (text, _) in texts],
        "textposition": [place for _, place in labels],
        "textfont": {"color": ["var(--ink)" if color == ACCENT else color for color in colors]},
        "cliponaxis": False,
        "marker": {"size": [14 if color == GAINED else 10 for color in colors], "color": colors},
        "error_x": whiskers([x for _, x, _ in drawn]),
        "error_y": whiskers([y for _, _, y in drawn]),
        "customdata": [hover(point.name, point.details) for point, _, _ in drawn],
    }


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
