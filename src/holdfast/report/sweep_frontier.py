"""The frontier between what was learned and what was kept: the plots of a sweep.

Each retained test has a plot of its own: the target to the right, the test upwards, better always
to the right and up, a point for each α. Without a target, α is to the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.evaluate.report import Divergence, Drift, Estimate, Score
from holdfast.report.plot import (
    JSON,
    NO_BOX,
    Plot,
    axis,
    base_layout,
    cut,
    escape,
    finite,
    whiskers,
)
from holdfast.report.sweep_recommend import Key, key_of, loss_of, retained, targets_of
from holdfast.report.verdict import source_of
from holdfast.report.words import between, change_of, kind_of, level, nats, percent, plain

if TYPE_CHECKING:
    from holdfast.evaluate.sweep import Sweep

__all__ = ["MOST", "distance_plots", "frontier_plots", "retained_keys"]

#: Retained tests that are drawn at most; the table has all.
MOST = 6
_HEIGHT = 330


@dataclass(frozen=True)
class _Figures:
    """One thing that was measured, at each α: what an axis shows.

    Attributes:
        title: what it is.
        values: at each α, in the axis's unit, with their intervals; None where there is none.
        texts: the same for people.
        start: of the base, if it says anything.
        lower_is_better: whether the axis is turned, so that better is up or right.
        suffix: of the axis's numbers.
    """

    title: str
    values: Sequence[Estimate | None]
    texts: Sequence[str]
    start: float | None = None
    lower_is_better: bool | None = None
    suffix: str = ""

    def numbers(self) -> list[float | None]:
        """For Plotly."""
        return [None if e is None else finite(e.value) for e in self.values]

    def axis(self, **more: object) -> JSON:
        """The axis; better is up or to the right."""
        turned = "reversed" if self.lower_is_better else True
        return axis(ticksuffix=self.suffix, nticks=6, autorange=turned, **more)

    def whiskers(self) -> JSON:
        """The intervals."""
        nothing = Estimate(0.0, None, None, 0)
        reach = whiskers([e or nothing for e in self.values])
        return {**reach, "color": "var(--whisker-soft)"}


def frontier_plots(sweep: Sweep, chosen: float | None) -> list[Plot]:
    """A plot for each retained test; of the target alone where there is none."""
    alphas, target = _alphas(sweep), _target(sweep)
    tests = [_of_scores(sweep, key) for key in _worst_tests(sweep)]
    if not tests:
        return [_against(sweep, alphas, target, chosen)] if target else []
    return [_against(sweep, target or alphas, test, chosen) for test in tests]


def distance_plots(sweep: Sweep, chosen: float | None) -> list[Plot]:
    """The divergences of the predictions and the drift of the weights, over α."""
    found = [{d.name: d for d in point.report.divergences} for point in sweep.points]
    names = list(dict.fromkeys(name for row in found for name in row))[:MOST]
    figures = [_of_divergences([row.get(name) for row in found]) for name in names]
    drifts = [point.report.drift for point in sweep.points]
    if any(drifts):
        figures.append(_of_drifts(drifts))
    return [_against(sweep, _alphas(sweep), found, chosen) for found in figures]


def retained_keys(sweep: Sweep) -> list[Key]:
    """What was tested of what should be kept."""
    scores = (score for point in sweep.points for score in retained(point.report))
    return list(dict.fromkeys(key_of(score) for score in scores))


def _against(sweep: Sweep, x: _Figures, y: _Figures, chosen: float | None) -> Plot:
    """One plot: a point for each α."""
    over_alpha = x.lower_is_better is None
    ends = {0.0: "base", 1.0: "tuned"}
    labels, colors, sizes, hovers = [], [], [], []
    for i, point in enumerate(sweep.points):
        text = ends.get(point.alpha, f"{point.alpha:g}")
        best = point.alpha == chosen
        labels.append("" if over_alpha else f"<b>{text}</b>" if best else text)
        colors.append("var(--gained)" if best else "var(--accent)")
        sizes.append(15 if best else 9)
        head = f"<b>α = {point.alpha:g}</b>{', recommended' if best else ''}"
        lines = [y.texts[i]] if over_alpha else [x.texts[i], y.texts[i]]
        hovers.append("<br>".join([head, *map(escape, lines)]))
    trace = {
        "type": "scatter",
        "mode": "lines+markers+text",
        "x": x.numbers(),
        "y": y.numbers(),
        "text": labels,
        "textposition": "top right",
        "textfont": {"size": 12, "color": "var(--ink)"},
        "cliponaxis": False,
        "line": {"color": "var(--accent)", "width": 1.5},
        "marker": {
            "size": sizes,
            "color": colors,
            "opacity": 1,
            "line": {"width": 2, "color": "var(--card)"},
        },
        "error_y": y.whiskers(),
        "customdata": hovers,
        "hovertemplate": f"%{{customdata}}{NO_BOX}",
    }
    if not over_alpha:
        trace["error_x"] = x.whiskers()
    layout = base_layout(_HEIGHT, margin={"l": 8, "r": 40, "t": 26, "b": 8})
    right = escape(cut(x.title, 40)) + ("" if over_alpha else ", better →")
    layout["xaxis"] = x.axis(title=_title(right))
    if over_alpha:
        layout["xaxis"].update(range=[-0.06, 1.06], autorange=False, tickvals=x.numbers())
    up = "better →" if y.lower_is_better is not None else ""  # it is turned with its axis
    layout["yaxis"] = y.axis(title=_title(up))
    if y.start is not None and finite(y.start) is not None:
        layout["shapes"] = [_level(y.start)]
    return Plot(y.title, {"data": [trace], "layout": layout})


def _title(text: str) -> JSON:
    return {"text": text, "font": {"size": 12}, "standoff": 8}


def _level(value: float) -> JSON:
    """A dotted line over the whole width."""
    line = {"color": "var(--same)", "width": 1, "dash": "dot"}
    ends = {"x0": 0, "x1": 1, "xref": "paper", "y0": value, "y1": value}
    return {"type": "line", "layer": "below", "line": line, **ends}


def _alphas(sweep: Sweep) -> _Figures:
    values = [Estimate(point.alpha, None, None, 0) for point in sweep.points]
    return _Figures("α, from the base to the tuned model", values, [""] * len(values))


def _target(sweep: Sweep) -> _Figures | None:
    found = targets_of(sweep)
    return _of_scores(sweep, key_of(found[0][1])) if found else None


def _worst_tests(sweep: Sweep) -> list[Key]:
    """The retained tests in their order; of many, those that lose most at some α."""
    keys = retained_keys(sweep)

    def worst(key: Key) -> float:
        return max(loss_of(point.report, key) for point in sweep.points)

    drawn = sorted(keys, key=worst, reverse=True)[:MOST]
    return [key for key in keys if key in drawn]


def _of_scores(sweep: Sweep, key: Key) -> _Figures:
    """A score at each α, with the interval of its change laid around it."""
    rows = [{key_of(s): s for s in p.report.scores}.get(key) for p in sweep.points]
    score = next(row for row in rows if row is not None)
    scale = 100 if kind_of(score.metric) == "share" else 1
    return _Figures(
        f"{plain(score.name)}, {plain(score.metric)}",
        [None if row is None else _around(row, scale) for row in rows],
        ["" if row is None else _said(row) for row in rows],
        score.before.value * scale,
        score.lower_is_better,
        " %" if scale == 100 else "",
    )


def _around(score: Score, scale: float) -> Estimate:
    low, high = (
        None if bound is None or score.change.n == 1 else (score.before.value + bound) * scale
        for bound in (score.change.low, score.change.high)
    )
    return Estimate(score.after.value * scale, low, high, score.after.n)


def _said(score: Score) -> str:
    value = f"{level(score.metric, score.after.value)} {plain(score.metric)}"
    change = change_of(score)
    interval = "" if change.low is None else f", {between(change.low, change.high, change.unit)}"
    return f"{plain(score.name)}: {value} ({change.signed}{interval})"


def _of_divergences(rows: Sequence[Divergence | None]) -> _Figures:
    one = next(row for row in rows if row is not None)
    return _Figures(
        f"Predictions on {source_of(one)}, nats a {plain(one.per)}",
        [None if row is None else row.kl for row in rows],
        ["" if row is None else f"{nats(row.kl.value)} nats a {plain(row.per)}" for row in rows],
    )


def _of_drifts(rows: Sequence[Drift | None]) -> _Figures:
    shares = [None if row is None else row.total.relative for row in rows]
    return _Figures(
        "Weights, ‖θ − θ*‖ / ‖θ*‖",
        [None if s is None else Estimate(100 * s, None, None, 0) for s in shares],
        ["" if s is None else f"{percent(s)} of their norm" for s in shares],
        suffix=" %",
    )
