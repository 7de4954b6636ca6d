"""The plots of the predictions, the weights and the training run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from holdfast.evaluate.report import Curve, Divergence, Drift, DriftRow, Estimate
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
    whiskers,
)
from holdfast.report.verdict import source_of
from holdfast.report.words import nats, percent, plain


def divergence_plot(divergences: Sequence[Divergence]) -> Plot:
    """KL on each kind of input."""
    values = [finite(d.kl.value) for d in divergences]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": values,
        "y": list(range(len(values))),
        "width": 0.34,
        "marker": {"color": "var(--accent)", "cornerradius": 4},
        "error_x": whiskers([d.kl for d in divergences]),
        "customdata": [
            [escape(source_of(d)), nats(d.kl.value), _interval(d.kl), escape(plain(d.per))]
            for d in divergences
        ],
        "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]} nats a %{customdata[3]}"
        f"<br>95 %: %{{customdata[2]}}{NO_BOX}",
    }
    layout = row_layout([d.name for d in divergences])
    layout["xaxis"] = axis(rangemode="tozero", zeroline=True, nticks=5)
    layout["margin"]["b"], layout["height"] = 28, layout["height"] - 24  # no title below
    layout["annotations"] = at_the_right([nats(d.kl.value) for d in divergences])
    return Plot("KL(base‖tuned), nats a prediction", {"data": [trace], "layout": layout})


def drift_plot(drift: Drift) -> Plot | None:
    """A heat map of layers × kinds above bars by layer, or None if there is no layer."""
    if not drift.layers:
        return None
    layers = [row.name for row in drift.layers]
    kinds = _kinds(drift.tensors)
    labels = short_layers(layers)
    columns = list(range(len(layers)))
    data = [_heat_map(drift.tensors, layers, kinds)] if kinds else []
    moved = [_percent(row, math.inf) for row in drift.layers]
    data.append(
        {
            "type": "bar",
            "x": columns,
            "y": moved,
            "marker": {"color": "var(--accent)"},
            "customdata": [_hover(row, "all of it") for row in drift.layers],
            "hovertemplate": f"%{{customdata}}{NO_BOX}",
        }
    )
    numbered = [i for i in columns if labels[i].isdigit()] or columns
    shown = numbered[:: max(1, math.ceil(len(numbered) / 8))]
    height = 22 * len(kinds) + 230
    split = 150 / (height - 70) if kinds else 1.05  # where the heat map starts
    layout = base_layout(height, bargap=0.25, margin={"l": 8, "r": 8, "t": 28, "b": 8})
    layout["xaxis"] = axis(
        tickvals=shown,
        ticktext=[escape(labels[i]) for i in shown],
        range=[-0.6, len(layers) - 0.4],
        showgrid=False,
        title={"text": "layer, from input to output", "font": {"size": 12}, "standoff": 6},
    )
    layout["yaxis"] = axis(domain=[0, split - 0.05], ticksuffix=" %", nticks=4, rangemode="tozero")
    if kinds:
        layout["yaxis2"] = axis(
            domain=[split, 1],
            tickvals=list(range(len(kinds))),
            ticktext=[escape(name) for name in short_names(kinds)],
            autorange="reversed",
            showgrid=False,
        )
    return Plot("Relative drift ‖θ − θ*‖ / ‖θ*‖", {"data": data, "layout": layout})


def curve_plot(curve: Curve) -> Plot:
    """One figure over the steps of training."""
    trace = {
        "type": "scatter",
        "mode": "lines",
        "x": list(curve.steps),
        "y": [finite(value) for value in curve.values],
        "line": {"color": "var(--accent)", "width": 2.5},
        "hovertemplate": f"step %{{x}}<br><b>%{{y:.4g}}</b>{NO_BOX}",
    }
    layout = base_layout(260, margin={"l": 8, "r": 12, "t": 8, "b": 8})
    layout["xaxis"] = axis(
        showgrid=False,
        fixedrange=False,
        nticks=6,
        title={"text": "step", "font": {"size": 12}, "standoff": 6},
    )
    layout["yaxis"] = axis(nticks=8)
    return Plot(plain(curve.name), {"data": [trace], "layout": layout})


def short_layers(names: Sequence[str]) -> list[str]:
    """Layers by their numbers if all that have one are numbered alike.

    >>> short_layers(["model.embed", "model.layers.0", "model.layers.1"])
    ['embed', '0', '1']
    """
    found = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    alike = len({match[1] for match in found if match}) == 1
    short = short_names(names)
    return [m[2] if alike and m else s for m, s in zip(found, short, strict=True)]


def short_names(names: Sequence[str]) -> list[str]:
    """Names by as many of their last parts as tell them apart.

    >>> short_names(["self_attn.q_proj.weight", "mlp.up_proj.weight"])
    ['q_proj', 'up_proj']
    """
    parts = [plain(name).removesuffix(".weight").split(".") for name in names]
    for length in range(1, max(map(len, parts), default=0) + 1):
        short = [".".join(part[-length:]) for part in parts]
        if len(set(short)) == len(short):
            break
    else:
        short = [plain(name) for name in names]
    return [cut(name, 16) for name in short]


def _heat_map(tensors: Sequence[DriftRow], layers: Sequence[str], kinds: Sequence[str]) -> JSON:
    """Relative drift by kind and layer; the colours end where all but 2 % of the cells do."""
    cells = _cells(tensors)
    shares = sorted(row.relative for row in cells.values() if math.isfinite(row.relative))
    top = shares[int(0.98 * (len(shares) - 1))] if shares else 0.0
    return {
        "type": "heatmap",
        "x": list(range(len(layers))),
        "y": list(range(len(kinds))),
        "z": [[_percent(cells.get((k, n)), top) for n in layers] for k in kinds],
        "customdata": [[_hover(cells.get((k, n)), k) for n in layers] for k in kinds],
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
    """The kinds that several layers have; all of them if none does."""
    layers: dict[str, set[str]] = {}
    for row in tensors:
        if row.kind and row.layer:
            layers.setdefault(row.kind, set()).add(row.layer)
    several = [kind for kind, found in layers.items() if len(found) > 1]
    return several or list(layers)


def _cells(tensors: Sequence[DriftRow]) -> dict[tuple[str, str], DriftRow]:
    """By kind and layer, the tensors of both as one."""
    found: dict[tuple[str, str], list[DriftRow]] = {}
    for row in tensors:
        found.setdefault((row.kind, row.layer), []).append(row)
    return {
        (kind, layer): DriftRow(
            layer,
            math.hypot(*(row.distance for row in rows)),
            math.hypot(*(row.norm for row in rows)),
            sum(row.size for row in rows),
        )
        for (kind, layer), rows in found.items()
    }


def _percent(row: DriftRow | None, top: float) -> float | None:
    """Relative drift in per cent; an infinite one is as the largest of the others."""
    if row is None or math.isnan(row.relative):
        return None
    if math.isinf(row.relative):
        return finite(100 * top)
    return finite(100 * row.relative)


def _hover(row: DriftRow | None, kind: str) -> str | None:
    if row is None:
        return None
    return (
        f"<b>{escape(plain(row.name))}</b><br>{escape(plain(kind))}<br>{percent(row.relative)}"
        f" ({row.distance:.3g} of {row.norm:.3g})"
    )


def _interval(e: Estimate) -> str:
    return "–" if e.low is None or e.high is None else f"{nats(e.low)} to {nats(e.high)}"
