"""SLERP: interpolate on the great circle between the pretrained and the tuned weights.

Shoemake, *Animating rotation with quaternion curves*, SIGGRAPH 1985,
https://doi.org/10.1145/325334.325242. Of each tensor, as one vector:

    θ = sin((1−t)·Ω)/sin Ω · θ* + sin(t·Ω)/sin Ω · θ₁,    cos Ω = ⟨θ*, θ₁⟩ / (‖θ*‖·‖θ₁‖)

For small angles Ω this is the linear interpolation of WiSE-FT up to terms of order Ω².
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast._torch.checks import share
from holdfast._torch.merging import Slice, Slices, Where
from holdfast.methods._merging import TensorMerging
from holdfast.stages import Checks, MedianLoss, SearchRange, SearchSpace

_STRAIGHT = 1e-6  # sin Ω below which the formula is 0/0: the line and the arc are the same there


@dataclass(frozen=True)
class SLERP(TensorMerging):
    """Interpolate the direction of each tensor at a constant angular rate.

    Args:
        t: the share of the angle between the pretrained and the tuned weights, between 0 and 1.

    Example:
        >>> import torch
        >>> from holdfast import SLERP
        >>> from holdfast.stages import Where
        >>> base, tuned = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
        >>> SLERP(t=0.5).merged(Where("weight"), base, [tuned])  # the length stays 1
        tensor([0.7071, 0.7071])
    """

    checks: ClassVar[Checks] = {"t": share}
    neutral: ClassVar[dict[str, Any] | None] = {"t": 1.0}
    swept: ClassVar[str | None] = "t"

    t: float = 0.5

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"t": SearchRange(0.05, 1.0, 0.5, log=False)}

    def survey(self, where: Where, slices: Slices) -> float:
        """The angle Ω."""
        squares = zip(*slices.map(_squares), strict=True)
        return angle_between(*(math.sqrt(math.fsum(column)) for column in squares))

    def merged_slice(self, where: Where, part: Slice, known: float) -> Tensor:
        base, end, angle = part.base, part.tuned[0], known
        if self.t in (0, 1) or math.sin(angle) < _STRAIGHT:
            return torch.lerp(base, end, self.t, out=part.buffer("merged"))
        mine, theirs = (math.sin(s * angle) / math.sin(angle) for s in (1 - self.t, self.t))
        return torch.mul(base, mine, out=part.buffer("merged")).add_(end, alpha=theirs)


def _squares(part: Slice) -> tuple[float, float, float]:
    """The squared lengths of both vectors and of their difference."""
    change = torch.sub(part.tuned[0], part.base, out=part.buffer("change"))
    vectors = part.base, part.tuned[0], change
    one, other, apart = (float(torch.dot(vector, vector)) for vector in vectors)
    return one, other, apart


def angle_between(one: float, other: float, apart: float) -> float:
    """The angle between two vectors, given their lengths and the length of their difference.

    It is 0 if a vector is 0. The formula is accurate for small angles too, where the arccosine of
    the inner product is not (W. Kahan, *Miscalculating Area and Angles of a Needle-like Triangle*).

    >>> round(angle_between(1.0, math.sqrt(2), 1.0), 4)
    0.7854
    """
    long, short = max(one, other), min(one, other)
    if short == 0:
        return 0.0
    # Rounding may make the shortest possible difference a little too short, and so on.
    apart = min(max(apart, long - short), long + short)
    rest = apart - (long - short) if short >= apart else short - (long - apart)
    above = ((long - short) + apart) * rest
    below = (long + (short + apart)) * ((long - apart) + short)
    return 2 * math.atan2(math.sqrt(max(0.0, above)), math.sqrt(max(0.0, below)))
