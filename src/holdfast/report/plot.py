"""Plotly figures as JSON: bars and lines.

The page's template holds everything about style. Colors are CSS variables of the page, such as
``var(--lost)``, so plots follow the theme. Plotly interprets some HTML in its texts, so every name
goes through :func:`escape`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from html import escape as _escape
from typing import Any, NamedTuple

from holdfast.report.document import Figure
from holdfast.report.words import cut, plain

JSON = dict[str, Any]

ACCENT, LOST, GAINED, SAME = "var(--accent)", "var(--lost)", "var(--gained)", "var(--same)"
#: For lines that have no meaning of their own; distinct on light and on dark.
_PALETTE = (
    "#4c8bd6", "#d98a29", "#8f6fc9", "#2fa3a0", "#c75fa3", "#9a7b55", "#7a8a99", "#9a9a2a",
    "#5661c9", "#d97b7b", "#5b9bb8", "#b08fd8",
)  # fmt: skip


class Span(NamedTuple):
    """A value and its interval."""

    value: float
    low: float | None = None
    high: float | None = None


class Bar(NamedTuple):
    """A row of a bar chart; ``text`` stands beside the bar, ``hover`` holds the details."""

    name: str
    span: Span
    text: str
    color: str
    hover: Sequence[str]


class Line(NamedTuple):
    """A curve over the steps of training."""

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


def hover(name: str, lines: Sequence[str]) -> str:
    """The text of a hover box."""
    return "<br>".join([f"<b>{escape(plain(name))}</b>", *map(escape, lines)])


def finite(value: float) -> float | None:
    """The value, or None if it is not finite."""
    return value if math.isfinite(value) else None


def whiskers(spans: Sequence[Span]) -> JSON:
    """Error bars from intervals."""

    def reach(value: float, bound: float | None) -> float:
        gap = math.nan if bound is None else abs(bound - value)
        return gap if math.isfinite(gap) else 0.0

    return {
        "symmetric": False,
        "array": [reach(span.value, span.high) for span in spans],
        "arrayminus": [reach(span.value, span.low) for span in spans],
    }


def bars(title: str, rows: Sequence[Bar], lower_is_better: bool) -> Figure:
    """Changes and their intervals as horizontal bars around 0; the worse side is to the left."""
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [finite(row.span.value) for row in rows],
        "y": list(range(len(rows))),
        "width": 0.42,
        "marker": {"color": [row.color for row in rows]},
        "error_x": whiskers([row.span for row in rows]),
        "customdata": [hover(row.name, row.hover) for row in rows],
    }
    bounds = [abs(x) for row in rows for x in row.span if x is not None and math.isfinite(x)]
    far = min(1.12 * (max(bounds, default=0.0) or 1.0), sys.float_info.max)
    beside: JSON = {"x": 1, "xref": "paper", "xanchor": "left", "xshift": 6}
    notes = [
        beside
        | {"y": i, "text": f"<b>{escape(row.text)}</b>", "font": {"size": 13, "color": row.color}}
        for i, row in enumerate(rows)
    ]
    names = {
        "tickvals": trace["y"],
        "ticktext": [escape(cut(plain(row.name), 20)) for row in rows],
        "tickfont": {"size": 13, "color": "var(--ink)"},
        "range": [len(rows) - 0.45, -0.55],
        "showgrid": False,
    }
    layout = {
        "height": (40 if len(rows) <= 12 else 26) * len(rows) + 64,
        "margin": {"r": 14 + 8 * max(len(row.text) for row in rows), "b": 52},
        "xaxis": {
            "range": [far, -far] if lower_is_better else [-far, far],
            "title": {"text": "← worse      better →"},
            "zeroline": True,
            "nticks": 5,
        },
        "yaxis": names,
        "annotations": notes,
    }
    alt = "; ".join(f"{plain(row.name)} {row.text}" for row in rows[:20])
    return Figure(title, {"data": [trace], "layout": layout}, alt=alt)


def lines(title: str, curves: Sequence[Line], x_title: str) -> Figure:
    """Curves over the steps of training; several have a legend."""
    traces, ends = [], []
    for i, curve in enumerate(curves):
        name, several = plain(curve.name), len(curves) > 1
        marked = curve.color != ACCENT or not several
        color = curve.color if marked else _PALETTE[i % len(_PALETTE)]
        ends += [f"{name} ends at {value:.4g}" for value in curve.values[-1:]]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": escape(cut(name, 24)),
                "showlegend": several,
                "x": list(curve.steps),
                "y": [finite(value) for value in curve.values],
                "line": {"color": color, "width": 2.5 if marked else 1.5},
                "hovertemplate": f"<b>{escape(name)}</b><br>{x_title} %{{x}}: %{{y:.4g}}",
            }
        )
    axes = {"xaxis": {"showgrid": False, "title": {"text": x_title}}, "yaxis": {}}
    layout = {"height": 360 if len(curves) > 1 else 260, **axes}
    return Figure(title, {"data": traces, "layout": layout}, alt="; ".join(ends))
