"""The figure of the weights' drift: a heat map of kinds of parameters × layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.report.document import Figure
from holdfast.report.plot import JSON, escape, finite, hover
from holdfast.report.words import cut, percent, plain

if TYPE_CHECKING:
    from holdfast.evaluate.report import Drift, DriftRow

_ALL = "all weights"


def drift_map(drift: Drift) -> Figure:
    """Draw the relative drift by kind and layer; the first row is the whole layer."""
    layers = [row.name for row in drift.layers]
    cells = {(_ALL, row.name): replace(row, kind=_ALL) for row in drift.layers}
    cells |= _cells(drift.tensors)
    kinds = [_ALL, *_kinds(drift.tensors)]
    shares = sorted(row.relative for row in cells.values() if math.isfinite(row.relative))
    top = shares[int(0.98 * (len(shares) - 1))] if shares else 0.0  # without outliers
    rows = [[cells.get((kind, layer)) for layer in layers] for kind in kinds]
    trace: JSON = {
        "type": "heatmap",
        "z": [[_percent(row, top) for row in some] for some in rows],
        "customdata": [[_hover(row) for row in some] for some in rows],
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


def _kinds(tensors: Sequence[DriftRow]) -> list[str]:
    """The kinds that several layers have; all kinds if none has."""
    layers: dict[str, set[str]] = {}
    for row in tensors:
        if row.kind and row.layer:
            layers.setdefault(row.kind, set()).add(row.layer)
    several = [kind for kind, found in layers.items() if len(found) > 1]
    return several or list(layers)


def _cells(tensors: Sequence[DriftRow]) -> dict[tuple[str, str], DriftRow]:
    """By kind and layer, all tensors of both as one row."""
    found: dict[tuple[str, str], list[DriftRow]] = {}
    for row in tensors:
        found.setdefault((row.kind, row.layer), []).append(row)
    return {
        (kind, layer): replace(
            rows[0],
            name=layer,
            distance=math.hypot(*(row.distance for row in rows)),
            norm=math.hypot(*(row.norm for row in rows)),
        )
        for (kind, layer), rows in found.items()
    }


def _percent(row: DriftRow | None, top: float) -> float | None:
    """Relative drift in percent; an infinite one gets the color of the largest finite one."""
    share = math.nan if row is None else row.relative
    return finite(100 * (top if math.isinf(share) else share))


def _hover(row: DriftRow | None) -> str | None:
    if row is None:
        return None
    moved = f"{percent(row.relative)} ({row.distance:.3g} of {row.norm:.3g})"
    return hover(row.name, (plain(row.kind), moved))
