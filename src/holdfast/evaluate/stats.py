"""Figures with their uncertainty: ratios of sums over samples, and the bootstrap.

Every figure here is Σ values / Σ counts over independent samples: a mean (all counts 1), a mean
over the tokens of texts (a sample is a window of text, its count the tokens in it), a share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.evaluate.report import Estimate, Score

__all__ = ["Samples", "compare", "estimate"]

Array = npt.NDArray[np.float64]
RESAMPLES = 2000
_CELLS = 1 << 22  # of a table of resamples at a time


@dataclass(frozen=True)
class Samples:
    """What one model got on each sample: a sum, and the number of things that were summed."""

    values: Sequence[float]
    counts: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def arrays(self) -> tuple[Array, Array]:
        """Both as arrays; without counts each sample is one thing."""
        values = np.asarray(self.values, dtype=np.float64)
        counts = np.ones_like(values) if self.counts is None else np.asarray(self.counts, float)
        return values, counts


def estimate(samples: Samples, transform: Callable[[Array], Array] | None = None) -> Estimate:
    """The ratio of the sums, with its 95 % interval.

    The interval is the bootstrap's (percentiles); of a share of yes and no it is Wilson's, which is
    not empty where all answers are the same.

    Args:
        samples: one model's.
        transform: of the ratio, such as ``np.exp`` for a perplexity.

    Example:
        >>> found = estimate(Samples([1.0, 0.0, 1.0, 1.0]))
        >>> found.value, round(found.low, 3), round(found.high, 3), found.n
        (0.75, 0.301, 0.954, 4)
    """
    if transform is None and _are_yes_and_no(samples):
        return _wilson(samples)
    return _estimate([samples], lambda ratios: _applied(ratios[0], transform))


def change(
    before: Samples, after: Samples, transform: Callable[[Array], Array] | None = None
) -> Estimate:
    """After − before over the same samples, which are resampled together."""
    if len(before) != len(after):
        raise ValueError(f"{len(before)} samples before and {len(after)} after are not the same")
    if list(before.values) == list(after.values) and _are_yes_and_no(before):
        # Not one answer changed: the share that does is likely less than 3 in n.
        most = min(1.0, 3 / len(before))
        return Estimate(0.0, -most, most, len(before))
    return _estimate(
        [before, after], lambda r: _applied(r[1], transform) - _applied(r[0], transform)
    )


def compare(
    name: str,
    metric: str,
    before: Samples,
    after: Samples,
    *,
    lower_is_better: bool,
    role: str = "retained",
    transform: Callable[[Array], Array] | None = None,
) -> Score:
    """What two models got on the same samples, as a row of the report."""
    return Score(
        name=name,
        metric=metric,
        lower_is_better=lower_is_better,
        before=estimate(before, transform),
        after=estimate(after, transform),
        change=change(before, after, transform),
        role=role,
    )


def _are_yes_and_no(samples: Samples) -> bool:
    return samples.counts is None and len(samples) > 0 and set(samples.values) <= {0.0, 1.0}


def _wilson(samples: Samples, z: float = 1.959964) -> Estimate:
    n = len(samples)
    p = sum(samples.values) / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half), n)


def _applied(ratio: Array, transform: Callable[[Array], Array] | None) -> Array:
    return ratio if transform is None else transform(ratio)


def _estimate(groups: Sequence[Samples], combine: Callable[[list[Array]], Array]) -> Estimate:
    n = len(groups[0])
    if n == 0:
        raise ValueError("there are no samples to take a figure of")
    arrays = [group.arrays() for group in groups]
    exact = [np.asarray([v.sum() / c.sum()]) for v, c in arrays]
    value = float(combine(exact)[0])
    if not np.isfinite(value):  # a broken model's: there is nothing to resample
        return Estimate(value, None, None, n)
    # The same draws for every figure over the same number of samples.
    generator = np.random.default_rng(0)
    found: list[Array] = []
    per_round = max(1, _CELLS // n)
    for start in range(0, RESAMPLES, per_round):
        rows = min(per_round, RESAMPLES - start)
        drawn = generator.integers(0, n, size=(rows, n))
        found.append(combine([v[drawn].sum(1) / c[drawn].sum(1) for v, c in arrays]))
    low, high = np.percentile(np.concatenate(found), [2.5, 97.5])
    return Estimate(value, float(low), float(high), n)
