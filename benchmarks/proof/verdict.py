"""The measures of PROTOCOL.md, from the records of the runs alone.

python benchmarks/proof/verdict.py benchmarks/proof/results/*.json
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from _exam import CHANCE

Record = Mapping[str, Any]
#: Figures of the target, which are not retained tests.
OWN = ("choose_nll", "report_nll", "written")


class Point(NamedTuple):
    """A plan and a way to merge its model, with medians over its seeds, in percent."""

    plan: str
    merged: str
    seeds: int
    target: float
    mean_kept: float
    kept: dict[str, float]


class Setting:
    """A model and a target: all runs of them."""

    def __init__(self, runs: Iterable[Record]) -> None:
        self.runs: dict[tuple[str, int], Record] = {}
        for run in runs:
            if run["plan"] == "pretrained":
                self.base: Record = run["points"]["base"]
            else:
                self.runs[run["plan"], run["seed"]] = run
        self.plans = list(dict.fromkeys(plan for plan, _ in self.runs))

    def seeds(self, plan: str) -> list[int]:
        return sorted(seed for name, seed in self.runs if name == plan)

    def points(self) -> Iterator[Point]:
        """Every point of every plan."""
        for plan in self.plans:
            seeds = self.seeds(plan)
            for merged in self.runs[plan, seeds[0]]["points"]:
                yield self.point(plan, merged)

    def point(self, plan: str, merged: str = "tuned") -> Point:
        seeds = [s for s in self.seeds(plan) if merged in self.runs[plan, s]["points"]]
        kept = [self.kept(plan, merged, seed) for seed in seeds]
        return Point(
            plan, merged, len(seeds),
            statistics.median(self.target(plan, merged, seed) for seed in seeds),
            statistics.median(map(mean_kept, kept)),
            {test: statistics.median(one[test] for one in kept) for test in kept[0]},
        )  # fmt: skip

    @property
    def best_plain(self) -> str:
        """The plan of plain fine-tuning with the best target on the rows to choose on."""

        def chosen(plan: str) -> float:
            return self._median(plan, "choose_nll")

        return min((plan for plan in self.plans if plan.startswith("plain")), key=chosen)

    def target(self, plan: str, merged: str, seed: int, of: str = "report_nll") -> float:
        base, best = self.base[of], self._median(self.best_plain, of)
        ours = self.runs[plan, seed]["points"][merged][of]
        return 100 * float(base - ours) / float(base - best)

    def kept(self, plan: str, merged: str, seed: int) -> dict[str, float]:
        """Percent kept, per retained test."""
        after = self.runs[plan, seed]["points"][merged]
        return {
            test: _kept(test, self.base[test], value)
            for test, value in after.items()
            if test not in OWN and test != "samples" and not test.endswith("_se")
        }

    def _median(self, plan: str, field: str) -> float:
        found = (self.runs[plan, seed]["points"]["tuned"][field] for seed in self.seeds(plan))
        return statistics.median(map(float, found))


def _kept(test: str, before: float, after: float) -> float:
    """Percent kept of a loss, or of an accuracy above chance.

    >>> _kept("wikitext_nll", 3.0, 4.0), _kept("piqa", 0.7, 0.6)
    (75.0, 50.0)
    """
    if test.endswith("_nll"):
        return round(100 * before / after, 6)
    return round(100 * (after - CHANCE[test]) / (before - CHANCE[test]), 6)


def mean_kept(kept: Mapping[str, float]) -> float:
    """Their mean, with each counted as 100 % at most.

    >>> mean_kept({"a": 110.0, "b": 90.0})
    95.0
    """
    return statistics.mean(min(100.0, value) for value in kept.values())


def reached(point: Point, share: float) -> str:
    """Whether a point reaches a share of both.

    >>> reached(Point("holdfast", "tuned", 1, 99.5, 99.2, {"a": 100.0, "b": 98.4}), 99)
    'yes'
    """
    if point.target < share or point.mean_kept < share:
        return "no"
    return "strictly" if min(point.kept.values()) >= share else "yes"


def dominates(one: Point, other: Point) -> bool:
    """Whether one point is at least as good in both, and better in one."""
    ahead = one.target - other.target, one.mean_kept - other.mean_kept
    return min(ahead) >= 0 and max(ahead) > 0


def at_target(points: Iterable[Point], target: float) -> float:
    """The mean kept at a target, between the two points next to it; NaN if none reaches it.

    >>> near = [Point("a", "", 1, 90, 100, {}), Point("a", "", 1, 110, 80, {})]
    >>> at_target(near, 100)
    90.0
    """
    ordered = sorted(points, key=lambda point: point.target)
    above = [point for point in ordered if point.target >= target]
    below = [point for point in ordered if point.target < target]
    if not above:
        return math.nan
    if not below:
        return above[0].mean_kept
    left, right = below[-1], above[0]
    share = (target - left.target) / (right.target - left.target)
    return left.mean_kept + share * (right.mean_kept - left.mean_kept)


def main() -> None:
    for name in sys.argv[1:]:
        setting = Setting(json.loads(Path(name).read_text(encoding="utf-8"))["runs"])
        ours = setting.point("holdfast")
        print(f"\n{Path(name).stem}: best of plain is {setting.best_plain}; "
              f"99/99: {reached(ours, 99)}, 98/98: {reached(ours, 98)}")  # fmt: skip
        for point in sorted(setting.points(), key=lambda p: -p.target):
            better = " dominates holdfast" if dominates(point, ours) else ""
            tests = ", ".join(f"{test} {value:.1f}" for test, value in point.kept.items())
            print(f"{point.plan:16} {point.merged:12} {point.seeds} target {point.target:6.1f} "
                  f"kept {point.mean_kept:6.1f}{better}  ({tests})")  # fmt: skip


if __name__ == "__main__":
    main()
