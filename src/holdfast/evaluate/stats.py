"""Figures with their uncertainty: ratios of sums over samples, correlations, and the bootstrap.

Every figure but a correlation is Σ values / Σ counts over independent samples: a mean (all counts
are 1), a mean over tokens (the count of a window of text is its number of tokens), or a share.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast._torch.finite import is_finite
from holdfast._torch.imports import require
from holdfast.evaluate.report import Estimate, Score

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Transform: TypeAlias = Callable[[Array], Array] | None
RESAMPLES = 2000
_CELLS = 1 << 22  # the maximum size of a table of resamples


@dataclass(frozen=True)
class Outcomes:
    """The result of one model on each sample: a sum, and the number of summed values.

    Without counts, every count is 1.
    """

    values: Sequence[float]
    counts: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Numbers:
    """The prediction of a model for each sample, and the true value."""

    predicted: Sequence[float]
    true: Sequence[float]


def estimate(outcomes: Outcomes, transform: Transform = None) -> Estimate:
    """Return the ratio of the sums with its 95 % interval.

    The interval is the percentile bootstrap's. For a share of yes and no it is Wilson's, which has
    a positive width even if all answers are equal.

    ``transform`` is applied to the ratio, such as ``np.exp`` for a perplexity.

    Example:
        >>> found = estimate(Outcomes([1.0, 0.0, 1.0, 1.0]))
        >>> found.value, round(found.low, 3), round(found.high, 3), found.n
        (0.75, 0.301, 0.954, 4)
    """
    if exact := _share(outcomes, transform):
        return exact
    ratio = _ratio(outcomes, transform)
    return _bootstrap(len(outcomes), lambda drawn: [ratio(drawn)])[0]


def compare(
    name: str,
    metric: str,
    before: Outcomes,
    after: Outcomes,
    *,
    lower_is_better: bool,
    role: str = "retained",
    transform: Transform = None,
) -> Score:
    """Return the score of two models on the same samples, which are resampled together."""
    if len(before) != len(after):
        raise ValueError(
            f"before and after must have the same samples, got {len(before)} and {len(after)}"
        )
    exact = [_share(before, transform), _share(after, transform), _no_change(before, after)]
    ratios = [_ratio(some, transform) for some in (before, after)]

    def figures(drawn: Indices) -> list[Array]:
        old, new = (ratio(drawn) for ratio in ratios)
        return [old, new, new - old]

    found = [one for one in exact if one is not None]
    if len(found) < len(exact):
        pairs = zip(exact, _bootstrap(len(before), figures), strict=True)
        found = [resampled if one is None else one for one, resampled in pairs]
    old, new, change = found
    return Score(name, metric, lower_is_better, old, new, change, role)


def _no_change(before: Outcomes, after: Outcomes) -> Estimate | None:
    """Return the change of yes and no if no answer changed, else None."""
    if list(before.values) != list(after.values) or not _are_yes_and_no(before):
        return None
    # By the rule of three the share of changes is below 3/n at 95 %.
    most = min(1.0, 3 / len(before))
    return Estimate(0.0, -most, most, len(before))


def _share(outcomes: Outcomes, transform: Transform) -> Estimate | None:
    """Return the share of yes, or None if the outcomes are not yes and no."""
    return _wilson(outcomes) if transform is None and _are_yes_and_no(outcomes) else None


def _are_yes_and_no(outcomes: Outcomes) -> bool:
    return outcomes.counts is None and len(outcomes) > 0 and set(outcomes.values) <= {0.0, 1.0}


def _wilson(outcomes: Outcomes, z: float = 1.959964) -> Estimate:
    n = len(outcomes)
    p = sum(outcomes.values) / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half), n)


def _ratio(outcomes: Outcomes, transform: Transform) -> Callable[[Indices], Array]:
    values = np.asarray(outcomes.values, float)
    counts = None if outcomes.counts is None else np.asarray(outcomes.counts, float)

    def ratio(drawn: Indices) -> Array:
        total = drawn.shape[-1] if counts is None else counts[drawn].sum(-1)
        found: Array = values[drawn].sum(-1) / total
        return found if transform is None else transform(found)

    return ratio


@np.errstate(all="ignore")  # a broken model gives NaN and infinity
def _bootstrap(n: int, figures: Callable[[Indices], Sequence[Array]]) -> list[Estimate]:
    """Return figures of n samples with their intervals.

    ``figures`` computes them for each row of a table of samples' indices.
    """
    if n == 0:
        raise ValueError("there are no samples to estimate a figure from")
    # The same seed for every figure, so that figures over the same samples share their resamples.
    generator = np.random.default_rng(0)
    rounds = -(-RESAMPLES * n // _CELLS)
    sizes = [len(part) for part in np.array_split(range(RESAMPLES), rounds)]
    drawn = (generator.integers(0, n, size=(size, n)) for size in sizes)
    resampled = np.hstack([figures(indices) for indices in drawn])
    exact = np.hstack(figures(np.arange(n)[None]))
    found = []
    for value, row in zip(exact.tolist(), resampled, strict=True):
        known = row[~np.isnan(row)] if is_finite(value) else ()
        low, high = np.percentile(known, [2.5, 97.5]).tolist() if len(known) else (None, None)
        found.append(Estimate(value, low, high, n))
    return found


def correlation(name: str, metric: str, before: Numbers, after: Numbers, role: str) -> Score:
    """Return the correlation of two models' predictions with the truth as a score.

    The metric is ``"spearman"`` or ``"pearson"``. Each bootstrap draw is used for both models.
    """
    figure = {"spearman": spearman, "pearson": pearson}[metric]
    pairs = [(np.asarray(n.predicted, float), np.asarray(n.true, float)) for n in (before, after)]

    def figures(drawn: Indices) -> list[Array]:
        old, new = (figure(predicted[drawn], true[drawn]) for predicted, true in pairs)
        return [old, new, new - old]

    old, new, change = _bootstrap(len(before.predicted), figures)
    return Score(name, metric, False, old, new, change, role)


def spearman(predicted: Array, true: Array) -> Array:
    """Return Spearman's ρ along the last axis, with average ranks for ties.

    >>> float(spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0])))
    1.0
    """
    rank = require("scipy.stats", extra="eval", what="rank correlation").rankdata
    return pearson(rank(predicted, axis=-1), rank(true, axis=-1))


def pearson(predicted: Array, true: Array) -> Array:
    """Return Pearson's r along the last axis; NaN if one of the two is constant.

    >>> round(float(pearson(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0]))), 6)
    -1.0
    """
    x, y = (values - values.mean(-1, keepdims=True) for values in (predicted, true))
    found: Array = (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    return found
