"""The plots of scores: how each changed, and where it was before and after."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import groupby

from holdfast.evaluate.report import Estimate, Score
from holdfast.report.plot import (
    JSON,
    NO_BOX,
    Plot,
    at_the_right,
    axis,
    cut,
    escape,
    finite,
    row_layout,
    whiskers,
)
from holdfast.report.tables import OUTCOMES
from holdfast.report.words import Change, between, change_of, kind_of, level, plain

_COLORS = {
    "lost": "var(--lost)",
    "gained": "var(--gained)",
    "same": "var(--same)",
    "unsure": "var(--same)",
    "broken": "var(--lost)",
}


def score_plots(scores: Sequence[Score]) -> list[tuple[Plot, Plot]]:
    """For each unit, the changes and the scores before and after; rows of both side by side.

    The targets come last, by themselves: they are meant to change, and by more than the rest.
    """
    rows = [(score, change_of(score)) for score in scores]

    def panel(row: tuple[Score, Change]) -> tuple[bool, str, bool]:
        return row[0].role == "target", row[1].unit, row[0].lower_is_better

    rows.sort(key=lambda row: -_loss(row))
    order = sorted(dict.fromkeys(map(panel, rows)), key=lambda found: found[0])
    rows.sort(key=lambda row: order.index(panel(row)))
    groups = [list(group) for _, group in groupby(rows, panel)]
    return [(_changes(group), _before_and_after(group)) for group in groups]


def _changes(rows: Sequence[tuple[Score, Change]]) -> Plot:
    unit, lower = rows[0][1].unit, rows[0][0].lower_is_better
    estimates = [Estimate(c.value, c.low, c.high, s.change.n) for s, c in rows]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [finite(c.value) for _, c in rows],
        "y": list(range(len(rows))),
        "width": 0.42,
        "marker": {"color": [_COLORS[c.outcome] for _, c in rows], "cornerradius": 4},
        "error_x": whiskers(estimates),
        "customdata": [
            [
                escape(plain(s.name)),
                escape(c.signed),
                escape(between(c.low, c.high, c.unit)),
                OUTCOMES[c.outcome],
                f"{s.change.n:,}",
            ]
            for s, c in rows
        ],
        "hovertemplate": "<b>%{customdata[0]}</b>: %{customdata[3]}<br>%{customdata[1]}"
        f"<br>95 %: %{{customdata[2]}}<br>n = %{{customdata[4]}}{NO_BOX}",
    }
    layout = row_layout([s.name for s, _ in rows])
    bounds = [x for e in estimates for x in (e.value, e.low, e.high) if x is not None]
    reach = max((abs(x) for x in bounds if math.isfinite(x)), default=0.0) or 1.0
    far = min(1.12 * reach, sys.float_info.max)
    ends = [-far, far]
    layout["xaxis"] = axis(
        range=ends[::-1] if lower else ends,  # worse is always to the left
        zeroline=True,
        nticks=5,
        title={"text": "← worse      better →", "font": {"size": 12}, "standoff": 6},
    )
    texts = [c.signed.removesuffix(f" {c.unit}") for _, c in rows]
    layout["annotations"] = at_the_right(texts, [_COLORS[c.outcome] for _, c in rows])
    target = "The target: change" if rows[0][0].role == "target" else "Change"
    return Plot(_heading(unit).replace("Change", target), {"data": [trace], "layout": layout})


def _before_and_after(rows: Sequence[tuple[Score, Change]]) -> Plot:
    scale = 100 if rows[0][1].unit == "points" else 1
    data: list[JSON] = []
    for i, (score, change) in enumerate(rows):
        ends = [finite(e.value * scale) for e in (score.before, score.after)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": ends,
                "y": [i - 0.13, i + 0.13],
                "line": {"color": _COLORS[change.outcome], "width": 2},
                "hoverinfo": "skip",
            }
        )
    for word, offset, colors in (
        ("before", -0.13, ["var(--card)"] * len(rows)),
        ("after", 0.13, [_COLORS[c.outcome] for _, c in rows]),
    ):
        estimates = [getattr(score, word) for score, _ in rows]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [finite(e.value * scale) for e in estimates],
                "y": [i + offset for i in range(len(rows))],
                "marker": {
                    "size": 11,
                    "color": colors,
                    "line": {"width": 2, "color": [_COLORS[c.outcome] for _, c in rows]},
                },
                "error_x": {**whiskers(estimates, scale), "color": "var(--whisker-soft)"},
                "customdata": [
                    [
                        escape(plain(s.name)),
                        escape(f"{level(s.metric, e.value)} {plain(s.metric)}"),
                        _levels(s.metric, e),
                        f"{e.n:,}",
                    ]
                    for (s, _), e in zip(rows, estimates, strict=True)
                ],
                "hovertemplate": f"<b>%{{customdata[0]}}</b> {word}<br>%{{customdata[1]}}"
                f"<br>95 %: %{{customdata[2]}}<br>n = %{{customdata[3]}}{NO_BOX}",
            }
        )
    layout = row_layout([s.name for s, _ in rows])
    layout["xaxis"] = axis(
        nticks=6, title={"text": _measure(rows), "font": {"size": 12}, "standoff": 6}
    )
    layout["margin"]["r"] = 16
    return Plot("Before ○ and after ●", {"data": data, "layout": layout})


def _measure(rows: Sequence[tuple[Score, Change]]) -> str:
    """What the axis of before and after shows."""
    score = rows[0][0]
    metrics = cut(", ".join(dict.fromkeys(plain(s.metric) for s, _ in rows)), 40)
    words = {"share": f"{metrics}, %", "nll": "nats a token"}.get(kind_of(score.metric), metrics)
    return escape(words) + (" (lower is better)" if score.lower_is_better else "")


def _heading(unit: str) -> str:
    words = {
        "points": "Change in points",
        "nats a token": "Change of the loss, nats a token",
        "% in perplexity": "Change of the perplexity, %",
    }
    return words.get(unit, f"Change {unit}")


def _loss(row: tuple[Score, Change]) -> float:
    """How bad a loss is, negative for a gain; to sort by."""
    score, change = row
    if not math.isfinite(change.value):
        return math.inf
    return change.severity if (change.value > 0) == score.lower_is_better else -change.severity


def _levels(metric: str, e: Estimate) -> str:
    if e.low is None or e.high is None:
        return "–"
    return f"{level(metric, e.low)} to {level(metric, e.high)}"
