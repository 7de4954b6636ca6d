"""SLERP: interpolate on the great circle between the pretrained and the tuned weights.

Shoemake, *Animating rotation with quaternion curves*, SIGGRAPH 1985,
https://doi.org/10.1145/325334.325242. Of each tensor, as one vector:

    θ = sin((1−t)·Ω)/sin Ω · θ* + sin(t·Ω)/sin Ω · θ₁,    cos Ω = ⟨θ*, θ₁⟩ / (‖θ*‖·‖θ₁‖)

For small angles Ω this is the linear interpolation of WiSE-FT up to terms of order Ω².
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast._torch.checks import share
from holdfast._torch.merging import Where
from holdfast.methods._merging import TensorMerging
from holdfast.stages import Checks, MedianLoss, SearchRange, SearchSpace

_SLICE = 2**20  # weights, to need little memory beside the tensors
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

    def merged(self, where: Where, base: Tensor, tuned: Sequence[Tensor]) -> Tensor:
        end = tuned[0]
        angle = angle_between(base, end)
        if self.t in (0, 1) or math.sin(angle) < _STRAIGHT:
            return torch.lerp(base, end, self.t)
        mine, theirs = (math.sin(s * angle) / math.sin(angle) for s in (1 - self.t, self.t))
        return (mine * base).add_(end, alpha=theirs)


def angle_between(one: Tensor, other: Tensor) -> float:
    """The angle between two vectors; 0 if one of them is 0.

    >>> round(angle_between(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])), 4)
    0.7854
    """
    lengths = [float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in (one, other)]
    if 0 in lengths:
        return 0.0
    apart = along = 0.0
    for a, b in zip(one.split(_SLICE), other.split(_SLICE), strict=True):
        u, v = a / lengths[0], b / lengths[1]
        apart += float((u - v).double().square().sum())
        along += float((u + v).double().square().sum())
    # Accurate for small angles, where the arccosine of the inner product is not.
    return 2 * math.atan2(math.sqrt(apart), math.sqrt(along))
