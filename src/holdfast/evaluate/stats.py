"""Figures with their uncertainty: ratios of sums over samples, correlations, and the bootstrap.

Every figure but a correlation is Σ values / Σ counts over independent samples: a mean (all counts
are 1), a mean over tokens (a sample is a window of text, its count the number of tokens), or a
share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast._torch.imports import require
from holdfast.evaluate.report import Estimate, Score

Array = npt.NDArray[np.float64]
Transform: TypeAlias = Callable[[Array], Array] | None
RESAMPLES = 2000
_CELLS = 1 << 22  # the maximum size of a table of resamples


@dataclass(frozen=True)
class Outcomes:
    """The result of one model on each sample: a sum, and the number of summed values."""

    values: Sequence[float]
    counts: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def arrays(self) -> tuple[Array, Array]:
        """Return values and counts as arrays; without counts every count is 1."""
        values = np.asarray(self.values, dtype=np.float64)
        counts = np.ones_like(values) if self.counts is None else np.asarray(self.counts, float)
        return values, counts


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
    if transform is None and _are_yes_and_no(outcomes):
        return _wilson(outcomes)
    return _estimate([outcomes], lambda ratios: _applied(ratios[0], transform))


def change(before: Outcomes, after: Outcomes, transform: Transform = None) -> Estimate:
    """Return after − before over the same samples, which are resampled together."""
    if len(before) != len(after):
        raise ValueError(
            f"before and after must have the same samples, got {len(before)} and {len(after)}"
        )
    if list(before.values) == list(after.values) and _are_yes_and_no(before):
        # No answer changed. By the rule of three the share of changes is below 3/n at 95 %.
        most = min(1.0, 3 / len(before))
        return Estimate(0.0, -most, most, len(before))
    return _estimate(
        [before, after], lambda r: _applied(r[1], transform) - _applied(r[0], transform)
    )


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
    """Return the score of two models on the same samples."""
    return Score(
        name=name,
        metric=metric,
        lower_is_better=lower_is_better,
        before=estimate(before, transform),
        after=estimate(after, transform),
        change=change(before, after, transform),
        role=role,
    )


def _are_yes_and_no(outcomes: Outcomes) -> bool:
    return outcomes.counts is None and len(outcomes) > 0 and set(outcomes.values) <= {0.0, 1.0}


def _wilson(outcomes: Outcomes, z: float = 1.959964) -> Estimate:
    n = len(outcomes)
    p = sum(outcomes.values) / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half), n)


def _applied(ratio: Array, transform: Transform) -> Array:
    return ratio if transform is None else transform(ratio)


def _estimate(groups: Sequence[Outcomes], combine: Callable[[list[Array]], Array]) -> Estimate:
    n = len(groups[0])
    if n == 0:
        raise ValueError("there are no samples to estimate a figure from")
    arrays = [group.arrays() for group in groups]
    exact = [np.asarray([v.sum() / c.sum()]) for v, c in arrays]
    value = float(combine(exact)[0])
    if not np.isfinite(value):  # the model is broken; an interval would mean nothing
        return Estimate(value, None, None, n)
    # The same seed for every figure, so that figures over the same samples share their resamples.
    generator = np.random.default_rng(0)
    found: list[Array] = []
    per_round = max(1, _CELLS // n)
    for start in range(0, RESAMPLES, per_round):
        rows = min(per_round, RESAMPLES - start)
        drawn = generator.integers(0, n, size=(rows, n))
        found.append(combine([v[drawn].sum(1) / c[drawn].sum(1) for v, c in arrays]))
    low, high = np.percentile(np.concatenate(found), [2.5, 97.5])
    return Estimate(value, float(low), float(high), n)


def correlation(name: str, metric: str, before: Numbers, after: Numbers, role: str) -> Score:
    """Return the correlation of two models' predictions with the truth as a score.

    The metric is ``"spearman"`` or ``"pearson"``. The bootstrap intervals resample the same samples
    for both models.
    """
    measured = {"spearman": spearman, "pearson": pearson}[metric]
    pairs = [(np.asarray(n.predicted, float), np.asarray(n.true, float)) for n in (before, after)]
    n = len(before.predicted)
    values = [measured(*pair) for pair in pairs]
    generator = np.random.default_rng(0)
    drawn = (generator.integers(0, n, size=n) for _ in range(RESAMPLES))
    resampled = np.asarray([[measured(p[rows], t[rows]) for p, t in pairs] for rows in drawn])
    old, new = (_interval(v, column, n) for v, column in zip(values, resampled.T, strict=True))
    change = _interval(values[1] - values[0], resampled[:, 1] - resampled[:, 0], n)
    return Score(name, metric, lower_is_better=False, before=old, after=new, change=change,
                 role=role)  # fmt: skip


def spearman(predicted: Array, true: Array) -> float:
    """Return Spearman's ρ, with average ranks for ties.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    1.0
    """
    rank = require("scipy.stats", extra="eval", what="rank correlation").rankdata
    return pearson(*rank([predicted, true], axis=1))


def pearson(predicted: Array, true: Array) -> float:
    """Return Pearson's r; NaN if one of the two is constant.

    >>> round(pearson(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])), 6)
    -1.0
    """
    x, y = predicted - predicted.mean(), true - true.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else float("nan")


def _interval(value: float, resampled: Array, n: int) -> Estimate:
    known = resampled[np.isfinite(resampled)]
    if not np.isfinite(value) or not len(known):
        return Estimate(value, None, None, n)
    low, high = np.percentile(known, [2.5, 97.5])
    return Estimate(value, float(low), float(high), n)
