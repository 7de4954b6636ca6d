"""The frontier between what was learned and what was kept: one mark per model.

The target is to the right and a retained test upwards; better is always to the right and up. The
page places the names beside their marks, because only it knows the size of a plot.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.report.document import Figure
from holdfast.report.plot import ACCENT, GAINED, JSON, LOST, escape, hover, whiskers
from holdfast.report.words import Span, cut, kind_of, plain

#: Retained tests that are drawn at most; the tables have all.
MOST = 6
#: A value that is worse than the worst quarter by this many interquartile ranges is out of view.
_FAR = 10
#: Marks are drawn in this order.
_ORDER = (ACCENT, LOST, GAINED)

Pair = tuple[float, float]


class Mark(NamedTuple):
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

    @classmethod
    def of_test(
        cls, name: str, metric: str, spans: Sequence[Span], start: float, lower_is_better: bool
    ) -> Axis:
        """The axis of a test; shares are in percent."""
        title = f"{plain(name)}, {plain(metric)}"
        if kind_of(metric) != "share":
            return cls(title, spans, start, lower_is_better)
        spans = [Span(100 * s.value, *(x and 100 * x for x in (s.low, s.high))) for s in spans]
        return cls(title, spans, 100 * start, lower_is_better, " %")

    @property
    def sign(self) -> int:
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
    marks: Sequence[Mark], x: Axis, y: Axis, *, path: bool = False, wide: bool = False
) -> Figure:
    """Draw models by two quantities, in the order of the axes' values.

    ``path`` joins all marks in their order; else a line joins those that no other beats on both
    axes. ``wide`` takes the whole width of the page.
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
    order = sorted(seen, key=lambda i: _ORDER.index(marks[i].color))
    drawn = [marks[i] for i in order]
    xs, ys = [x.spans[i] for i in order], [y.spans[i] for i in order]
    colors = [mark.color for mark in drawn]
    names = [escape(cut(plain(mark.name), 22)) for mark in drawn]
    bold = [n if color == ACCENT else f"<b>{n}</b>" for n, color in zip(names, colors, strict=True)]
    dots = {
        "type": "scatter",
        "mode": "markers",
        "meta": "named",  # the page writes the texts beside the marks
        "text": bold,
        "x": [span.value for span in xs],
        "y": [span.value for span in ys],
        "error_x": whiskers(xs),
        "error_y": whiskers(ys),
        "textfont": {"color": ["var(--ink)" if color == ACCENT else color for color in colors]},
        "cliponaxis": False,
        "marker": {"size": [14 if color == GAINED else 10 for color in colors], "color": colors},
        "customdata": [hover(mark.name, mark.details) for mark in drawn],
    }
    right, upwards = ("" if a.lower_is_better is None else "better →" for a in (x, y))
    title = ", ".join(filter(None, [escape(cut(x.title, 40)), right]))
    layout: JSON = {
        "height": 420 if wide else 330,
        "margin": {"r": 30, "t": 26},
        "xaxis": {"range": list(across), "ticksuffix": x.suffix, "title": {"text": title}},
        "yaxis": {"range": list(up), "ticksuffix": y.suffix, "title": {"text": upwards}},
    }
    if y.start is not None and _drawable(y.start):
        dotted = {"color": "var(--same)", "width": 1.5, "dash": "dot"}
        ends = {"x0": 0, "x1": 1, "xref": "paper", "y0": y.start, "y1": y.start}
        layout["shapes"] = [{"type": "line", "layer": "below", "line": dotted, **ends}]
    alt = "; ".join(", ".join([plain(mark.name), *mark.details]) for mark in drawn[:20])
    return Figure(y.title, {"data": [line, dots], "layout": layout}, alt, wide)


def out_of_view(marks: Sequence[Mark], x: Axis, y: Axis) -> list[str]:
    """The models that a plot leaves out: not finite, or far worse than the rest."""
    seen = _view(x, y)[2]
    return [plain(mark.name) for i, mark in enumerate(marks) if i not in seen]


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


def _view(x: Axis, y: Axis) -> tuple[Pair, Pair, list[int]]:
    """The range across and upwards, and the models inside."""
    across, up = x.view(), y.view(y.start)
    spans = enumerate(zip(x.spans, y.spans, strict=True))
    shares = [(i, _share(across, a.value), _share(up, b.value)) for i, (a, b) in spans]
    return across, up, [i for i, a, b in shares if 0 <= a <= 1 and 0 <= b <= 1]


def _share(view: Pair, value: float) -> float:
    """Where a value is between the ends of a view, from 0 to 1."""
    return (value - view[0]) / (view[1] - view[0])


def _drawable(value: float) -> bool:
    """Whether a value is finite and small enough to compute a range with."""
    return abs(value) < 1e100
