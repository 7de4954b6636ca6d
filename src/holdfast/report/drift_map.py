"""The figure of the weights' drift: a heat map of layers × kinds above bars by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast.report.document import Figure
from holdfast.report.plot import ACCENT, JSON, escape, finite, hover
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
    labels = [escape(label) for label in short_names(layers)]
    numbered = [i for i in range(len(layers)) if labels[i].isdigit()] or list(range(len(layers)))
    shown = numbered[:: max(1, math.ceil(len(numbered) / 8))]
    height = 22 * len(kinds) + 230
    split = 150 / (height - 70) if kinds else 1.05  # the height at which the heat map starts
    totals = [(row.distance, row.norm) for row in drift.layers]
    data: list[JSON] = [
        {
            "type": "bar",
            "y": [_percent(cell, math.inf) for cell in totals],
            "marker": {"color": ACCENT},
            "customdata": [
                _hover(name, "all of it", cell) for name, cell in zip(layers, totals, strict=True)
            ],
        }
    ]
    layout: JSON = {
        "height": height,
        "margin": {"t": 28},
        "xaxis": {
            "tickvals": shown,
            "ticktext": [labels[i] for i in shown],
            "range": [-0.6, len(layers) - 0.4],
            "showgrid": False,
            "title": {"text": "layer, from input to output"},
        },
        "yaxis": {"domain": [0, split - 0.05], "ticksuffix": " %", "nticks": 4},
    }
    if kinds:
        data.append(_heat_map(_cells(drift.tensors), layers, kinds))
        layout["yaxis2"] = {
            "domain": [split, 1],
            "tickvals": list(range(len(kinds))),
            "ticktext": [escape(name) for name in short_names(kinds)],
            "autorange": "reversed",
            "showgrid": False,
        }
    most = sorted(drift.layers, key=lambda row: -row.relative)[:5]
    alt = "; ".join(f"{plain(row.name)} {percent(row.relative)}" for row in most)
    title = "Relative drift ‖θ − θ*‖ / ‖θ*‖"
    return Figure(title, {"data": data, "layout": layout}, alt=f"most in {alt}", wide=True)


def _heat_map(cells: Cells, layers: Sequence[str], kinds: Sequence[str]) -> JSON:
    """Relative drift by kind and layer; the color scale covers all but 2 % of the cells."""
    shares = sorted(share for cell in cells.values() if math.isfinite(share := _share(cell)))
    top = shares[int(0.98 * (len(shares) - 1))] if shares else 0.0
    rows = [[(kind, layer) for layer in layers] for kind in kinds]
    return {
        "type": "heatmap",
        "yaxis": "y2",
        "z": [[_percent(cells.get(key), top) for key in row] for row in rows],
        "customdata": [[_hover(key[1], key[0], cells.get(key)) for key in row] for row in rows],
        "zmin": 0,
        "zmax": finite(100 * top) or 1,
        "colorscale": [[i / 4, f"var(--heat-{i})"] for i in range(5)],
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


def _hover(layer: str, kind: str, cell: tuple[float, float] | None) -> str | None:
    if cell is None:
        return None
    moved = f"{percent(_share(cell))} ({cell[0]:.3g} of {cell[1]:.3g})"
    return hover(layer, (plain(kind), moved))
