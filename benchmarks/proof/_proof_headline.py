"""The first block of the README and of docs/results.md, and its table of medians."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verdict
from _markdown import table
from _proof_text import TITLES, folded, listed, name_of, percent
from proof_pictures import CORNER
from verdict import SETTINGS, careful_plain_of, frugal_plain_of, ours_of, plain_of

from holdfast.methods.auto import default_lr
from holdfast.stages import TrainingSize

FIGURES = {"target": "learned", "mean_kept": "kept"}
INTERVALS = {"target": "target_interval", "mean_kept": "kept_interval"}
PICTURE = "proof-headline.svg"
Settings = Mapping[str, Any]
RowOf = Callable[[dict[str, Any]], dict[str, Any]]


def proof_headline(folder: str = "") -> str:
    """The first picture, and what it says; ``folder`` is that of the page's pictures."""
    whole = verdict.read()
    settings = whole["settings"]
    if not settings:
        return ""
    reached = [name for name, setting in settings.items() if setting["reached"]["99"] != "no"]
    picture = f"![What plain fine-tuning and holdfast keep in each setting]({folder}img/{PICTURE})"
    learned, kept = (_median(settings, ours_of, field) for field in FIGURES)
    of_plain, of_frugal = (
        _median(settings, row_of, "mean_kept") for row_of in (plain_of, frugal_plain_of)
    )
    return (
        f"{picture}\n\nWith nothing set, `holdfast` learned {learned} % of what plain fine-tuning "
        f"learns at its best learning rate, and kept {kept} % of what the model knew (medians of "
        f"{len(settings)} settings). Plain fine-tuning kept {of_plain} % at this learning rate. At "
        f"the lowest learning rate that still learns 99 %, which takes several runs to find, it "
        f"kept {of_frugal} %{_of_language_models(settings)}. `holdfast` reached at least 99 % of "
        f"both in **{len(reached)} of {len(settings)} settings**; by the 95 % intervals, it is "
        f"certain in {_certain(settings) or 'none'} of them. {_least(settings)}"
        "\n\n*Learned* is the fall of the loss on the new task, or the rise of "
        "the accuracy above chance. *Kept* is the mean over tests that were not trained on: the "
        "ratio of the losses before and after, or what is left of the accuracy above chance. Each "
        "test counts as 100 % at most. At a loss of 3 nats, 99 % kept is 3 % more perplexity. Of "
        "encoders and image models, *kept* is a single test: STS-B or ImageNet.\n\n"
        + folded(
            "Seeds, rules that were changed, and models",
            f"{_about(whole)} {_by_the_first_rules(whole)}{other_rates(settings)} The language "
            "models are instruct models, dequantized from 4 bits; training may repair some of "
            "that, so that less seems to be forgotten.",
        )
    )


def _of_language_models(settings: Settings) -> str:
    """What plain fine-tuning and ``holdfast`` keep of these."""
    some = kinds_of(settings).get("language models", {})
    if not some:
        return ""
    plain, ours = (_median(some, row_of, "mean_kept") for row_of in (frugal_plain_of, ours_of))
    return f" (of language models {plain} %, `holdfast` {ours} %)"


def _about(whole: Mapping[str, Any]) -> str:
    """Which settings these are, and with how many seeds."""
    settings = whole["settings"]
    new = [name for name in settings if SETTINGS[name][2] == "new"]
    of_new = sum(settings[name]["reached"]["99"] != "no" for name in new) or "none"
    all_or_some = "all" if len(settings) == len(SETTINGS) else f"{len(settings)} of the"
    seeds = sorted(ours_of(setting)["seeds"] for setting in settings.values())
    return (
        f"These are {all_or_some} {len(SETTINGS)} settings of the protocol, with {seeds[0]} to "
        f"{seeds[-1]} seeds of `holdfast`. "
        + (
            f"In {len(new)} of them nothing had been trained before the defaults were fixed; "
            f"`holdfast` reached 99 % of both in {of_new} of these."
            if new
            else "All of them were seen before the defaults were fixed."
        )
        + "".join(
            f" {name_of(name)} is not finished and not counted (so far learned "
            f"{percent(ours['target'])} % and kept {percent(ours['mean_kept'])} %)."
            for name, setting in whole["unfinished"].items()
            for ours in [ours_of(setting)]
        )
    )


def _by_the_first_rules(whole: Mapping[str, Any]) -> str:
    """What the two rules give that were changed after the first runs."""
    settings, missing = whole["settings"], whole["missing"]
    found = [setting["of_any_seeds"] for setting in settings.values()]
    learned, kept = (
        percent(statistics.median(one[field] for one in found))
        for field in ("target", "plain_kept")
    )
    complete = [setting for name, setting in settings.items() if name not in missing]
    reached = sum(setting["reached"]["99"] != "no" for setting in complete)
    return (
        "Two rules were changed after the first runs. The learning rate of plain fine-tuning that "
        "counts is the best of those with the most seeds; with any number of seeds, plain "
        f"fine-tuning keeps {kept} % in the median, `holdfast` learns {learned} %, and 99/99 is "
        f"reached in {sum(one['reached'] != 'no' for one in found)} of {len(found)}. Settings in "
        "which only runs of opponents or of other learning rates are missing count; without them "
        f"99/99 is reached in {reached} of {len(complete)}."
    )


def proof_medians() -> str:
    """What is learned and kept in the median setting, by kind, and in the worst."""
    settings = verdict.read()["settings"]
    if not settings:
        return ""
    ways = {
        "`holdfast`, at its defaults": ours_of,
        "plain fine-tuning, at the learning rate that is best for the target": plain_of,
        "plain fine-tuning, at the lowest that learns 99 % (on the data to choose on)":
            frugal_plain_of,
        "plain fine-tuning, at the one that keeps the most of those that learn 99 %, or as much as "
        "`holdfast` (on the data that is reported)": careful_plain_of,
    }  # fmt: skip
    kinds = {f"all {len(settings)} settings": settings} | {
        f"{len(some)} {kind}": some for kind, some in kinds_of(settings).items()
    }
    rows = [
        [
            way,
            *(" / ".join(f"{_median(s, row_of, field)} %" for field in FIGURES)
              for s in kinds.values()),
            " / ".join(f"{percent(min(row_of(s)[field] for s in settings.values()))} %"
                       for field in FIGURES),
            str(sum(_reaches(row_of(s)) for s in settings.values())),
            str(sum(row_of(s)["seeds"] == 1 for s in settings.values())),
        ]
        for way, row_of in ways.items()
    ]  # fmt: skip
    heads = [*kinds, "worst", "settings that reach 99/99", "settings with one seed"]
    return f"Learned / kept, medians over settings:\n\n{table(['', *heads], rows)}"


def kinds_of(settings: Settings) -> dict[str, Settings]:
    """The settings of language models, and the others."""
    kinds: dict[str, dict[str, Any]] = {}
    for name, setting in settings.items():
        kind = "language models" if name in TITLES["sizes"] else "encoders and image models"
        kinds.setdefault(kind, {})[name] = setting
    return {**kinds}


def _reaches(row: Mapping[str, Any]) -> bool:
    return all(row[field] >= CORNER for field in FIGURES)


def _median(settings: Settings, row_of: RowOf, field: str) -> str:
    return percent(statistics.median(row_of(setting)[field] for setting in settings.values()))


def _least(settings: Settings) -> str:
    """Where ``holdfast`` learned and kept the least."""
    ends = []
    for field, title in FIGURES.items():
        name = min(settings, key=lambda name: (ours_of(settings[name])[field], name))
        ours = ours_of(settings[name])
        low, high = (f"{end:.0f}".replace("-", "−") for end in ours[INTERVALS[field]])
        ends.append(
            f"{title} {percent(ours[field])} % ({name_of(name)}; 95 % interval {low} to {high})"
        )
    return f"At worst it {listed(ends)}."


def _certain(settings: Settings) -> int:
    """In how many settings the intervals of both figures are above 99 %."""
    both = ("target_interval", "kept_interval")
    return sum(
        all(ours_of(setting)[field][0] >= CORNER for field in both) for setting in settings.values()
    )


def other_rates(settings: Settings) -> str:
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
