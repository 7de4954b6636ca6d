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
from _proof_headline import other_rates, proof_headline, proof_medians
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
from verdict import (
    SETTINGS,
    careful_plain_of,
    frugal_plain_of,
    opponents,
    ours_of,
    plain_of,
    rehearsals,
)

KINDS = {
    "new": "new settings", "seen": "settings that were seen during development",
    "chosen on": "settings whose data chose a default",
}  # fmt: skip
FURTHER = {
    "abilities": "tests of abilities that the texts hardly show",
    "saturated": "a base close to saturation",
    "continual": "three tasks in a row",
}
RowsOf = Callable[[dict[str, Any]], verdict.Rows]
_NEW = (
    "Of the new ones two learn Shakespeare, whose text was a retained test when learning rates "
    "were chosen, and ResNet-50 learns the task by which the default of image models was chosen."
)
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
             "reached", "right answers: before / plain / `holdfast`, %",
             "points that dominate it"]  # fmt: skip
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
    "its data chose a default. "
    "*Learned*: the gain on the target, in percent of the gain of plain fine-tuning at its best "
    "learning rate; of language models it is the fall of the loss per token. *Plain keeps*: at "
    "this learning rate. *Kept*: the mean over the retained tests of what is left of the "
    "pretrained model's figure; a test counts as 100 % at most. Of an accuracy, the part above "
    "chance counts; of a loss, the ratio of before and after. In parentheses: 95 % intervals of a "
    "paired bootstrap over seeds and samples. *99/99*: both are at least 99 %, *strictly* if every "
    "test is. Accuracies that the pretrained model has within two standard errors of chance are "
    "left out. *Right answers*, in writing, of one seed each: of the pretrained model / plain / "
    "`holdfast`; they count in the form of the training data, which the pretrained model has not "
    "seen. A point of another method *dominates* if it is at least as good in both figures "
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
    return f" In the names of opponents × 1 is a learning rate of {listed(each)}." if each else ""


def _told(found: dict[str, Any]) -> list[str]:
    """The verdict in sentences."""
    settings, missing = found["settings"], found["missing"]
    said = _reached(settings) if settings else []
    if other := other_rates(settings):
        said.append(other.strip())
    lacking = {n: f"{name_of(n)} ({', '.join(missing[n])})" for n in SETTINGS if n in missing}
    if unfinished := [told for name, told in lacking.items() if name not in settings]:
        said.append(
            f"Settings that are not finished, and not counted, with their missing runs: "
            f"{'; '.join(unfinished)}."
        )
    if others := [name for name in lacking if name in settings]:
        runs = sum(len(missing[name]) for name in settings if name in missing)
        said.append(
            f"{runs} runs of opponents and of other learning rates are missing in {len(others)} "
            "settings; [All figures](#all-figures) names them."
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
    new = f" {_NEW}" if sum(counts["new"][GOALS[0]].values()) else ""
    said.append(f"99/99 is reached in {listed(parts)}.{new}")
    others = {
        name
        for name, setting in settings.items()
        if any(min(row["target"], row["mean_kept"]) >= GOALS[0] for row in opponents(setting))
    }
    also = sum(settings[name]["reached"]["99"] != "no" for name in others)
    said.append(
        f"Some point of another method without old data reaches 99/99 in {len(others)} settings, "
        f"in {also} of which `holdfast` reaches it too."
    )
    said.append(
        "Such a method dominates `holdfast` (at least as good in both figures, better in one) "
        f"{_dominance(settings, opponents)}{_dominated(settings)}"
    )
    if with_old := {name: one for name, one in settings.items() if rehearsals(one)}:
        said.append("Rehearsal of real old data does so " + _dominance(with_old, rehearsals))
    frugal, careful = (
        [row for one in settings.values() for row in [row_of(one)]
         if row["mean_kept"] >= ours_of(one)["mean_kept"]]
        for row_of in (frugal_plain_of, careful_plain_of)
    )  # fmt: skip
    said.append(
        "At its lowest learning rate that learns 99 % on the data to choose on, plain fine-tuning "
        f"keeps at least as much as `holdfast` in {len(frugal)} of {len(settings)} settings. This "
        "needs no old data, but a run per learning rate. At the one that keeps the most of those "
        f"that learn 99 %, or as much as `holdfast`, it does so in {len(careful)} settings, in "
        f"{sum(row['seeds'] == 1 for row in careful)} of them with one seed."
    )
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


def _dominated(settings: dict[str, Any]) -> str:
    """How many points of the same methods ``holdfast`` dominates."""
    points = _points(settings, opponents)
    worse = [row["is_dominated"] for row in points if row["is_dominated"] != "no"]
    return (
        f" `holdfast` dominates {len(worse)} of these points, {worse.count('clearly')} clearly. "
        "Most of them have one seed."
    )


def _points(settings: dict[str, Any], rows_of: RowsOf) -> verdict.Rows:
    return [row for setting in settings.values() for row in rows_of(setting)]


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
