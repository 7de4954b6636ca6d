"""One figure of all recipes, as an axis shows it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.comparison.results import Measured, RunResult, Summary
from holdfast.evaluate.report import Estimate
from holdfast.report.words import kind_of, plain

__all__ = ["Axis", "Range", "axis_of", "drawable", "inside", "key_of", "reaches", "test_of"]


Range = tuple[float, float]
#: What is worse than the worst quarter by so many times the middle half's width is out of view.
_FAR = 10


@dataclass(frozen=True)
class Axis:
    """One figure of all recipes.

    Attributes:
        title: what it is.
        seeds: its value in each run of each recipe.
        start: of the pretrained model.
        lower_is_better: whether the axis is turned.
        suffix: of its numbers.
    """

    title: str
    seeds: Sequence[Sequence[float]]
    start: float
    lower_is_better: bool
    suffix: str = ""

    def medians(self) -> list[Estimate]:
        """With the range of the seeds."""
        rows = (row or [math.nan] for row in self.seeds)
        return [Estimate(statistics.median(r), min(r), max(r), len(r)) for r in rows]

    def view(self, *more: float) -> Range:
        """From the worse to the better end; what is far worse than all others is out of view."""
        sign = -1 if self.lower_is_better else 1
        values = sorted(sign * x for row in self.seeds for x in row if drawable(x))
        if len(values) > 3:
            low, _, high = statistics.quantiles(values, method="inclusive")
            values = [x for x in values if x >= low - _FAR * max(high - low, 1e-3 * abs(low))]
        values += [sign * x for x in more if drawable(x)]
        low, high = min(values, default=0.0), max(values, default=1.0)
        room = 0.09 * (high - low) or 0.1 * abs(high) or 1.0
        return sign * (low - room), sign * (high + room)


def axis_of(found: Sequence[Summary], pick: Callable[[RunResult], Measured | None]) -> Axis:
    """A test of all recipes; a value that is no number is left out."""
    rows = [[test for run in s.runs if (test := pick(run)) is not None] for s in found]
    one = next(test for row in rows for test in row)
    scale = 100 if kind_of(one.metric) == "share" else 1
    return Axis(
        f"{plain(one.name)}, {plain(one.metric)}",
        [[scale * test.after for test in row] for row in rows],
        scale * one.before,
        one.lower_is_better,
        " %" if scale == 100 else "",
    )


def test_of(key: tuple[str, str]) -> Callable[[RunResult], Measured | None]:
    """The figure of a run for a retained test."""
    return lambda run: next((test for test in run.retained if key_of(test) == key), None)


def key_of(test: Measured) -> tuple[str, str]:
    """Name and metric of a test."""
    return test.name, test.metric


def inside(view: Range, value: float) -> bool:
    """Whether a value lies in a range."""
    return min(view) <= value <= max(view)


def reaches(view: Range, value: float) -> bool:
    """Whether a value is near enough to be shown without squeezing the rest."""
    return drawable(value) and abs(value - view[0]) < 0.6 * abs(view[1] - view[0])


def drawable(value: float) -> bool:
    """Whether a plot can have it: finite, and so is what is reckoned with it."""
    return abs(value) < 1e100
