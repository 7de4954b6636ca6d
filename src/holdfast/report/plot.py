"""Plotly figures as JSON: curves, bars and the map of the drift.

The page's template holds everything about style. Colors are CSS variables of the page, such as
``var(--lost)``, so plots follow the theme. Plotly interprets some HTML in its texts, so every name
goes through :func:`escape`.
"""

from __future__ import annotations

import html
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast._torch.finite import is_finite
from holdfast.report.document import Figure
from holdfast.report.words import Change, Span, cut, percent, plain, score_text

if TYPE_CHECKING:
    from holdfast.evaluate.report import Curve, Drift, DriftRow, Score

JSON = dict[str, Any]

ACCENT, LOST, GAINED, SAME = "var(--accent)", "var(--lost)", "var(--gained)", "var(--same)"
_COLORS = {"lost": LOST, "not finite": LOST, "gained": GAINED}
#: For lines that have no meaning of their own; distinct on light and on dark.
_PALETTE = (
    "#4c8bd6", "#d98a29", "#8f6fc9", "#2fa3a0", "#c75fa3", "#9a7b55", "#7a8a99", "#9a9a2a",
    "#5661c9", "#d97b7b", "#5b9bb8", "#b08fd8",
)  # fmt: skip
#: The row of the drift map that stands for whole layers.
_ALL = "all weights"


def escape(text: str) -> str:
    """Text that Plotly shows unchanged.

    >>> escape("<b>a & b</b>")
    '&lt;b&gt;a &amp; b&lt;/b&gt;'
    """
    return html.escape(text, quote=False)


def hover(name: str, lines: Sequence[str]) -> str:
    return "<br>".join([f"<b>{escape(plain(name))}</b>", *map(escape, lines)])


def finite(value: float) -> float | None:
    return value if is_finite(value) else None


def whiskers(spans: Sequence[Span | Change]) -> JSON:
    def reach(value: float, bound: float | None) -> float:
        gap = math.nan if bound is None else abs(bound - value)
        return gap if is_finite(gap) else 0.0

    return {
        "symmetric": False,
        "array": [reach(span.value, span.high) for span in spans],
        "arrayminus": [reach(span.value, span.low) for span in spans],
    }


def lines(
    title: str, curves: Mapping[str, Curve], x_title: str, colors: Mapping[str, str]
) -> Figure:
    """Curves by name over the steps of training; those with a color are marked."""
    traces, ends, several = [], [], len(curves) > 1
    for i, (label, curve) in enumerate(curves.items()):
        name = plain(label)
        color = colors.get(label, _PALETTE[i % len(_PALETTE)] if several else ACCENT)
        ends += [f"{name} ends at {value:.4g}" for value in curve.values[-1:]]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": escape(cut(name, 24)),
                "showlegend": several,
                "x": list(curve.steps),
                "y": [finite(value) for value in curve.values],
                "line": {"color": color, "width": 2.5 if label in colors or not several else 1.5},
                "hovertemplate": f"<b>{escape(name)}</b><br>{x_title} %{{x}}: %{{y:.4g}}",
            }
        )
    x_axis = {"showgrid": False, "title": {"text": x_title}}
    layout = {"height": 360 if several else 260, "xaxis": x_axis, "yaxis": {}}
    return Figure(title, {"data": traces, "layout": layout}, alt="; ".join(ends))


def bars(title: str, rows: Sequence[tuple[Score, Change]], lower_is_better: bool) -> Figure:
    """Changes and their intervals as horizontal bars around 0; the worse side is to the left."""
    changes = [change for _, change in rows]
    colors = [_COLORS.get(change.outcome, SAME) for change in changes]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [finite(change.value) for change in changes],
        "y": list(range(len(rows))),
        "width": 0.42,
        "marker": {"color": colors},
        "error_x": whiskers(changes),
        "customdata": [_score_hover(score, change) for score, change in rows],
    }
    ends = [x for change in changes for x in (change.value, change.low, change.high)]
    far = max((abs(x) for x in ends if x is not None and is_finite(x)), default=0.0)
    far = min(1.12 * (far or 1.0), sys.float_info.max)
    beside: JSON = {"x": 1, "xref": "paper", "xanchor": "left", "xshift": 6}
    texts = [
        beside | {"y": y, "text": f"<b>{change.figure}</b>", "font": {"size": 13, "color": color}}
        for y, (change, color) in enumerate(zip(changes, colors, strict=True))
    ]
    layout = {
        "height": (40 if len(rows) <= 12 else 26) * len(rows) + 64,
        "margin": {"r": 14 + 8 * max(len(change.figure) for change in changes), "b": 52},
        "xaxis": {
            "range": [far, -far] if lower_is_better else [-far, far],
            "title": {"text": "← worse      better →"},
            "zeroline": True,
            "nticks": 5,
        },
        "yaxis": {
            "tickvals": trace["y"],
            "ticktext": [escape(cut(plain(score.name), 20)) for score, _ in rows],
            "tickfont": {"size": 13, "color": "var(--ink)"},
            "range": [len(rows) - 0.45, -0.55],
            "showgrid": False,
        },
        "annotations": texts,
    }
    alt = "; ".join(f"{plain(score.name)} {change.figure}" for score, change in rows[:20])
    return Figure(title, {"data": [trace], "layout": layout}, alt=alt)


def _score_hover(score: Score, change: Change) -> str:
    before, after = (score_text(score.metric, e.value) for e in (score.before, score.after))
    details = (
        f"{before} → {after} {plain(score.metric)}: {change.outcome}",
        f"{change.signed}, 95 % interval {change.interval}",
        f"n = {score.change.n:,}",
    )
    return hover(score.name, details)


def drift_map(drift: Drift) -> Figure:
    """Draw the relative drift by kind and layer; the first row is the whole layer."""
    layers = [row.name for row in drift.layers]
    cells = _by_kind_and_layer(drift.tensors)
    # Kinds that only one layer has are left out, unless there are no others.
    counts = Counter(kind for kind, layer in cells if kind and layer)
    kinds = [_ALL, *([kind for kind, n in counts.items() if n > 1] or counts)]
    cells |= {(_ALL, row.name): replace(row, kind=_ALL) for row in drift.layers}
    shares = sorted(row.relative for row in cells.values() if is_finite(row.relative))
    top = shares[int(0.98 * (len(shares) - 1))] if shares else 0.0  # without outliers
    rows = [[cells.get((kind, layer)) for layer in layers] for kind in kinds]
    trace: JSON = {
        "type": "heatmap",
        "z": [[_percent(row, top) for row in some] for some in rows],
        "customdata": [[_drift_hover(row) for row in some] for some in rows],
        "zmin": 0,
        "zmax": finite(100 * top) or 1,
        "colorscale": [[i / 4, f"var(--heat-{i})"] for i in range(5)],
    }
    labels = short_names(layers)
    numbered = [i for i in range(len(layers)) if labels[i].isdigit()] or list(range(len(layers)))
    shown = numbered[:: max(1, math.ceil(len(numbered) / 8))]
    layout = {
        "height": 24 * len(kinds) + 100,
        "margin": {"t": 28},
        "xaxis": {
            "tickvals": shown,
            "ticktext": [escape(labels[i]) for i in shown],
            "showgrid": False,
            "title": {"text": "layer, from input to output"},
        },
        "yaxis": {
            "tickvals": list(range(len(kinds))),
            "ticktext": [escape(name) for name in (_ALL, *short_names(kinds[1:]))],
            "autorange": "reversed",
            "showgrid": False,
        },
    }
    most = sorted(drift.layers, key=lambda row: -row.relative)[:5]
    alt = "; ".join(f"{plain(row.name)} {percent(row.relative)}" for row in most)
    title = "Relative drift ‖θ − θ*‖ / ‖θ*‖"
    return Figure(title, {"data": [trace], "layout": layout}, alt=f"most in {alt}", wide=True)


def short_names(names: Sequence[str]) -> list[str]:
    """Names by as many of their last parts as tell them apart.

    >>> short_names(["self_attn.q_proj.weight", "mlp.up_proj.weight"])
    ['q_proj', 'up_proj']
    """
    parts = [plain(name).removesuffix(".weight").split(".") for name in names]
    for length in range(1, max(map(len, parts), default=0) + 1):
        short = [".".join(part[-length:]) for part in parts]
        if len(set(short)) == len(short):
            return [cut(name, 16) for name in short]
    return [cut(plain(name), 16) for name in names]


def _by_kind_and_layer(tensors: Sequence[DriftRow]) -> dict[tuple[str, str], DriftRow]:
    found: dict[tuple[str, str], DriftRow] = {}
    for row in tensors:
        other = found.get((row.kind, row.layer), replace(row, distance=0.0, norm=0.0))
        distance, norm = math.hypot(row.distance, other.distance), math.hypot(row.norm, other.norm)
        found[row.kind, row.layer] = replace(row, name=row.layer, distance=distance, norm=norm)
    return found


def _percent(row: DriftRow | None, top: float) -> float | None:
    """Relative drift in percent; an infinite one gets the color of the largest finite one."""
    share = math.nan if row is None else row.relative
    return finite(100 * (top if math.isinf(share) else share))


def _drift_hover(row: DriftRow | None) -> str | None:
    if row is None:
        return None
    moved = f"{percent(row.relative)} ({row.distance:.3g} of {row.norm:.3g})"
    return hover(row.name, (plain(row.kind), moved))
