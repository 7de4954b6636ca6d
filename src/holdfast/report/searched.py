"""What a search found, in sentences, and the table of its recipes."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from holdfast.report.document import Column, Section, Table
from holdfast.report.recommend import lost
from holdfast.report.words import NONE, cut, kept, listed, plain, reached, score_text, seconds

if TYPE_CHECKING:
    from holdfast.comparison.tuning import Tried, Tuned

#: Before the figures of models.
ON_THE_OTHER_HALF = (
    "The recipe was chosen on one half of the tests. All figures are of the other half, on which "
    "another model may be better."
)


def sentences(found: Tuned) -> list[str]:
    """Summarize a search; figures are of the half that was not used for the choice."""
    outcomes = "trained", "pruned", "failed", "unfinished"
    counts = {name: getattr(found, name) for name in outcomes}
    trials = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    settings = ", ".join(f"{name} = {value:.3g}" for name, value in found.taken.values.items())
    time = "" if found.seconds is None else f" in {seconds(found.seconds)}"
    own = ", its defaults" if found.taken.is_default else ""
    said = [
        f"Found ({plain(found.taken.chosen.label)}{own}): {settings}.",
        f"Trials: {trials}{time}; {found.candidates} models tested, {len(found.frontier)} of them "
        "on the frontier.",
    ]
    if len(found.recipes) > 1:
        said += _stopped(found)
    if found.taken.rung < 1:
        made = f"{_fraction(found.taken.rung)} of the updates"
        said.insert(0, f"No training was completed: the models compared made {made}.")
    if found.default is not None and not found.taken.is_default:
        other = found.default.reported
        score = reached(other.target.name, other.target.metric, other.target.after)
        said.append(" ".join([f"With the defaults: {score}.", *kept(other.retained)]))
    elif found.default is None and len(found.recipes) == 1:
        said.append("The trial with the default settings did not complete.")
    return said


def by_recipe(found: Tuned) -> tuple[Section, Section]:
    """The table of the recipes, and why others have no result.

    One row per recipe with a trial, a recommended one first, then by how far they came.
    """
    winner = found.taken.recipe if found.recommendation().label else ""
    starred = " ★ recommended." if winner else ""
    tried = [one for one in found.recipes if one.trials]
    rows = sorted(tried, key=lambda one: (one.recipe != winner, *_rank(one)))
    target = found.taken.reported.target
    has_tests = bool(found.taken.reported.retained)
    table = Table.of(
        "Recipes",
        rows,
        {
            Column("recipe"): lambda one: plain(one.recipe) + " ★" * (one.recipe == winner),
            Column("target", f"{plain(target.name)} {plain(target.metric)}"): _target,
            **({Column("lost"): _lost} if has_tests else {}),
            Column("trained"): lambda one: _fraction(one.best.rung) if one.best else NONE,
            Column("trials"): lambda one: str(one.trials),
            Column("settings", rank=3): _settings,
        },
        note="Of each recipe, the model to take of its own that were trained longest: its score on "
        "the target, what it lost on the retained tests, and the share of the updates at which it "
        "was measured. Models that were trained for different shares cannot be compared; those "
        f"that were stopped early took at most a few samples of each test.{starred}",
        tones=tuple("good" if one.recipe == winner else "" for one in rows),
        opened=True,
    )
    notes = [f"{plain(name)} was left out: {plain(why)}" for name, why in found.left_out.items()]
    notes += [
        f"{plain(one.recipe)} failed in {one.failed} of {one.trials} trials: {plain(one.error)}"
        for one in rows
        if one.error
    ]
    return Section("Recipe by recipe", tables=(table,)), Section("Left out", notes=tuple(notes))


def _stopped(found: Tuned) -> list[str]:
    """Which recipes came no further than which rung."""
    rungs = sorted({one.best.rung for one in found.recipes if one.best and one.best.rung < 1})
    said = []
    for rung in rungs:
        names = [one.recipe for one in found.recipes if one.best and one.best.rung == rung]
        said.append(f"at {_fraction(rung)} of the updates: {listed(names, most=50)}")
    stopped = [f"Stopped early {'; '.join(said)}."] if said else []
    if unseen := [one.recipe for one in found.recipes if not one.best and not one.failed]:
        stopped.append(f"Not measured: {listed(unseen, most=50)}.")
    return stopped


def _rank(one: Tried) -> tuple[float, float]:
    if one.best is None:
        return 1.0, 0.0
    target = one.best.reported.target
    return -one.best.rung, target.after if target.lower_is_better else -target.after


def _target(one: Tried) -> str:
    if one.best is None:
        return "failed" if one.failed else NONE
    target = one.best.reported.target
    return score_text(target.metric, target.after)


def _lost(one: Tried) -> str:
    return lost(one.best.reported.loss) if one.best else NONE


def _settings(one: Tried) -> str:
    values = one.best.values if one.best else {}
    return cut(", ".join(f"{name} {value:.3g}" for name, value in values.items()), 60) or NONE


def _fraction(rung: float) -> str:
    """
    >>> _fraction(1 / 9), _fraction(1.0)
    ('1/9', 'all')
    """
    return "all" if rung == 1 else str(Fraction(rung).limit_denominator(1000))
