"""The two stages of PROTOCOL.md: every plan with seed 0, then further seeds of some plans.

A record of a run has its ``plan``, the ``family`` of the plan (a row of the protocol), its ``seed``
and ``points``: ``tuned``, and ``wise-ft-α`` if it was merged. A point has ``target_choose``,
``target_report`` and a figure per retained test. The record of the plan ``pretrained`` has the
point ``base``, and the ``chance`` of every figure.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))

import _jobs
from _jobs import Job, Record
from _measures import OURS, RATES_OF_OURS, Setting, is_plain, mean_kept

from holdfast import Recipe

HOLDFAST = Recipe.preset("holdfast")
THREE, FIVE = (1, 2), (1, 2, 3, 4)  # the seeds beside 0


class Stages(NamedTuple):
    """The runs of a setting.

    Attributes:
        name: the beginning of the names of its runs.
        once: runs without a seed, ``pretrained`` among them.
        plans: the functions that make a run of a plan with a seed.
        final: the seeds beside 0 of ``holdfast`` and the best of plain.
    """

    name: str
    once: Mapping[str, Job]
    plans: Mapping[str, Callable[[int], Record]]
    final: tuple[int, ...] = FIVE

    def first(self) -> dict[str, Job]:
        """The runs of the first stage."""
        once = {f"{self.name}-{plan}": job for plan, job in self.once.items()}
        return once | {self._run(plan, 0): self._job(plan, 0) for plan in self.plans}

    def more(self, done: Mapping[str, Record]) -> dict[str, Job]:
        """The runs of the second stage, and further ones that have been made.

        The rule looks at those of the first that are there.
        """
        names = [f"{self.name}-pretrained", *(self._run(plan, 0) for plan in self.plans)]
        runs = [done[name] for name in names if name in done]
        seeds = further_seeds(choices(Setting(runs)), self.final) if can_choose(runs) else {}
        wanted = [
            (plan, seed)
            for seed in FIVE
            for plan in self.plans
            if seed in seeds.get(plan, ()) or self._run(plan, seed) in done
        ]
        return {self._run(plan, seed): self._job(plan, seed) for plan, seed in wanted}

    def missing(self, folder: Path, done: Mapping[str, Record]) -> list[str]:
        """The runs that the second stage waits for: untried ones, and those that it needs."""
        needed = {f"{self.name}-pretrained", self._run(OURS, 0)}
        failed = {*_jobs.failed(folder, self.first())} - needed
        return [name for name in self.first() if name not in done and name not in failed]

    def _run(self, plan: str, seed: int) -> str:
        return f"{self.name}-{plan}-s{seed}"

    def _job(self, plan: str, seed: int) -> Job:
        return functools.partial(self.plans[plan], seed)


class Choice(NamedTuple):
    """A point of a run with seed 0: its row of the protocol, its plan, and both measures."""

    row: str
    plan: str
    target: float
    kept: float


def can_choose(runs: Iterable[Record]) -> bool:
    """Whether the rule has what it compares: the base, ours and a run of plain fine-tuning.

    >>> can_choose([{"plan": plan} for plan in ("pretrained", "holdfast", "plain-x1")])
    True
    >>> can_choose([{"plan": "pretrained"}, {"plan": "plain-x1"}])
    False
    """
    plans = {run["plan"] for run in runs}
    return {"pretrained", OURS} <= plans and any(map(is_plain, plans))


def choices(setting: Setting) -> list[Choice]:
    """The points with seed 0 but those of ours at other learning rates, in percent.

    The target is that of the rows to choose on.
    """
    return [
        Choice(
            setting.row(plan, merged), plan, setting.target(plan, merged, 0, setting.choose),
            float(mean_kept(setting.kept(plan, merged, 0))),
        )
        for (plan, seed), run in setting.runs.items()
        if seed == 0 and setting.row(plan) != RATES_OF_OURS
        for merged in run["points"]
    ]  # fmt: skip


def further_seeds(
    found: Sequence[Choice], final: tuple[int, ...] = FIVE
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """The seeds of each plan beside 0, by the rule of the protocol; of equal plans the first wins.

    >>> rows = [
    ...     Choice("plain", "plain-a", 80, 90), Choice("plain", "plain-b", 100, 50),
    ...     Choice("plain+wise-ft", "plain-a", 99, 99.5), Choice("lora", "lora-a", 70, 99),
    ...     Choice("lora", "lora-b", 60, 90), Choice("holdfast", "holdfast", 99, 99),
    ... ]
    >>> further_seeds(rows)
    {'plain-a': (1, 2), 'plain-b': (1, 2, 3, 4), 'lora-a': (), 'lora-b': (), \
'holdfast': (1, 2, 3, 4)}
    """
    seeds: dict[str, tuple[int, ...]] = dict.fromkeys((choice.plan for choice in found), ())
    ours = next(choice for choice in found if choice.row == OURS)
    ahead = [c for c in found if c.target >= ours.target and c.kept >= ours.kept]
    for row in dict.fromkeys(choice.row for choice in ahead):
        some = [choice for choice in ahead if choice.row == row]
        seeds[max(some, key=lambda choice: choice.target + choice.kept).plan] = THREE
    plain = max((choice for choice in found if is_plain(choice.row)), key=lambda c: c.target)
    return seeds | dict.fromkeys((plain.plan, OURS), final)


def add_stage(parser: _jobs.Parser) -> None:
    parser.add_argument(
        "--stage", choices=("first", "more", "both"), default="first",
        help="every plan with seed 0, or the further seeds that these runs choose",
    )  # fmt: skip


def run(settings: Sequence[Stages], args: Any, protocol: Record) -> None:
    """Run a stage of the settings, or one after the other, or collect both.

    The second stage is run if no run of the first is missing. It is always collected.
    """
    settings = [setting for setting in settings if _jobs.selected(setting.first(), args.only)]
    if args.stage == "both" and args.collect is None:
        first = {name: job for setting in settings for name, job in setting.first().items()}
        _jobs.work_first(first, args)
    done = _jobs.records(args.runs)
    jobs: dict[str, Job] = {}
    for setting in settings:
        if args.stage == "first" or args.collect is not None:
            jobs |= setting.first()
        if args.stage == "first" and args.collect is None:
            continue
        if missing := setting.missing(args.runs, done):
            print(f"{setting.name}: {len(missing)} runs of its first stage are missing", flush=True)
        if args.collect is not None or not missing:
            jobs |= setting.more(done)
    _jobs.work_or_collect(jobs, args, protocol)
