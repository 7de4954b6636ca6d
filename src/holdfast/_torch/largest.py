"""The largest values of a tensor that is read in slices.

A sample of the tensor brackets the k-th largest value. One pass counts the values above the bracket
and collects the few inside it. If the value is outside after all, another pass looks there.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast._torch.merging import Slice, Slices
from holdfast._torch.slices import blocks

_BLOCK = 512  # values
_PER_BLOCK = 2**16  # one block of the sample per so many values of the tensor
_MOST_BLOCKS = 128


class Largest(NamedTuple):
    """The k largest values of a tensor; ties go to the lowest index.

    Attributes:
        level: the smallest of them; None if all values are among the largest.
        last: the begin of the last slice with values equal to it that belong to them. All of them
            do in the slices before, and none in those behind.
        ties: how many of them do in this slice.
    """

    level: float | None
    last: int = 0
    ties: int = 0

    def mask_(self, begin: int, values: Tensor) -> Tensor:
        """Set the largest values of the slice that begins there to 1, and the others to 0."""
        if self.level is None:
            return values.fill_(1)
        if begin < self.last:
            return values.ge_(self.level)
        if begin > self.last:
            return values.gt_(self.level)
        ties = torch.nonzero(values == self.level)[: self.ties]
        values.gt_(self.level)[ties] = 1
        return values


def largest_of(slices: Slices, values: Callable[[Slice], Tensor], k: int) -> Largest:
    """Find the k largest values of a function of each weight, such as the size of its change.

    >>> from holdfast._torch.merging import SlicesInMemory
    >>> slices = SlicesInMemory(torch.zeros(5), [torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0])])
    >>> largest_of(slices, lambda part: part.tuned[0], 3)
    Largest(level=2.0, last=0, ties=2)
    """
    if k >= slices.size:
        return Largest(None)
    low, high = _bracket(slices, values, k)
    while True:
        found = list(slices.map(partial(_count, values, low, high)))
        above, inside = sum(f.above for f in found), sum(len(f.inside) for f in found)
        at_high, at_low = sum(f.at_high for f in found), sum(f.at_low for f in found)
        if k <= above:
            low, high = high, math.inf
        elif k <= above + at_high:
            return _largest(high, k - above, {f.begin: f.at_high for f in found})
        elif k <= above + at_high + inside:
            rest = np.concatenate([f.inside for f in found])
            nth = k - above - at_high
            level = float(np.partition(rest, len(rest) - nth)[len(rest) - nth])
            ties = {f.begin: int(np.count_nonzero(f.inside == level)) for f in found}
            return _largest(level, nth - int(np.count_nonzero(rest > level)), ties)
        elif k <= above + at_high + inside + at_low:
            return _largest(low, k - above - at_high - inside, {f.begin: f.at_low for f in found})
        elif low > -math.inf:
            low, high = -math.inf, low
        else:  # fewer than k values are numbers
            return Largest(None)


class _Count(NamedTuple):
    """How many values of a slice are above a bracket and at its ends, and those inside."""

    begin: int
    above: int
    at_high: int
    inside: np.ndarray
    at_low: int


def _count(values: Callable[[Slice], Tensor], low: float, high: float, part: Slice) -> _Count:
    numbers = values(part).cpu().numpy()  # numpy compares and selects faster
    from_low, over_high = numbers >= low, numbers > high
    above = int(np.count_nonzero(over_high))
    near = np.compress(np.not_equal(from_low, over_high, out=from_low), numbers)
    at_high, at_low = (int(np.count_nonzero(near == end)) for end in (high, low))
    inside = near[(near > low) & (near < high)] if at_high or at_low else near
    return _Count(part.begin, above, at_high, inside, at_low)


def _largest(level: float, wanted: int, ties: dict[int, int]) -> Largest:
    """Take the first ``wanted`` values of all that equal the level, given their number by slice."""
    for begin, count in ties.items():
        if wanted <= count:
            return Largest(level, begin, wanted)
        wanted -= count
    raise ValueError(f"{wanted} values more were wanted than there are")


def _bracket(slices: Slices, values: Callable[[Slice], Tensor], k: int) -> tuple[float, float]:
    """Two values that the k-th largest one is probably between."""
    count = min(_MOST_BLOCKS, slices.size // _PER_BLOCK)
    if count == 0:
        return -math.inf, math.inf
    parts = (slices.part(*ends) for ends in blocks(slices.size, count, _BLOCK))
    sample = np.concatenate([values(part).clone().cpu().numpy() for part in parts])
    sample = np.sort(sample[~np.isnan(sample)])
    if len(sample) == 0:
        return -math.inf, math.inf
    share, n = k / slices.size, len(sample)
    # Four standard deviations, times two because the values of a block are alike.
    margin = 8 * math.sqrt(n * share * (1 - share)) + 2
    ends = (n * (1 - share) - margin, n * (1 - share) + margin)
    low = sample[int(ends[0])] if ends[0] >= 0 else -math.inf
    high = sample[int(ends[1])] if ends[1] < n else math.inf
    if low == high:
        low = np.nextafter(sample[int(ends[0])], -np.inf, dtype=sample.dtype)
    return float(low), float(high)
