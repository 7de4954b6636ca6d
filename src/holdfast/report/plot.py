"""Plotly figures as JSON: layout, axes, bars and lines.

Colors are CSS variables of the page, such as ``var(--lost)``, which the page's script resolves, so
plots follow the theme. Plotly interprets some HTML in its texts, so every name goes through
:func:`escape`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape as _escape
from typing import Any, NamedTuple

from holdfast.report.document import Figure
from holdfast.report.words import cut, plain

JSON = dict[str, Any]

ACCENT, LOST, GAINED, SAME = "var(--accent)", "var(--lost)", "var(--gained)", "var(--same)"
#: At the end of a hover text: no second box with the trace's name.
NO_BOX = "<extra></extra>"
#: For lines that no tone applies to; distinct on light and on dark.
_PALETTE = (
    "#4c8bd6", "#d98a29", "#8f6fc9", "#2fa3a0", "#c75fa3", "#9a7b55", "#7a8a99", "#9a9a2a",
    "#5661c9", "#d97b7b", "#5b9bb8", "#b08fd8",
)  # fmt: skip
_LINES_HEIGHT, _TEXT_LINE = 320, 15  # pixels


class Span(NamedTuple):
    """A value and its interval."""

    value: float
    low: float | None = None
    high: float | None = None


class Bar(NamedTuple):
    """A row of a bar chart: ``text`` stands beside the bar, ``hover`` holds the details."""

    name: str
    span: Span
    text: str
    color: str = ACCENT
    hover: Sequence[str] = ()


@dataclass(frozen=True)
class Line:
    """A curve; a color of :data:`ACCENT` gives it a color of its own among several."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    color: str = ACCENT


def escape(text: str) -> str:
    """Text that Plotly shows unchanged.

    >>> escape("<b>a & b</b>")
    '&lt;b&gt;a &amp; b&lt;/b&gt;'
    """
    return _escape(text, quote=False)


def finite(value: float) -> float | None:
    """The value, or None if it is not finite."""
    return value if math.isfinite(value) else None


def drawable(value: float | None) -> bool:
    """Whether a value is finite and small enough to compute an axis range with."""
    return value is not None and abs(value) < 1e100


def layout(height: int, right: int = 12, **more: Any) -> JSON:
    """The layout that all figures share."""
    return {
        "height": height,
        "autosize": True,
        "showlegend": False,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": right, "t": 12, "b": 8},
        "font": {
            "family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
            "size": 12,
            "color": "var(--ink-2)",
        },
        "hoverlabel": {
            "bgcolor": "var(--card)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--ink)", "size": 13},
            "align": "left",
        },
        **more,
    }


def axis(title: str = "", **more: Any) -> JSON:
    """The settings that all axes share."""
    return {
        "automargin": True,
        "fixedrange": True,
        "gridcolor": "var(--line)",
        "zeroline": False,
        "zerolinecolor": "var(--ink-2)",
        "zerolinewidth": 1,
        "ticks": "",
        "tickangle": 0,
        "ticklabelstandoff": 4,
        "nticks": 6,
        "title": {"text": title, "font": {"size": 12}, "standoff": 8},
        **more,
    }


def side_note(text: str, color: str = "var(--ink)", **where: Any) -> JSON:
    """A text to the right of a figure's inside."""
    return {
        "text": text,
        "x": 1,
        "xref": "paper",
        "xanchor": "left",
        "xshift": 6,
        "showarrow": False,
        "font": {"size": 13, "color": color},
        **where,
    }


def whiskers(spans: Sequence[Span], color: str = "var(--whisker)") -> JSON:
    """Error bars from intervals."""

    def reach(value: float, bound: float | None) -> float:
        gap = math.nan if bound is None else abs(bound - value)
        return gap if math.isfinite(gap) else 0.0

    return {
        "type": "data",
        "symmetric": False,
        "array": [reach(span.value, span.high) for span in spans],
        "arrayminus": [reach(span.value, span.low) for span in spans],
        "thickness": 1.5,
        "width": 4,
        "color": color,
    }


def bars(title: str, rows: Sequence[Bar], *, lower_is_better: bool | None = None) -> Figure:
    """Horizontal bars with their intervals, one row per name.

    Args:
        title: the figure's title.
        rows: from top to bottom.
        lower_is_better: of changes, which are drawn around 0 with the worse side to the left;
            None for amounts, which are drawn from 0.
    """
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [finite(row.span.value) for row in rows],
        "y": list(range(len(rows))),
        "width": 0.42,
        "marker": {"color": [row.color for row in rows], "cornerradius": 4},
        "error_x": whiskers([row.span for row in rows]),
        "customdata": [
            "<br>".join([f"<b>{escape(plain(row.name))}</b>", *map(escape, row.hover)])
            for row in rows
        ],
        "hovertemplate": f"%{{customdata}}{NO_BOX}",
    }
    height = (40 if len(rows) <= 12 else 26) * len(rows) + 56
    made = layout(height, 14 + 8 * max(len(row.text) for row in rows))
    if lower_is_better is None:
        made["xaxis"] = axis(rangemode="tozero", zeroline=True, nticks=5)
    else:
        bounds = [x for row in rows for x in row.span if x is not None and math.isfinite(x)]
        reach = max(map(abs, bounds), default=0.0) or 1.0
        far = min(1.12 * reach, sys.float_info.max)
        ends = [far, -far] if lower_is_better else [-far, far]
        made["xaxis"] = axis("← worse      better →", range=ends, zeroline=True, nticks=5)
    made["yaxis"] = axis(
        tickvals=list(range(len(rows))),
        ticktext=[escape(cut(plain(row.name), 20)) for row in rows],
        range=[len(rows) - 0.45, -0.55],
        showgrid=False,
        tickfont={"size": 13, "color": "var(--ink)"},
    )
    made["annotations"] = [
        side_note(f"<b>{escape(row.text)}</b>", "var(--ink)" if row.color == ACCENT else row.color, y=i)
        for i, row in enumerate(rows)
    ]
    alt = "; ".join(f"{plain(row.name)} {row.text}" for row in rows[:20])
    return Figure(title, {"data": [trace], "layout": made}, alt=alt)


def lines(title: str, curves: Sequence[Line], x_title: str) -> Figure:
    """Curves over the steps of training; several have their names at their right ends."""
    values = [v for curve in curves for v in curve.values if drawable(v)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    low, high = low - room, high + room
    inside = _LINES_HEIGHT - 60
    ends = [next((v for v in reversed(c.values) if drawable(v)), low) for c in curves]
    heights = spread([(end - low) / (high - low) * inside for end in ends], _TEXT_LINE, inside)
    traces, names = [], []
    for i, (curve, height) in enumerate(zip(curves, heights, strict=True)):
        marked = curve.color != ACCENT or len(curves) == 1
        color = curve.color if marked else _PALETTE[i % len(_PALETTE)]
        name = escape(cut(plain(curve.name), 20))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": list(curve.steps),
                "y": [finite(value) for value in curve.values],
                "line": {"color": color, "width": 2.5 if marked else 1.5},
                "hovertemplate": f"<b>{name}</b><br>{x_title} %{{x}}: %{{y:.4g}}{NO_BOX}",
            }
        )
        text = f"<b>{name}</b>" if marked else name
        where = {"y": height / inside, "yref": "paper", "yanchor": "middle"}
        names.append(side_note(text, color, **where))
    several = len(curves) > 1
    longest = max((len(cut(plain(c.name), 20)) for c in curves), default=0)
    made = layout(_LINES_HEIGHT, 16 + 7 * longest if several else 12)
    made["xaxis"] = axis(x_title, showgrid=False)
    made["yaxis"] = axis(range=[low, high])
    made["annotations"] = names if several else []
    alt = "; ".join(f"{plain(c.name)} ends at {e:.4g}" for c, e in zip(curves, ends, strict=True))
    return Figure(title, {"data": traces, "layout": made}, alt=alt)


def spread(heights: Sequence[float], gap: float, most: float) -> list[float]:
    """Move values apart until each has a gap to the next and none exceeds the most.

    >>> spread([1.0, 1.0, 5.0], 2.0, 10.0), spread([4.0, 5.0], 2.0, 5.0)
    ([1.0, 3.0, 5.0], [3.0, 5.0])
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    found = list(heights)
    for below, above in zip(order, order[1:], strict=False):
        found[above] = max(found[above], found[below] + gap)
    for i in reversed(order):
        found[i] = most = min(found[i], most)
        most -= gap
    return found
