"""The figure of the weights' drift: a heat map of layers × kinds above bars by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast.report.document import Figure
from holdfast.report.plot import ACCENT, JSON, NO_BOX, axis, escape, finite, layout
from holdfast.report.verdict import short_names
from holdfast.report.words import percent, plain

if TYPE_CHECKING:
    from holdfast.evaluate.report import Drift, DriftRow

__all__ = ["drift_map"]

#: Distance and norm of all tensors of one kind in one layer.
Cells = Mapping[tuple[str, str], tuple[float, float]]


def drift_map(drift: Drift) -> Figure:
    """Draw the drift of a model that has layers."""
    layers = [row.name for row in drift.layers]
    kinds = _kinds(drift.tensors)
    labels = short_names(layers)
    columns = list(range(len(layers)))
    bars = {
        "type": "bar",
        "x": columns,
        "y": [_percent((row.distance, row.norm), math.inf) for row in drift.layers],
        "marker": {"color": ACCENT},
        "customdata": [_hover(row.name, "all of it", (row.distance, row.norm)) for row in drift.layers],
        "hovertemplate": f"%{{customdata}}{NO_BOX}",
    }
    numbered = [i for i in columns if labels[i].isdigit()] or columns
    shown = numbered[:: max(1, math.ceil(len(numbered) / 8))]
    height = 22 * len(kinds) + 230
    split = 150 / (height - 70) if kinds else 1.05  # the height at which the heat map starts
    made = layout(height, 8, bargap=0.25)
    made["margin"]["t"] = 28
    made["xaxis"] = axis(
        "layer, from input to output",
        tickvals=shown,
        ticktext=[escape(labels[i]) for i in shown],
        range=[-0.6, len(layers) - 0.4],
        showgrid=False,
    )
    made["yaxis"] = axis(domain=[0, split - 0.05], ticksuffix=" %", nticks=4, rangemode="tozero")
    if kinds:
        made["yaxis2"] = axis(
            domain=[split, 1],
            tickvals=list(range(len(kinds))),
            ticktext=[escape(name) for name in short_names(kinds)],
            autorange="reversed",
            showgrid=False,
        )
    data = [_heat_map(_cells(drift.tensors), layers, kinds), bars] if kinds else [bars]
    moved = sorted(drift.layers, key=lambda row: -row.relative)[:5]
    alt = "; ".join(f"{plain(row.name)} {percent(row.relative)}" for row in moved)
    return Figure(
        "Relative drift ‖θ − θ*‖ / ‖θ*‖", {"data": data, "layout": made}, alt=f"most in {alt}"
    )


def _heat_map(cells: Cells, layers: Sequence[str], kinds: Sequence[str]) -> JSON:
    """Relative drift by kind and layer; the color scale covers all but 2 % of the cells."""
    shares = sorted(share for cell in cells.values() if math.isfinite(share := _share(cell)))
    top = shares[int(0.98 * (len(shares) - 1))] if shares else 0.0
    return {
        "type": "heatmap",
        "x": list(range(len(layers))),
        "y": list(range(len(kinds))),
        "z": [[_percent(cells.get((kind, name)), top) for name in layers] for kind in kinds],
        "customdata": [
            [_hover(name, kind, cells.get((kind, name))) for name in layers] for kind in kinds
        ],
        "zmin": 0,
        "zmax": finite(100 * top) or 1,
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": f"%{{customdata}}{NO_BOX}",
        "colorscale": [[i / 4, f"var(--heat-{i})"] for i in range(5)],
        "colorbar": {
            "orientation": "h",
            "thickness": 8,
            "len": 0.5,
            "x": 1,
            "xanchor": "right",
            "y": 1.01,
            "yanchor": "bottom",
            "ypad": 4,
            "ticksuffix": " %",
            "nticks": 4,
            "outlinewidth": 0,
            "tickfont": {"size": 11},
        },
        "yaxis": "y2",
    }


def _kinds(tensors: Sequence[DriftRow]) -> list[str]:
    """The kinds that several layers have; all kinds if none has."""
    layers: dict[str, set[str]] = {}
    for row in tensors:
        if row.kind and row.layer:
            layers.setdefault(row.kind, set()).add(row.layer)
    several = [kind for kind, found in layers.items() if len(found) > 1]
    return several or list(layers)


def _cells(tensors: Sequence[DriftRow]) -> Cells:
    found: dict[tuple[str, str], list[DriftRow]] = {}
    for row in tensors:
        found.setdefault((row.kind, row.layer), []).append(row)
    return {
        key: (math.hypot(*(r.distance for r in rows)), math.hypot(*(r.norm for r in rows)))
        for key, rows in found.items()
    }


def _share(cell: tuple[float, float]) -> float:
    distance, norm = cell
    return distance / norm if norm > 0 else math.inf if distance > 0 else 0.0


def _percent(cell: tuple[float, float] | None, top: float) -> float | None:
    """Relative drift in per cent; an infinite one gets the color of the largest finite one."""
    share = math.nan if cell is None else _share(cell)
    return finite(100 * (top if math.isinf(share) else share))


def _hover(name: str, kind: str, cell: tuple[float, float] | None) -> str | None:
    if cell is None:
        return None
    moved = f"{percent(_share(cell))} ({cell[0]:.3g} of {cell[1]:.3g})"
    return f"<b>{escape(plain(name))}</b><br>{escape(plain(kind))}<br>{moved}"
