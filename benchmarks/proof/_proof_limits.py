"""What self-replay does not protect, on docs/results.md: tests of abilities, and a saturated base.

A test counts as protected if at least 98 % of it is kept, the lower goal of the protocol.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verdict
from _markdown import table
from _measures import GOALS
from _proof_details import details, figure, source_of
from _proof_text import (
    NAMES,
    TITLES,
    beyond,
    dominance,
    edge_of_rates,
    folded,
    least,
    name_of,
    percent,
    plan_title,
    without,
)
from verdict import opponents, ours_of, plain_of

LEAST = min(GOALS)
Tested = dict[str, Any]
Missing = dict[str, list[str]]


def proof_limits() -> str:
    """The tests of abilities, and the base close to saturation."""
    found = verdict.read()
    missing, parts = found["missing"], []
    if found["abilities"]:
        parts.append(
            "## What it does not protect\n\nSelf-replay trains on texts that the pretrained model "
            "writes by itself. These tests ask for abilities that such texts hardly show: tasks "
            "that are learned in context, contexts of 1,024 tokens (the texts have 128), formats "
            "that are asked for, and refusals."
        )
        parts += [_abilities(name, one, missing) for name, one in found["abilities"].items()]
    if found["saturated"]:
        parts.append("## A base close to saturation")
        parts += [_saturated(name, one, missing) for name, one in found["saturated"].items()]
    return "\n\n".join(parts)


def _abilities(name: str, tested: Tested, missing: Missing) -> str:
    """What is kept of the tests after one target."""
    model, target = NAMES[name]
    answered = [test for test in ours_of(tested)["kept"] if test in tested["chance"]]
    sentences = [
        *_protected(tested, answered), _means(tested), *_left_out(tested), _by_position(tested),
    ]  # fmt: skip
    told = "\n".join(f"- {sentence}" for sentence in sentences)
    parts = []
    if answered:
        learned = [percent(row["target"]) for row in tested["points"]]
        rows = [[f"{target}, learned", "—", "—", *learned], *_kept(tested, answered)]
        heads = _heads(tested, "pretrained, %", "chance, %")
        parts += [table(heads, rows), _LEGEND]
    parts += [_rest(tested), source_of(name, tested, missing)]
    rest = folded(f"{name_of(name)}: all tests, and shares by part", "\n\n".join(parts))
    return f"{model} learns {target}, with one seed:\n\n{told}\n\n{rest}"


_LEGEND = (
    "*Learned*: percent of the gain of the best of plain fine-tuning here. All other rows: percent "
    "kept of what the pretrained model has above chance, with the 95 % interval of a paired "
    "bootstrap. For formats, chance is the share of the pretrained model if no format is asked for."
)


def _protected(tested: Tested, tests: list[str]) -> list[str]:
    """Which tests keep less than the goal, and what plain fine-tuning keeps of them."""
    if not tests:
        return []
    ours, plain = ours_of(tested), plain_of(tested)
    less = [test for test in tests if ours["kept"][test] < LEAST]
    other = plan_title(plain["plan"])
    enough = [
        f"{plan_title(row['plan'])} {sum(row['kept'][test] >= LEAST for test in tests)}"
        for row in tested["points"]
    ]
    said = [f"Tests that are kept to {LEAST} % or more, of {len(tests)}: {', '.join(enough)}."]
    if less:
        each = "; ".join(
            f"{TITLES['tests'][t]} {percent(ours['kept'][t])} % ({other}: "
            f"{percent(plain['kept'][t])} %)"
            for t in less
        )
        surely = sum(ours["kept_intervals"][t][1] < LEAST for t in less)
        said.append(
            f"`holdfast` keeps less than {LEAST} % of: {each}. The 95 % interval excludes "
            f"{LEAST} % in {surely} of {len(less)} cases."
        )
    return said


def _means(tested: Tested) -> str:
    """What every plan has learned, and kept in the mean."""
    each = (
        f"{plan_title(row['plan'])} {percent(row['target'])} / {percent(row['mean_kept'])}"
        for row in tested["points"]
    )
    return f"Learned / kept in the mean of these tests and losses, in percent: {', '.join(each)}."


def _left_out(tested: Tested) -> list[str]:
    """The tests that the base does not pass."""
    base, chance = tested["base"], tested["chance"]
    each = [
        f"{TITLES['tests'][t]} {figure(t, base[t])} % (chance {figure(t, chance[t])} %)"
        for t in tested["left_out"]
    ]
    if not each:
        return []
    return [
        "The pretrained model is less than two standard errors above chance in these tests, which "
        f"are left out: {'; '.join(each)}."
    ]


def _by_position(tested: Tested) -> str:
    """What is kept of WikiText-2 at the beginning and at the end of a window."""
    ours, plain = ours_of(tested), plain_of(tested)
    positions = [test for test in ours["kept"] if test.startswith("wikitext_")]
    each = (
        f"{TITLES['tests'][t]}: `holdfast` {percent(ours['kept'][t])} %, "
        f"{plan_title(plain['plan'])} {percent(plain['kept'][t])} %"
        for t in (positions[0], positions[-1])
    )
    return f"Kept of the loss at short and at long contexts. {'; '.join(each)}."


def _heads(tested: Tested, *first: str) -> list[str]:
    return ["", *first, *(plan_title(row["plan"]) for row in tested["points"])]


def _kept(tested: Tested, tests: list[str]) -> list[list[str]]:
    """A row per test: the figure of the base, chance if it has one, and the percent kept."""
    rows = []
    for test in tests:
        cells = [figure(test, tested["base"][test])]
        cells += [figure(test, tested["chance"][test])] if test in tested["chance"] else []
        cells += [percent(row["kept"][test], row["kept_intervals"][test])
                  for row in tested["points"]]  # fmt: skip
        rows.append([TITLES["tests"][test], *cells])
    return rows


def _rest(tested: Tested) -> str:
    """What is kept of losses, and the shares of right answers by part."""
    losses = [test for test in ours_of(tested)["kept"] if test not in tested["chance"]]
    heads = _heads(tested, "pretrained, nats per token")
    parts = ["Percent kept of losses:", table(heads, _kept(tested, losses))]
    plans = "pretrained", *(row["plan"] for row in tested["points"])
    columns = [tested["shares"][plan] for plan in plans]
    for test in columns[-1]:
        body = [
            [TITLES["parts"][part], *(figure(test, shares[test][part]) for shares in columns)]
            for part in columns[0][test]
        ]
        parts.append(f"Right answers in percent, {TITLES['tests'][test]}:")
        parts.append(table(_heads(tested, "pretrained"), body))
    return "\n\n".join(parts)


def _saturated(name: str, setting: Tested, missing: Missing) -> str:
    """A base that has little to learn of the target."""
    model, target = NAMES[name]
    base, plain, ours = setting["base"], plain_of(setting), ours_of(setting)
    before, after, own = (
        f"{figure('report_nll', found['report_nll'])} ({figure('written', found.get('written'))} %)"
        for found in (base, plain["figures"], ours["figures"])
    )
    nothing = plain["figures"]["report_nll"] >= base["report_nll"]
    target_share = (
        "The best of plain fine-tuning gains nothing, so the protocol counts every target as 0 %."
        if nothing
        else f"`holdfast` learns {percent(ours['target'])} % of the gain of the best of plain."
    )
    if edge := edge_of_rates(setting):
        rates = (
            f" It is {setting['plain_lr']:.2g}; `holdfast` ran at {setting['lr']:.2g}."
            if setting["lr"] and setting["plain_lr"]
            else ""
        )
        target_share += f" {beyond(edge)}{rates}"
    sentences = [
        f"{model} learns {target}, with one seed. This setting is not one of the "
        f"{len(TITLES['settings'])} of the claim, and is not counted.{without(missing, name)}",
        "Loss of the target in nats per token, and in parentheses the share of right generated "
        f"answers: {before} before, {after} after {plan_title(plain['plan'])}, which is the best "
        f"of plain, and {own} after `holdfast`.",
        target_share,
        f"`holdfast` keeps {percent(ours['mean_kept'])} % in the mean ({least(ours)} % least), the "
        f"best of plain {percent(plain['mean_kept'])} %.",
        f"Points of plain fine-tuning that dominate `holdfast`: {dominance(opponents(setting))}.",
    ]
    return "\n".join(f"- {one}" for one in sentences) + "\n\n" + details(name, setting, missing)
