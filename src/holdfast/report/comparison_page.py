"""A comparison as one page: what is on its cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from holdfast.comparison.results import Results, Summary
from holdfast.report.comparison_columns import change_table, main_table, tests_of
from holdfast.report.comparison_frontier import MOST, frontier_plot, out_of_view, test_plots
from holdfast.report.comparison_recommend import Recommendation, recommend, standard_of
from holdfast.report.comparison_table import failures
from holdfast.report.comparison_training import cost_plots, curve_plots
from holdfast.report.comparison_words import change_in, share, short_change
from holdfast.report.page import card, facts, folded, hero, listing, page, pair, place, tile, tiles
from holdfast.report.plot import JSON
from holdfast.report.words import listed, plain

__all__ = ["to_html"]

_ABOUT_TRAINING = (
    "The first seed of each recipe. The loss is the one that the recipe minimises: FLOW's weighs "
    "samples. Merging, as in WiSE-FT, comes after the last update."
)
_ABOUT_COST = "Training and testing together: of the seeds, the median time and the largest memory."


def to_html(results: Results) -> str:
    """The page's text.

    Needs plotly, of which it takes the JavaScript.
    """
    found, said = results.summaries(), recommend(results)
    plots: dict[str, JSON] = {}
    level, mark = ("little", plain(said.label)) if said.label else ("unknown", "No recommendation")
    versions = results.runs[0].versions if results.runs else {}
    names = [_short(str(results.plan[key])) for key in ("model", "data") if key in results.plan]
    cards = [hero(level, mark, said.headline, said.sentences, names)]
    if found:
        cards += [
            _tiles(found, said),
            _frontier(found, said, plots),
            _tests(found, said, plots),
            _tables(results, found),
            card(
                "During training",
                pair(place(plot, plots) for plot in curve_plots(found, said.label)),
                _ABOUT_TRAINING,
            ),
            card(
                "What it takes",
                pair(place(plot, plots) for plot in cost_plots(found, said.label)),
                _ABOUT_COST,
            ),
        ]
    cards += [
        card("Failed runs", listing(failures(results))),
        card("How it was run", facts({"Plan": _flat(results.plan), "Versions": versions})),
    ]
    return page(
        title=f"{names[0] if names else 'Comparison'}: {said.headline}",
        brand="comparison",
        cards=cards,
        plots=plots,
        data=results.to_json(),
        download="results.json",
        version=versions.get("holdfast", ""),
    )


def _tiles(found: Sequence[Summary], said: Recommendation) -> str:
    """Target and loss of the recommended recipe, and of standard fine-tuning."""
    standard = standard_of(found)
    shown = {"recommended": next((s for s in found if s.label == said.label), None)}
    if standard is not None and standard is not shown["recommended"]:
        shown["standard"] = standard
    made = []
    for summary in filter(None, shown.values()):
        name, change = plain(summary.label), change_in(summary.target)
        unit = change.unit.removeprefix("% ")
        outcome = "gained" if summary.target.gain > 0 else "lost"
        text = f"{short_change(change)} {unit}"
        made.append(tile(f"{plain(summary.target.name)} with {name}", text, unit, outcome))
        if summary.retained:
            unit = "on average"
            outcome = "lost" if summary.loss > 0 else ""
            made.append(
                tile(f"Forgotten with {name}", f"{share(summary.loss)} {unit}", unit, outcome)
            )
    return tiles(made)


def _frontier(found: Sequence[Summary], said: Recommendation, plots: dict[str, JSON]) -> str:
    if not any(s.retained for s in found):
        return ""
    about = (
        "Right is better on the target, up is better on what should be kept; the line joins what "
        "no other recipe beats on both. The dotted line is the pretrained model."
    )
    if any(s.seeds > 1 for s in found):
        about += " Points are medians over the seeds, whiskers their range, small dots each seed."
    green = "Green is recommended, red" if said.label else "Red"
    if any(s.recipe == "standard" for s in found):
        about += f" {green} is standard fine-tuning."
    elif said.label:
        about += " Green is recommended."
    if far := out_of_view(found):
        about += f" Too far off to be drawn: {listed([plain(label) for label in far])}."
    drawn = place(frontier_plot(found, said.label), plots)
    return card("What is learned and what is kept", drawn, about)


def _tests(found: Sequence[Summary], said: Recommendation, plots: dict[str, JSON]) -> str:
    count = len(tests_of(found))
    if count < 2:
        return ""
    about = "The same for each retained test by itself."
    if count > MOST:
        about += f" These are the {MOST} of {count} that lose most; the tables have all."
    drawn = pair(place(plot, plots) for plot in test_plots(found, said.label))
    return card("Test by test", drawn, about)


def _tables(results: Results, found: Sequence[Summary]) -> str:
    tables = [folded(main_table(results), opened=True), folded(change_table(found))]
    if (standard := standard_of(found)) is not None and len(found) > 1:
        tables.append(folded(change_table(found, standard)))
    return card("All figures", "".join(tables))


def _flat(plan: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Names and values, of nested ones too; what is empty is left out."""
    found: dict[str, str] = {}
    for name, value in plan.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            found |= (
                {prefix + name: ", ".join(_short(str(item)) for item in value)} if value else {}
            )
        elif value is not None:
            found[prefix + name] = _short(str(value))
    return found


def _short(name: str) -> str:
    """A file by its name, a hub's name as it is."""
    return PurePath(name).name or name if name.startswith(("/", "~", ".")) else name
