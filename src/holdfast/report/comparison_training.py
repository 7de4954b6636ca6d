"""What the runs looked like: curves over the updates, time and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.comparison.results import Summary
from holdfast.evaluate.report import Curve
from holdfast.report.axes import drawable
from holdfast.report.comparison_frontier import color_of
from holdfast.report.comparison_words import seconds
from holdfast.report.plot import (
    JSON,
    NO_BOX,
    Plot,
    at_the_right,
    axis,
    base_layout,
    cut,
    escape,
    finite,
    row_layout,
)
from holdfast.report.point_labels import spread
from holdfast.report.words import plain

__all__ = ["cost_plots", "curve_plots"]

#: Of neither theme: they can be told apart on light and on dark.
_COLORS = (
    "#4c8bd6", "#d98a29", "#8f6fc9", "#2fa3a0", "#c75fa3", "#9a7b55", "#7a8a99", "#9a9a2a",
    "#5661c9", "#d97b7b", "#5b9bb8", "#b08fd8",
)  # fmt: skip
_HEIGHT, _LINE = 360, 15
_TITLES = {"loss": "Loss on the training data", "distance": "Distance ‖θ − θ*‖ of the weights"}


def curve_plots(found: Sequence[Summary], chosen: str | None) -> list[Plot]:
    """Loss and distance over the updates, a line for each recipe: its first seed."""
    plots = []
    for name, title in _TITLES.items():
        curves = [_curve(summary, name) for summary in found]
        if any(curves):
            plots.append(Plot(title, _lines(found, curves, chosen)))
    return plots


def cost_plots(found: Sequence[Summary], chosen: str | None) -> list[Plot]:
    """Seconds and memory, a bar for each recipe."""
    memory = [float(s.peak_memory) for s in found]
    return [
        _bars("Time of a run", found, [s.seconds for s in found], seconds, chosen),
        _bars("Peak memory", found, memory, gibibytes, chosen),
    ]


def gibibytes(size: float) -> str:
    """An amount of memory.

    >>> gibibytes(789204992), gibibytes(80 * 2**30)
    ('0.74 GiB', '80.0 GiB')
    """
    value = size / 2**30
    return f"{value:.2f} GiB" if value < 10 else f"{value:.1f} GiB"


def _curve(summary: Summary, name: str) -> Curve | None:
    return next((c for c in summary.runs[0].curves if c.name == name and c.steps), None)


def _lines(found: Sequence[Summary], curves: Sequence[Curve | None], chosen: str | None) -> JSON:
    """The lines, with their names at their right ends."""
    shown = [(s, c) for s, c in zip(found, curves, strict=True) if c is not None]
    values = [v for _, curve in shown for v in curve.values if drawable(v)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    low, high = low - room, high + room
    inside = _HEIGHT - 60
    ends = [next((v for v in reversed(c.values) if drawable(v)), low) for _, c in shown]
    places = spread([(end - low) / (high - low) * inside for end in ends], _LINE, inside)
    traces, notes, others = [], [], 0
    for (summary, curve), place in zip(shown, places, strict=True):
        color, width = color_of(summary, chosen), 2.5
        if color == "var(--accent)":
            color, width = _COLORS[others % len(_COLORS)], 1.5
            others += 1
        name = escape(cut(plain(summary.label), 20))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": list(curve.steps),
                "y": [finite(value) for value in curve.values],
                "line": {"color": color, "width": width},
                "hovertemplate": f"<b>{escape(plain(summary.label))}</b><br>"
                f"update %{{x}}: %{{y:.4g}}{NO_BOX}",
            }
        )
        notes.append(
            {
                "text": f"<b>{name}</b>" if width > 2 else name,
                "x": 1,
                "xref": "paper",
                "xanchor": "left",
                "xshift": 6,
                "y": place / inside,
                "yref": "paper",
                "yanchor": "middle",
                "showarrow": False,
                "font": {"size": 12, "color": color},
            }
        )
    longest = max((len(cut(plain(s.label), 20)) for s, _ in shown), default=0)
    layout = base_layout(_HEIGHT, margin={"l": 8, "r": 16 + 7 * longest, "t": 12, "b": 8})
    title = {"text": "update", "font": {"size": 12}, "standoff": 6}
    layout["xaxis"] = axis(showgrid=False, nticks=6, title=title)
    layout["yaxis"] = axis(nticks=7, range=[low, high])
    layout["annotations"] = notes
    return {"data": traces, "layout": layout}


def _bars(
    title: str,
    found: Sequence[Summary],
    values: Sequence[float],
    said: Callable[[float], str],
    chosen: str | None,
) -> Plot:
    texts = [said(value) for value in values]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [finite(value) for value in values],
        "y": list(range(len(found))),
        "width": 0.5,
        "marker": {"color": [color_of(s, chosen) for s in found], "cornerradius": 3},
        "customdata": [
            f"<b>{escape(plain(s.label))}</b><br>{text}"
            for s, text in zip(found, texts, strict=True)
        ],
        "hovertemplate": f"%{{customdata}}{NO_BOX}",
    }
    layout = row_layout([s.label for s in found])
    layout["height"] = 28 * len(found) + 20
    layout["margin"] = {"l": 8, "r": 72, "t": 4, "b": 8}
    layout["xaxis"] = axis(rangemode="tozero", showticklabels=False, showgrid=False)
    layout["annotations"] = at_the_right(texts)
    return Plot(title, {"data": [trace], "layout": layout})
