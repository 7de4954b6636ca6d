"""The blocks of docs/results.md, one function per block; benchmarks/pages.py calls them.

All but those of capacity.py and small_model.py show the verdict. They are empty where results are
missing.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verdict
from _markdown import number, table
from _measures import GOALS, PLAIN, REHEARSAL
from _proof_ablations import proof_ablations
from _proof_capacity import proof_capacity
from _proof_continual import proof_continual
from _proof_details import proof_details
from _proof_limits import proof_limits
from _proof_misses import proof_misses
from _proof_rates import proof_rates
from _proof_small import proof_small
from _proof_text import (
    TITLES,
    beyond,
    dominance,
    edge_of_rates,
    folded,
    least,
    listed,
    name_of,
    percent,
    shown,
)
from proof_pictures import CORNER, is_shown
from verdict import SETTINGS, careful_plain_of, opponents, ours_of, plain_of, rehearsals

from holdfast.methods.auto import default_lr
from holdfast.stages import TrainingSize

KINDS = {
    "new": "new settings", "seen": "settings that were seen during development",
    "chosen on": "settings whose data chose a default",
}  # fmt: skip
FURTHER = {
    "abilities": "tests of abilities that the texts hardly show",
    "saturated": "a base close to saturation",
    "continual": "three tasks in a row",
}
FIGURES = {"target": "learned", "mean_kept": "kept"}
RowOf = Callable[[dict[str, Any]], dict[str, Any]]
RowsOf = Callable[[dict[str, Any]], verdict.Rows]
PICTURE = "proof-headline.svg"
NOT_RUN = (
    "The settings of the protocol have not been run yet. All results so far are on the page "
    "[The papers' experiments and all methods](results-papers.md)."
)


def proof_verdict() -> str:
    """How many settings reach the goals, and a row per setting."""
    found = verdict.read()
    if not any(name in found["settings"] or name in found["missing"] for name in SETTINGS):
        return NOT_RUN
    told = "\n".join(f"- {sentence}" for sentence in _told(found))
    rows = []
    for name, setting in (found["settings"] | found["unfinished"]).items():
        ours, plain = ours_of(setting), plain_of(setting)
        goal = "not finished" if name in found["unfinished"] else _goal(setting["reached"])
        rows.append([
            name_of(name), SETTINGS[name][2], percent(ours["target"], ours["target_interval"]),
            percent(ours["mean_kept"], ours["kept_interval"]), least(ours),
            percent(plain["mean_kept"]), goal, " / ".join(_right(setting)) or "—",
            dominance(opponents(setting)),
        ])  # fmt: skip
    heads = ["setting", "was", "learned, %", "kept, %", "kept least, %", "plain keeps, %",
             "reached", "right answers, %", "points that dominate it"]  # fmt: skip
    told_of_rates = _rates(found["settings"] | found["unfinished"])
    legend = folded("What the columns mean", f"{_LEGEND}{told_of_rates}")
    return f"{told}\n\n{table(heads, rows)}\n\n{legend}" if rows else told


def _right(setting: dict[str, Any]) -> list[str]:
    """The right answers of the pretrained model, plain fine-tuning and ``holdfast``, if written."""
    figures = setting["base"], plain_of(setting)["figures"], ours_of(setting)["figures"]
    found = [some["written"] for some in figures if "written" in some]
    return [number(100 * share, 1) for share in found] if len(found) == len(figures) else []


def _goal(reached: dict[str, str]) -> str:
    """The highest goal that is reached, and how.

    >>> _goal({"99": "no", "98": "strictly"}), _goal({"99": "yes", "98": "strictly"})
    ('98/98 strictly', '**99/99**')
    """
    for goal in GOALS:
        if (how := reached[str(goal)]) != "no":
            words = f"{goal}/{goal}" + (" strictly" if how == "strictly" else "")
            return f"**{words}**" if goal == GOALS[0] else words
    return "no"


_LEGEND = (
    "Before the runs a setting was *new*, *seen* in reports during development, or *chosen on*, if "
    "its data chose a default. The text of Shakespeare was one of the retained tests by which "
    "learning rates were chosen. "
    "*Learned*: the gain on the target, in percent of the gain of plain fine-tuning at its best "
    "learning rate; of language models it is the fall of the loss per token. *Plain keeps*: at "
    "this learning rate. *Kept*: the mean over the retained tests of what is left of the "
    "pretrained model's figure; a test counts as 100 % at most. Of an accuracy, the part above "
    "chance counts; of a loss, the ratio of before and after. In parentheses: 95 % intervals of a "
    "paired bootstrap over seeds and samples. *99/99*: both are at least 99 %, *strictly* if every "
    "test is. *Right answers*, in writing, of one seed each: of the pretrained model / plain / "
    "`holdfast`. A point of another method *dominates* if it is at least as good in both figures "
    "and better in one, *clearly* if the 95 % intervals of both differences exclude a loss. The "
    "intervals of merged models are wide, as their samples are not recorded; those of one seed do "
    "not show how seeds differ. As a test counts as 100 % at most, an interval of *kept* "
    "may lie lower than its figure. The points of *rehearsal*, which trains on real old data, are "
    "counted on their own. The "
    "[protocol](../benchmarks/proof/PROTOCOL.md) was written before the runs; its end lists what "
    "was changed since."
)


def _rates(settings: dict[str, Any]) -> str:
    """A sentence about the learning rates that × 1 stands for."""
    ones = {}
    for name, setting in settings.items():
        family, _, times = setting["best_plain"].partition("-x")
        if family == PLAIN and times and setting["plain_lr"]:
            ones[SETTINGS[name][0]] = f"{setting['plain_lr'] / float(times):.2g}"
    each = [f"{lr} with {model}" for model, lr in ones.items()]
    return f" On this page × 1 is a learning rate of {listed(each)}." if each else ""


def _told(found: dict[str, Any]) -> list[str]:
    """The verdict in sentences."""
    settings, missing = found["settings"], found["missing"]
    said = _reached(settings) if settings else []
    if other := _other_rates(settings):
        said.append(other.strip())
    lacking = {n: f"{name_of(n)} ({', '.join(missing[n])})" for n in SETTINGS if n in missing}
    if unfinished := [told for name, told in lacking.items() if name not in settings]:
        said.append(
            f"Settings that are not finished, and not counted, with their missing runs: "
            f"{'; '.join(unfinished)}."
        )
    if others := [told for name, told in lacking.items() if name in settings]:
        whole = [setting for name, setting in settings.items() if name not in missing]
        reached = sum(setting["reached"]["99"] != "no" for setting in whole)
        said.append(
            f"Some runs of opponents and of other learning rates are missing: {'; '.join(others)}. "
            "By the rule as first written these settings would not be counted, and 99/99 would be "
            f"reached in {reached} of {len(whole)}."
        )
    if left := [name_of(n) for n in SETTINGS if n not in settings and n not in missing]:
        said.append(f"Settings of the protocol without results: {'; '.join(left)}.")
    if parts := [title for name, title in FURTHER.items() if not found[name]]:
        said.append(f"Other parts of the protocol that have not been run: {listed(parts)}.")
    return said


def _reached(settings: dict[str, Any]) -> list[str]:
    """What the finished settings reach, and what dominates them."""
    counts = verdict.counts(settings)
    both = {
        goal: sum(n for by in counts.values() for how, n in by[goal].items() if how != "no")
        for goal in GOALS
    }
    strict = sum(by[99]["strictly"] for by in counts.values())
    said = [
        f"**`holdfast` reaches 99 % of both in {both[99]} of {len(settings)} settings** "
        f"({strict} strictly), and 98 % of both in {both[98]}. In the others the claim of the "
        "protocol does not hold."
    ]
    parts = [
        f"{sum(n for how, n in by[99].items() if how != 'no')} of the {sum(by[99].values())} "
        f"{KINDS[kind]}"
        for kind, by in counts.items()
        if sum(by[99].values())
    ]
    said.append(f"99/99 is reached in {listed(parts)}.")
    said.append(
        "A method without old data dominates it (at least as good in both figures, better in one) "
        + _dominance(settings, opponents)
    )
    if _points(settings, rehearsals):
        said.append("Rehearsal of real old data does so " + _dominance(settings, rehearsals))
    careful = [
        careful_plain_of(setting)
        for setting in settings.values()
        if careful_plain_of(setting)["mean_kept"] >= ours_of(setting)["mean_kept"]
    ]
    said.append(
        "At the learning rate that keeps the most, of those that learn 99 % or as much as "
        f"`holdfast`, plain fine-tuning keeps at least as much as `holdfast` in {len(careful)} of "
        f"{len(settings)} settings, {sum(row['seeds'] == 1 for row in careful)} of them with one "
        "seed. You need old data to find that learning rate."
    )
    said.append(_by_the_first_rule(settings))
    for edge in ("lowest", "highest"):
        at_edge = [name for name, setting in settings.items() if edge_of_rates(setting) == edge]
        if at_edge:
            said.append(beyond(edge, f" in {'; '.join(map(name_of, at_edge))}"))
    return [*said, *_fewer_right(settings)]


def _dominance(settings: dict[str, Any], rows_of: RowsOf) -> str:
    """In how many settings points of some methods dominate ``holdfast``, and how many points."""
    points = _points(settings, rows_of)
    better = [row["dominates"] for row in points if row["dominates"] != "no"]
    where = sum(any(r["dominates"] != "no" for r in rows_of(one)) for one in settings.values())
    return (
        f"in {where} of {len(settings)} settings, with {len(better)} of {len(points):,} points, "
        f"{better.count('clearly')} clearly."
    )


def _fewer_right(settings: dict[str, Any]) -> list[str]:
    """A sentence about the right answers that the models write."""
    both = {
        name: [one["figures"] for one in (ours_of(setting), plain_of(setting))]
        for name, setting in settings.items()
        if _right(setting)
    }
    if not both:
        return []
    fewer = [name for name, (ours, plain) in both.items() if ours["written"] < plain["written"]]
    surely = [name_of(name) for name in fewer if _is_certain(*both[name])]
    return [
        f"After `holdfast` a model writes fewer right answers than after plain fine-tuning in "
        f"{len(fewer)} of {len(both)} settings (one seed each). The difference is more than two "
        f"standard errors in {'; '.join(surely) or 'none'}."
    ]


def _is_certain(one: dict[str, float], other: dict[str, float]) -> bool:
    """Whether two shares of right answers differ by more than two standard errors."""
    error = math.hypot(one.get("written_se", 0.0), other.get("written_se", 0.0))
    return abs(one["written"] - other["written"]) > 2 * error


def _points(settings: dict[str, Any], rows_of: RowsOf) -> verdict.Rows:
    return [row for setting in settings.values() for row in rows_of(setting)]


def proof_headline(folder: str = "") -> str:
    """The first picture, and what it says; ``folder`` is that of the page's pictures."""
    whole = verdict.read()
    settings = whole["settings"]
    if not settings:
        return ""
    reached = [name for name, setting in settings.items() if setting["reached"]["99"] != "no"]
    new = sum(SETTINGS[name][2] == "new" for name in settings)
    counted = (
        f"These are all {len(SETTINGS)} settings"
        if len(settings) == len(SETTINGS)
        else f"These are {len(settings)} of the {len(SETTINGS)} settings"
    )
    of_new = sum(SETTINGS[name][2] == "new" for name in reached) or "none"
    picture = f"![What plain fine-tuning and holdfast keep in each setting]({folder}img/{PICTURE})"
    learned, kept = (_middle_and_least(settings, ours_of, field)[0] for field in FIGURES)
    of_plain, of_careful = (
        _middle_and_least(settings, row_of, "mean_kept")[0]
        for row_of in (plain_of, careful_plain_of)
    )
    return (
        f"{picture}\n\nWith nothing set, `holdfast` learned {learned} of what plain fine-tuning "
        f"learns at its best learning rate, and kept {kept} of what the model knew. Plain "
        f"fine-tuning kept {of_plain} at this learning rate (medians of {len(settings)} settings). "
        f"Of the learning rates at which it learns 99 %, or as much as `holdfast`, the one that "
        f"keeps the most kept {of_careful}; you need old data to find it. `holdfast` reached at "
        f"least 99 % of both in **{len(reached)} of {len(settings)} settings**; by the 95 % "
        f"intervals, it is certain in {_certain(settings) or 'none'} of them. {_least(settings)}"
        "\n\n*Learned* is the fall of the loss on the new task, or the rise of "
        "the accuracy above chance. *Kept* is the mean over tests that were not trained on: the "
        "ratio of the losses before and after, or what is left of the accuracy above chance. Each "
        "test counts as 100 % at most. At a loss of 3 nats, 99 % kept is 3 % more perplexity.\n\n"
        f"{counted} of the protocol. "
        + (
            f"In {new} of them nothing had been trained before the defaults were fixed; `holdfast` "
            f"reached 99 % of both in {of_new} of these. {_by_the_first_rule(settings)}"
            if new
            else "All of them were seen before the defaults were fixed."
        )
        + "".join(
            f" {name_of(name)} is not finished and not counted (so far learned "
            f"{percent(ours['target'])} % and kept {percent(ours['mean_kept'])} %)."
            for name, setting in whole["unfinished"].items()
            for ours in [ours_of(setting)]
        )
        + _other_rates(settings)
        + " The language models are instruct models, dequantized from 4 bits."
    )


def _by_the_first_rule(settings: dict[str, Any]) -> str:
    """What changes if the best of plain may be a learning rate with one seed."""
    found = [setting["of_any_seeds"] for setting in settings.values()]
    learned, kept = (
        percent(statistics.median(one[field] for one in found))
        for field in ("target", "plain_kept")
    )
    return (
        "One rule was changed after the first runs: the learning rate of plain fine-tuning that "
        "counts is the best of those with the most seeds. With any number of seeds, plain "
        f"fine-tuning keeps {kept} % in the median, `holdfast` learns {learned} %, and 99/99 is "
        f"reached in {sum(one['reached'] != 'no' for one in found)} of {len(found)} settings."
    )


def proof_medians() -> str:
    """What is learned and kept in the median setting and in the worst."""
    settings = verdict.read()["settings"]
    if not settings:
        return ""
    ways = {
        "`holdfast`": ours_of,
        "plain fine-tuning, at the learning rate that is best for the target": plain_of,
        "plain fine-tuning, at the one that keeps the most (of those that learn 99 %, or as much "
        "as `holdfast`); you need old data to find it": careful_plain_of,
    }
    rows = [
        [
            way,
            *(cell for field in FIGURES for cell in _middle_and_least(settings, row_of, field)),
            f"{sum(row_of(one)['seeds'] == 1 for one in settings.values())} of {len(settings)}",
        ]
        for way, row_of in ways.items()
    ]
    heads = [f"{title} in {where}" for title in FIGURES.values()
             for where in ("the median setting", "the worst")]  # fmt: skip
    return table(["", *heads, "settings with one seed"], rows)


def _middle_and_least(settings: dict[str, Any], row_of: RowOf, field: str) -> tuple[str, str]:
    """A figure of a row per setting: the median and the least."""
    values = [row_of(setting)[field] for setting in settings.values()]
    return f"{percent(statistics.median(values))} %", f"{percent(min(values))} %"


def _least(settings: dict[str, Any]) -> str:
    """Where ``holdfast`` learned and kept the least."""
    ends = []
    for field, title in FIGURES.items():
        value, name = min((ours_of(setting)[field], name) for name, setting in settings.items())
        ends.append(f"{title} {percent(value)} % ({name_of(name)})")
    return f"At worst it {listed(ends)}."


def _certain(settings: dict[str, Any]) -> int:
    """In how many settings the intervals of both figures are above 99 %."""
    both = ("target_interval", "kept_interval")
    return sum(
        all(ours_of(setting)[field][0] >= CORNER for field in both) for setting in settings.values()
    )


def _other_rates(settings: dict[str, Any]) -> str:
    """A sentence about the settings that did not run at the present defaults."""
    now = {
        name: default_lr(parameters, size=TrainingSize(samples, epochs))
        for name, (parameters, samples, epochs) in TITLES["sizes"].items()
    }
    return "".join(
        f" In {name_of(name)}, `holdfast` ran at the learning rate {lr:g}, which was its default "
        f"then; it is {now[name]:g} now."
        for name, setting in settings.items()
        if name in now and (lr := setting["lr"]) not in (None, now[name])
    )


def proof_all() -> str:
    """The picture of all points."""
    settings = verdict.read()["settings"]
    if not settings:
        return ""
    points, upper = _points(settings, opponents), _points(settings, rehearsals)
    every = [*points, *upper, *map(ours_of, settings.values())]
    outside = sum(not is_shown(row) for row in every)
    also = f" and {_inside(upper)} of rehearsal with real old data" if upper else ""
    ours = sum(setting["reached"]["99"] != "no" for setting in settings.values())
    return shown(
        "proof-all", "Learned against kept, of all methods in all settings",
        f"Each point is a method at one learning rate in one setting. The shaded corner is 99/99: "
        f"`holdfast` is there in {ours} of {len(settings)} settings. So are "
        f"{_inside(points)} points of methods without old data{also}. Points outside the "
        f"picture: {outside}.",
    )  # fmt: skip


def _inside(rows: verdict.Rows) -> str:
    """How many points are in the corner."""
    inside = sum(min(row["target"], row["mean_kept"]) >= CORNER for row in rows)
    return f"{inside} of {len(rows):,}"


def proof_tests() -> str:
    """The picture of single tests."""
    settings = verdict.read()["settings"]
    if not settings:
        return ""
    sentences = []
    for title, row_of in (("Plain fine-tuning", plain_of), ("`holdfast`", ours_of)):
        kept = [
            (value, TITLES["tests"][test], name_of(name))
            for name, setting in settings.items()
            for test, value in row_of(setting)["kept"].items()
        ]
        least, test, where = min(kept)
        below = sum(value < CORNER for value, *_ in kept)
        sentences.append(
            f"{title} keeps {percent(statistics.median(value for value, *_ in kept))} % of a test "
            f"in the median and {percent(least)} % at least ({test} after {where}); {below} of "
            f"{len(kept)} are below {CORNER} %."
        )
    about = "Kept per retained test, plain fine-tuning beside holdfast"
    picture = shown("proof-tests", about, "Each point is a setting. " + " ".join(sentences))
    return folded("Every retained test", picture)


def proof_equal_target() -> str:
    """The picture of opponents at the target of ``holdfast``."""
    settings = verdict.read()["settings"]
    if not settings:
        return ""
    rows = {row for setting in settings.values() for row in setting["equal_target"]}
    sentences = [_at_equal_target(settings, "A method without old data", rows - {REHEARSAL})]
    if REHEARSAL in rows:
        sentences.append(_at_equal_target(settings, "Rehearsal of real old data", {REHEARSAL}))
    return shown(
        "proof-equal-target", "Kept by each method at the target of holdfast",
        "The methods are compared at the target that `holdfast` reaches, between the nearest of "
        "their points that no other point of the same method dominates. "
        f"{' '.join(sentences)}",
    )  # fmt: skip


def _at_equal_target(settings: dict[str, Any], who: str, rows: set[str]) -> str:
    """How often some rows reach the target of ``holdfast``, and keep less at it."""
    found = [
        (kept, ours_of(setting)["mean_kept"], [p["row"] for p in setting["points"]].count(row))
        for setting in settings.values()
        for row, kept in setting["equal_target"].items()
        if row in rows
    ]
    once = sum(kept is None and points == 1 for kept, _, points in found)
    less = [ours - kept for kept, ours, _ in found if kept is not None]
    said = f"{who} reaches this target in {len(less)} of {len(found)} cases."
    if once:
        said += f" Of the others, {once} have a single point."
    if less:
        median = percent(statistics.median(less)).replace("-", "−")
        said += (
            f" Where it does, it keeps less than `holdfast` in {sum(x > 0 for x in less)} of "
            f"{len(less)} cases" + (f", in the median {median} points." if len(less) > 4 else ".")
        )
    return said


TABLES = (
    proof_headline, proof_medians, proof_verdict, proof_misses, proof_all, proof_tests,
    proof_equal_target, proof_limits, proof_capacity, proof_small, proof_ablations, proof_rates,
    proof_continual, proof_details,
)  # fmt: skip
