"""What all plots share: Plotly's JSON for layouts, axes, rows and whiskers.

Colours are names of the page's CSS variables, ``var(--lost)``, which its script resolves: the plots
change with the theme. Plotly reads some HTML in its texts, so every name goes through ``escape``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape as _escape
from typing import Any

from holdfast.evaluate.report import Estimate
from holdfast.report.words import plain

JSON = dict[str, Any]

NO_BOX = "<extra></extra>"  # at the end of a hover text: no second box with the trace's name
_ROW, _ROW_OF_MANY = 46, 26  # pixels a name


@dataclass(frozen=True)
class Plot:
    """A figure with its heading."""

    title: str
    figure: JSON


def escape(text: str) -> str:
    """Text that Plotly shows as it is.

    >>> escape("<b>a & b</b>")
    '&lt;b&gt;a &amp; b&lt;/b&gt;'
    """
    return _escape(text, quote=False)


def cut(text: str, most: int) -> str:
    """A long text without its middle: names often differ at their ends."""
    half = most // 2
    return text if len(text) <= most else f"{text[: half - 1]}…{text[-half:]}"


def finite(value: float) -> float | None:
    """The value, or None if it is not finite."""
    return value if math.isfinite(value) else None


def base_layout(height: int, **more: Any) -> JSON:
    """The layout that all figures share."""
    return {
        "height": height,
        "autosize": True,
        "showlegend": False,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
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


def axis(**more: Any) -> JSON:
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
        "showline": False,
        **more,
    }


def row_layout(names: Sequence[str]) -> JSON:
    """The layout of a plot with a row a name."""
    labels = [escape(cut(plain(name), 20)) for name in names]
    row = _ROW if len(names) <= 12 else _ROW_OF_MANY
    layout = base_layout(row * len(names) + 56, margin={"l": 8, "r": 62, "t": 4, "b": 52})
    layout["yaxis"] = axis(
        tickvals=list(range(len(names))),
        ticktext=labels,
        range=[len(names) - 0.45, -0.55],
        showgrid=False,
        tickfont={"size": 13, "color": "var(--ink)"},
    )
    return layout


def at_the_right(texts: Sequence[str], colors: Sequence[str] | None = None) -> list[JSON]:
    """Texts beside the rows of a figure."""
    return [
        {
            "text": f"<b>{escape(text)}</b>",
            "x": 1,
            "xref": "paper",
            "xanchor": "left",
            "xshift": 6,
            "y": i,
            "showarrow": False,
            "font": {"size": 13, "color": colors[i] if colors else "var(--ink)"},
        }
        for i, text in enumerate(texts)
    ]


def whiskers(estimates: Sequence[Estimate], scale: float = 1.0) -> JSON:
    """Error bars from intervals."""

    def reach(value: float, bound: float | None) -> float:
        gap = math.nan if bound is None else abs(bound - value) * scale
        return gap if math.isfinite(gap) else 0.0

    return {
        "type": "data",
        "symmetric": False,
        "array": [reach(e.value, e.high) for e in estimates],
        "arrayminus": [reach(e.value, e.low) for e in estimates],
        "thickness": 1.5,
        "width": 4,
        "color": "var(--whisker)",
    }
