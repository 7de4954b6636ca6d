"""A sweep as one page: what is on its cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.report.page import card, facts, folded, hero, listing, page, pair, place, tile, tiles
from holdfast.report.plot import JSON
from holdfast.report.sweep_frontier import MOST, distance_plots, frontier_plots, retained_keys
from holdfast.report.sweep_recommend import (
    Recommendation,
    recommend,
    retained,
    targets_of,
    worst_of,
)
from holdfast.report.sweep_text import notes_of, sweep_table
from holdfast.report.words import change_of, plain

if TYPE_CHECKING:
    from holdfast.evaluate.sweep import Sweep

__all__ = ["to_html"]


def to_html(sweep: Sweep) -> str:
    """The page's text.

    Needs plotly, of which it takes the JavaScript.
    """
    sweep = type(sweep).from_json(sweep.to_json())  # lists as tuples, numpy's as floats
    said, first = recommend(sweep), sweep.points[0].report
    plots: dict[str, JSON] = {}
    level, mark = "unknown", "No recommendation"
    if said.alpha is not None:
        level, mark = "little", f"α = {said.alpha:g}"
    return page(
        title=f"{plain(sweep.tuned)}: {said.headline}",
        brand="WiSE-FT sweep",
        cards=[
            hero(level, mark, said.headline, said.sentences, (sweep.base, sweep.tuned)),
            _tiles(sweep, said),
            card(*_frontier_card(sweep, said, plots)),
            card(
                "Distance from the base",
                pair(place(plot, plots) for plot in distance_plots(sweep, said.alpha)),
                "How far the predictions and the weights are from the base model's at each α.",
            ),
            card("What could not be measured", listing(notes_of(sweep))),
            card("All figures", folded(sweep_table(sweep), opened=True)),
            card(
                "How it was measured",
                facts({"Settings": first.settings, "Versions": first.versions}),
            ),
        ],
        plots=plots,
        data=sweep.to_json(),
        download="sweep.json",
        version=first.versions.get("holdfast", ""),
    )


def _frontier_card(
    sweep: Sweep, said: Recommendation, plots: dict[str, JSON]
) -> tuple[str, str, str]:
    """Title, plots and what they show."""
    drawn = pair(place(plot, plots) for plot in frontier_plots(sweep, said.alpha))
    tests = len(retained_keys(sweep))
    if not tests:
        title, about = "What is learned", "Up is better."
    elif not targets_of(sweep):
        title, about = "What is kept", "Up is better."
    else:
        title = "What is learned and what is kept"
        about = "Right is better on the target, up is better on what should be kept; labels are α."
    about += " The dotted line is the base; whiskers are 95 % intervals of the change from it."
    if said.alpha is not None:
        about += " Green is recommended."
    if tests > MOST:
        about += f" These are the {MOST} of {tests} tests that lose most; the table has all."
    return title, drawn, about


def _tiles(sweep: Sweep, said: Recommendation) -> str:
    """Target and worst loss of the chosen model, and the worst loss of the tuned one."""
    found = []
    for point, score in targets_of(sweep):
        if point.alpha == said.alpha:
            change = change_of(score)
            label = f"{plain(score.name)} at α = {point.alpha:g}"
            found.append(tile(label, change.signed, change.unit, change.outcome))
    for point in sweep.points:
        if point.alpha in (said.alpha, 1) and point.alpha != 0 and retained(point.report):
            who = "the tuned model" if point.alpha == 1 else f"α = {point.alpha:g}"
            worst = worst_of(point.report)
            if worst is None:
                found.append(tile(f"Worst loss of {who}", "none", "measurable"))
            else:
                change = change_of(worst)
                label = f"Worst loss of {who}: {plain(worst.name)}"
                found.append(tile(label, change.signed, change.unit, "lost"))
    return tiles(found)
