"""The paired bootstrap of PROTOCOL.md: intervals of the measures, and of their differences.

A resample draws the samples of each test and the seeds of each plan with replacement, the same for
all points of a setting. A point without samples, such as a merged model, varies by its standard
errors instead, independently of the others; its seeds vary together. Intervals are then too wide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from _measures import (
    DIVERGED,
    OURS,
    TUNED,
    Record,
    Setting,
    kept_share,
    learned_share,
    mean_kept,
)
from _samples import unpack, unpack_numbers

RESAMPLES = 2000
MOST_SEEDS = 5
Array = np.ndarray[Any, np.dtype[Any]]


class Interval(NamedTuple):
    """The middle 95 % of the resamples."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Array) -> Interval:
        low, high = np.quantile(values, (0.025, 0.975))
        return cls(float(low), float(high))


class Measures(NamedTuple):
    """The measures of a point in every resample."""

    target: Array
    mean_kept: Array


class Bootstrap:
    """The resampled figures of a setting: an array of resamples × seeds per point and test."""

    def __init__(self, setting: Setting, resamples: int = RESAMPLES) -> None:
        self.setting, self.resamples = setting, resamples
        self.random = np.random.default_rng(0)
        self.draws = self.random.random((resamples, MOST_SEEDS))
        self.tests = setting.tests(OURS)
        self.base: dict[str, Any] = {}
        self.figures: dict[tuple[str, str, str], Array] = {}
        for test in (setting.report, *self.tests):
            self._resample(test)

    def measures(self, plan: str, merged: str = TUNED) -> Measures:
        """The target and the mean kept of a point, in percent."""
        setting, of = self.setting, self.setting.report
        base, best = self.base.get(of), self._drawn(setting.best_plain, TUNED, of)
        best_gain = np.median(setting.gain(of, best, base), axis=1, keepdims=True)
        gain = setting.gain(of, self._drawn(plan, merged, of), base)
        both = learned_share(gain, best_gain), mean_kept(self._kept(plan, merged))
        return Measures(*(np.median(values, axis=1) for values in both))

    def kept(self, plan: str, merged: str = TUNED) -> dict[str, Interval]:
        """The intervals of the shares kept, per test, without resamples that leave it out."""
        found = {test: np.median(kept, axis=1) for test, kept in self._kept(plan, merged).items()}
        return {test: Interval.of(kept[~np.isnan(kept)]) for test, kept in found.items()}

    def _kept(self, plan: str, merged: str) -> dict[str, Array]:
        """Percent kept per test, of the seeds that each resample has drawn."""
        chance = self.setting.chance
        return {
            test: kept_share(self.base[test], self._drawn(plan, merged, test), chance.get(test))
            for test in self.tests
        }

    def _drawn(self, plan: str, merged: str, test: str) -> Array:
        """The figures of the seeds that each resample has drawn."""
        values = self.figures[plan, merged, test]
        count = values.shape[1]
        seeds = (self.draws[:, :count] * count).astype(int)
        found: Array = np.take_along_axis(values, seeds, axis=1)
        return found

    def _resample(self, name: str) -> None:
        """Make the figures of a test, of all models at once."""
        setting, test = self.setting, sampled_test(self.setting, name)
        counts = self._counts(test.rows)
        models = {key: point for key, point in _models(setting) if name in point}
        whole = [key for key, point in models.items() if test.samples in point.get("samples", ())]
        found = {}
        if whole:
            outcomes = [test.read(models[key]["samples"][test.samples]) for key in whole]
            made = test.figures(counts, np.stack(outcomes, axis=1).astype(np.float64))
            found = dict(zip(whole, made.T, strict=True))
        noise: dict[tuple[str, str], Array] = {}
        for key, point in models.items():
            if key not in found:
                recorded = point.get(f"{name}_se")
                error = test.error(point[name]) if recorded is None else recorded
                if key[:2] not in noise:
                    noise[key[:2]] = self.random.standard_normal(self.resamples)
                found[key] = point[name] + noise[key[:2]] * error
        if BASE in found:
            self.base[name] = found.pop(BASE)[:, None]
        for plan, merged in dict.fromkeys((plan, merged) for plan, merged, _ in found):
            seeds = [found[key] for key in sorted(found) if key[:2] == (plan, merged)]
            self.figures[plan, merged, name] = np.stack(seeds, axis=1)

    def _counts(self, rows: int) -> Array:
        """How often each resample has each row."""
        drawn = self.random.integers(rows, size=(self.resamples, rows))
        drawn += np.arange(self.resamples)[:, None] * rows
        counts = np.bincount(drawn.ravel(), minlength=drawn.size)
        return counts.reshape(drawn.shape).astype(np.float64)


BASE = ("pretrained", "base", 0)


def _models(setting: Setting) -> Iterator[tuple[tuple[str, str, int], Record]]:
    """The base, and all points of all seeds."""
    yield BASE, setting.base
    for (plan, seed), run in setting.runs.items():
        for merged, point in run["points"].items():
            yield (plan, merged, seed), point


class SampledTest(NamedTuple):
    """A test whose samples are recorded.

    Attributes:
        samples: their name in a record.
        rows: how many they are.
        read: the outcomes of a model, from the record.
        figures: those of several models, from how often each resample has each row and from their
            outcomes, one column per model.
        error: the standard error of a figure, for models whose samples are not recorded.
    """

    samples: str
    rows: int
    read: Callable[[Any], Array]
    figures: Callable[[Array, Array], Array]
    error: Callable[[float], float]


def sampled_test(setting: Setting, name: str) -> SampledTest:
    """The test of a figure of the setting's records."""
    about, samples = setting.pretrained, name.removesuffix("_nll")
    if "rows" in about:
        rows = about["rows"]["report" if name == setting.report else name]
    else:
        rows = setting.base["sizes"][samples]

    def of_share(value: float) -> float:
        return math.sqrt(value * (1 - value) / rows)

    def of_correlation(value: float) -> float:
        return (1 - value**2) / math.sqrt(rows - 1)

    if isinstance(rows, list):  # the tokens of each request of a text
        tokens = np.array(rows, dtype=np.float64)
        made = partial(losses, tokens)
        return SampledTest(samples, len(rows), partial(sums, tokens), made, _unknown_error)
    read, labels = partial(unpack, n=rows), about.get("labels", {}).get(name)
    found = SampledTest(samples, rows, read, shares, of_share)
    if name == "stsb":
        found = found._replace(read=unpack_numbers, error=of_correlation)
        if labels is not None:
            rank = partial(correlations, unpack_numbers(labels, 3))
            found = found._replace(figures=rank)
    elif name == setting.report and about.get("metric") == "matthews":
        found = found._replace(error=of_correlation)
        if labels is not None:
            found = found._replace(figures=partial(matthews, read(labels)))
    return found


def _unknown_error(value: float) -> float:
    raise ValueError("a loss needs a recorded standard error if its samples are not recorded")


def sums(tokens: Array, recorded: list[float]) -> Array:
    """The summed losses of requests, also of a model that diverged.

    >>> sums(np.array([1, 2]), [0.5, math.nan]).tolist()
    [0.5, 200.0]
    """
    found = np.array(recorded)
    return np.where(np.isfinite(found), found, DIVERGED * tokens)


def losses(tokens: Array, counts: Array, summed: Array) -> Array:
    """The mean loss of a token, from the summed losses of requests.

    >>> losses(np.array([1, 3]), np.array([[1, 1], [0, 2]]), np.array([[2], [6]])).ravel().tolist()
    [2.0, 2.0]
    """
    found: Array = counts @ summed / (counts @ tokens)[:, None]
    return found


def shares(counts: Array, right: Array) -> Array:
    """The share of right answers.

    >>> shares(np.array([[2, 0], [1, 1]]), np.array([[1], [0]])).ravel().tolist()
    [1.0, 0.5]
    """
    found: Array = counts @ right / counts[0].sum()
    return found


def matthews(labels: Array, counts: Array, right: Array) -> Array:
    """Matthews' correlation of predictions with their labels; 0 if either is constant."""
    yes = labels.astype(np.float64)[:, None]
    positive, said_no = counts @ (right * yes), counts @ ((1 - right) * yes)
    negative, said_yes = counts @ (right * (1 - yes)), counts @ ((1 - right) * (1 - yes))
    below = (positive + said_yes) * (positive + said_no)
    below = below * (negative + said_yes) * (negative + said_no)
    above = positive * negative - said_yes * said_no
    found: Array = np.where(below > 0, above / np.sqrt(np.where(below > 0, below, 1)), 0.0)
    return found


def correlations(labels: Array, counts: Array, values: Array) -> Array:
    """Spearman's ρ of each column with the labels: the correlation of their ranks.

    It is 0 if either is constant.
    """
    counts = np.ascontiguousarray(counts.T)
    other = centered_ranks(counts, labels)
    spread = (counts * other**2).sum(0)
    found = []
    for column in values.T:
        own = centered_ranks(counts, column)
        weighted = counts * own
        below = np.sqrt((weighted * own).sum(0) * spread)
        found.append((weighted * other).sum(0) / np.where(below > 0, below, 1))
    return np.stack(found, axis=1)


def centered_ranks(counts: Array, values: Array) -> Array:
    """The ranks of all rows in each resample, less the mean rank; equal values share a rank.

    ``counts`` are of rows × resamples here, as its rows are added up one after the other.

    >>> counts = np.array([[1, 1, 1], [2, 0, 1]]).T
    >>> centered_ranks(counts, np.array([3.0, 1.0, 3.0])).T.tolist()
    [[0.5, -1.0, 0.5], [0.0, -1.5, 0.0]]
    """
    order = np.argsort(values)
    below = np.zeros((len(values) + 1, counts.shape[1]), counts.dtype)
    for number, row in enumerate(order):  # far faster than np.cumsum along this axis
        np.add(below[number], counts[row], out=below[number + 1])
    first, last = (np.searchsorted(values[order], values, side) for side in ("left", "right"))
    found: Array = (below[first] + below[last] - below[-1]) / 2
    return found
