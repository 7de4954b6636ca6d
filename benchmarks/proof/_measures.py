"""The measures of PROTOCOL.md, which all kinds of records share.

The functions take numbers, or arrays of resampled ones. A record is described in ``_stages.py``;
one of a language model has ``choose_nll`` and ``report_nll`` instead of ``target_choose`` and
``target_report``, and its figures end in ``_nll`` if they are losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

Record = Mapping[str, Any]
OURS, PLAIN, TUNED = "holdfast", "plain", "tuned"
REHEARSAL = "rehearsal"  # the row that trains on real old data
RATES_OF_OURS = "rate"  # the row of ``holdfast`` at multiples of its default learning rate
TIMES = (0.5, 2, 4)  # multiples of the default learning rate of ``holdfast``
GOALS = (99, 98)  # percent of both measures
#: The accuracy of guessing, of language models.
CHANCE = {
    "lambada": 0.0, "piqa": 0.5, "arc_easy": 0.25, "arc_challenge": 0.25, "boolq": 0.5,
    "winogrande": 0.5, "mmlu": 0.25,
}  # fmt: skip
#: Nats per token in place of a loss that is not a number, as training diverged.
DIVERGED = 100.0
#: Fields of a point that are not retained tests.
OTHERS = {
    "choose_nll", "report_nll", "target_choose", "target_report", "written", "written_ended",
    "samples", "sizes",
}  # fmt: skip


def learned_share(gain: Any, best: Any) -> Any:
    """Percent of the best gain. If plain fine-tuning gains nothing, all shares are 0.

    >>> float(learned_share(0.9, 1.2)), float(learned_share(0.9, -0.1))
    (75.0, 0.0)
    """
    useful = np.asarray(best) > 0
    return np.where(useful, 100 * gain / np.where(useful, best, 1), 0.0)


def kept_share(before: Any, after: Any, chance: float | None) -> Any:
    """Percent kept of an accuracy above chance, or of a loss, whose chance is None.

    It is not a number if the model knew nothing before, as it may be in a resample.

    >>> kept_share(3.0, 4.0, None), round(float(kept_share(0.7, 0.6, 0.5)), 6)
    (75.0, 50.0)
    """
    if chance is None:
        return 100 * before / after
    known = np.where(np.asarray(before) > chance, before - chance, math.nan)
    return 100 * (after - chance) / known


def mean_kept(kept: Mapping[str, Any]) -> Any:
    """The mean over tests, each counted as 100 % at most; 0 if no share is a number.

    >>> float(mean_kept({"a": 110.0, "b": 90.0, "c": math.nan}))
    95.0
    """
    shares = np.minimum([*kept.values()], 100.0)
    known = ~np.isnan(shares)
    return np.where(known, shares, 0.0).sum(0) / np.maximum(known.sum(0), 1)


def retained(name: str) -> bool:
    """Whether a field of a point is the figure of a retained test.

    >>> [name for name in ("piqa", "piqa_se", "report_nll", "learned_mbpp_nll") if retained(name)]
    ['piqa']
    """
    return name not in OTHERS and not name.startswith("learned_") and not name.endswith("_se")


def above_chance(figures: Mapping[str, float], chance: Mapping[str, float] = CHANCE) -> list[str]:
    """The tests that the base passes: losses, and accuracies two standard errors above chance.

    >>> above_chance({"piqa": 0.6, "piqa_se": 0.02, "mmlu": 0.27, "mmlu_se": 0.02})
    ['piqa']
    """
    return [
        name
        for name in figures
        if name not in chance or figures[name] - chance[name] > 2 * figures[f"{name}_se"]
        if not name.endswith("_se")
    ]


def finite(point: Record) -> Record:
    """A point whose figures are numbers: a large loss, or no correlation at all.

    >>> finite({"mbpp_nll": math.nan, "mbpp_nll_se": math.nan, "stsb": math.nan, "piqa": 0.5})
    {'mbpp_nll': 100.0, 'mbpp_nll_se': 0.0, 'stsb': 0.0, 'piqa': 0.5}
    """

    def made(name: str, value: Any) -> Any:
        if not isinstance(value, float) or math.isfinite(value):
            return value
        return DIVERGED if name.endswith("_nll") else 0.0

    return {name: made(name, value) for name, value in point.items()}


def is_plain(row: str) -> bool:
    """Whether a row is plain fine-tuning, with or without BatchNorm's statistics held.

    >>> is_plain("plain-held"), is_plain("plain+wise-ft")
    (True, False)
    """
    return row.split("-")[0] == PLAIN and "+" not in row


def rate_of(plan: str, row: str) -> float:
    """The learning rate in the name of a plan, or the multiple of one.

    >>> rate_of("plain-x0.5", "plain"), rate_of("plain-held-2e-05", "plain-held")
    (0.5, 2e-05)
    """
    return float(plan.removeprefix(f"{row}-").lstrip("x"))


class Point(NamedTuple):
    """A plan and a way to merge its model, with medians over its seeds, in percent.

    Attributes:
        row: the row of the protocol that it belongs to.
        perplexity: of each loss, the perplexity before divided by that after.
    """

    plan: str
    merged: str
    row: str
    seeds: int
    target: float
    mean_kept: float
    kept: dict[str, float]
    perplexity: dict[str, float]

    @property
    def worst(self) -> str:
        """The test that kept least."""
        return min(self.kept, key=self.kept.__getitem__)


class Setting:
    """A model and a target: the measures of all its runs."""

    def __init__(self, runs: Iterable[Record]) -> None:
        self.runs: dict[tuple[str, int], Record] = {}
        for run in runs:
            if run["plan"] == "pretrained":
                self.pretrained = run
            else:
                points = {merged: finite(point) for merged, point in run["points"].items()}
                self.runs[run["plan"], run.get("seed", 0)] = {**run, "points": points}
        self.base: Record = self.pretrained["points"]["base"]
        self.chance: Mapping[str, float] = self.pretrained.get("chance", CHANCE)
        is_loss = "choose_nll" in self.base
        self.choose = "choose_nll" if is_loss else "target_choose"
        self.report = "report_nll" if is_loss else "target_report"
        self.plans = list(dict.fromkeys(plan for plan, _ in self.runs))

    def seeds(self, plan: str, merged: str = TUNED) -> list[int]:
        """The seeds of a plan that have a point."""
        return sorted(
            seed
            for (name, seed), run in self.runs.items()
            if name == plan and merged in run["points"]
        )

    def figures(self, plan: str, merged: str, seed: int) -> Record:
        found: Record = self.runs[plan, seed]["points"][merged]
        return found

    def row(self, plan: str, merged: str = TUNED) -> str:
        """The row of the protocol that a point belongs to."""
        run = self.runs[plan, self.seeds(plan)[0]]
        family: str = run.get("family") or plan.partition("-x")[0]
        return family if merged == TUNED else f"{family}+{merged.rpartition('-')[0]}"

    def tests(self, plan: str, merged: str = TUNED) -> list[str]:
        """The retained tests of a point. Those that the base does not pass were not run."""
        point = self.figures(plan, merged, self.seeds(plan, merged)[0])
        return [name for name in self.base if retained(name) and name in point]

    def lr(self, plan: str) -> float | None:
        """The learning rate of a plan, if its runs recorded it."""
        found: float | None = self.runs[plan, self.seeds(plan)[0]].get("lr")
        return found

    def gain(self, of: str, value: Any, base: Any = None) -> Any:
        """How much better the target is than the base, or for an accuracy than chance."""
        if of in self.chance:
            return value - self.chance[of]
        return (self.base[of] if base is None else base) - value

    @property
    def best_plain(self) -> str:
        """The plan of plain fine-tuning with the best target on the rows to choose on.

        It is one of those with the most seeds, as the best of the first seed gets further ones.
        Of equally good ones it is the first, which has the lowest learning rate.
        """
        most = max(len(self.seeds(plan)) for plan in self._plain)
        return self.best(plan for plan in self._plain if len(self.seeds(plan)) == most)

    @property
    def best_plain_of_any_seeds(self) -> str:
        """The same by the rule as it was first written, however many seeds a plan has."""
        return self.best(self._plain)

    @property
    def frugal_plain(self) -> str:
        """The plan of plain fine-tuning with the lowest learning rate that learns enough.

        Enough is 99 % on the rows to choose on, so that no old data is needed to find it.
        """
        most = self.gain(self.choose, self.median(self.best_plain, self.choose))
        gains = {p: self.gain(self.choose, self.median(p, self.choose)) for p in self._plain}
        enough = [p for p in gains if learned_share(gains[p], most) >= GOALS[0]]
        return min(
            enough, key=lambda p: (rate_of(p, self.row(p)), -gains[p]), default=self.best_plain
        )

    @property
    def _plain(self) -> list[str]:
        return [plan for plan in self.plans if is_plain(self.row(plan))]

    def best(self, plans: Iterable[str]) -> str:
        """The plan with the best target on the rows to choose on."""
        return max(plans, key=lambda p: self.gain(self.choose, self.median(p, self.choose)))

    def target(
        self, plan: str, merged: str, seed: int, of: str | None = None, best: str | None = None
    ) -> float:  # fmt: skip
        """Percent of what the best of plain learned, on the rows to report or to choose on."""
        of = of or self.report
        most = self.gain(of, self.median(best or self.best_plain, of))
        gain = self.gain(of, self.figures(plan, merged, seed)[of])
        return round(float(learned_share(gain, most)), 6)

    def kept(self, plan: str, merged: str, seed: int) -> dict[str, float]:
        """Percent kept, per retained test."""
        after = self.figures(plan, merged, seed)
        return {
            test: round(float(kept_share(self.base[test], after[test], self.chance.get(test))), 6)
            for test in self.tests(plan, merged)
        }

    def point(self, plan: str, merged: str = TUNED, best: str | None = None) -> Point:
        """The measures of a point; ``best`` is another plan than the best of plain."""
        seeds = self.seeds(plan, merged)
        kept = [self.kept(plan, merged, seed) for seed in seeds]
        losses = [test for test in kept[0] if test not in self.chance]

        def ratio(test: str, seed: int) -> float:
            return 100 * math.exp(self.base[test] - self.figures(plan, merged, seed)[test])

        def median(values: Iterable[float]) -> float:
            return float(np.median(list(values)))

        return Point(
            plan, merged, self.row(plan, merged), len(seeds),
            median(self.target(plan, merged, seed, best=best) for seed in seeds),
            median(map(mean_kept, kept)),
            {test: median(one[test] for one in kept) for test in kept[0]},
            {test: median(ratio(test, seed) for seed in seeds) for test in losses},
        )  # fmt: skip

    def points(self) -> Iterator[Point]:
        """Every point of every plan, also of merges that only some seeds have."""
        for plan in self.plans:
            runs = [run for (name, _), run in sorted(self.runs.items()) if name == plan]
            for merged in dict.fromkeys(name for run in runs for name in run["points"]):
                yield self.point(plan, merged)

    def median(self, plan: str, of: str) -> float:
        """The median of a figure over the seeds of a plan."""
        return float(np.median([self.figures(plan, TUNED, s)[of] for s in self.seeds(plan)]))


def reached(point: Point, share: float) -> str:
    """Whether a point reaches a share of both: no, yes in the mean, or strictly in every test."""
    if point.target < share or point.mean_kept < share:
        return "no"
    return "strictly" if min(point.kept.values()) >= share else "yes"


def dominates(one: Point, other: Point) -> bool:
    """Whether one point is at least as good in both, and better in one."""
    ahead = one.target - other.target, one.mean_kept - other.mean_kept
    return min(ahead) >= 0 and max(ahead) > 0


def at_target(points: Iterable[Point], target: float) -> float:
    """The mean kept at a target; NaN if no point reaches it.

    It lies between the two points next to the target, of those that no other point dominates: a
    user would choose another point than a dominated one.
    """
    points = list(points)
    front = [one for one in points if not any(dominates(other, one) for other in points)]
    above = [point for point in front if point.target >= target]
    below = [point for point in front if point.target < target]
    if not above:
        return math.nan
    right = min(above, key=lambda point: point.target)
    if not below:
        return right.mean_kept
    left = max(below, key=lambda point: point.target)
    share = (target - left.target) / (right.target - left.target)
    return left.mean_kept + share * (right.mean_kept - left.mean_kept)
