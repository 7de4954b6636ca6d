"""L1-SP: an L1 penalty on the distance to θ*, which sets small changes to exactly 0.

The L1 variant of Li et al., ICML 2018, https://arxiv.org/abs/1802.01483:  β·‖θ − θ*‖₁.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.methods.l2_sp import ScaledPenalty


@dataclass(frozen=True)
class L1SP(ScaledPenalty):
    """strength · ‖θ − θ*‖₁. The decoupled form is the proximal step, so that zeros are exact:

    θ − θ* ← sign(θ − θ*) · max(0, |θ − θ*| − lr · strength).

    Args:
        strength: β. A decoupled penalty competes with the optimizer's own step at any learning
            rate. Under Adam, whose steps are at most about lr, 1 holds everything at θ*. At the
            default of 0.1 a coordinate leaves θ* if its mean step exceeds a tenth of lr.
        coupled: add the penalty's gradient to the parameter's; then no weight is exactly at θ*.

    Example:
        >>> from holdfast import L1SP
        >>> L1SP().strength
        0.1
    """

    strength: float | None = 0.1

    def value(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        return self.beta * difference.abs().sum()

    def gradient(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        return self.beta * difference.sign()  # a subgradient

    def move(self, difference: Tensor, importance: Tensor | float, lr: float) -> Tensor:
        return torch.nn.functional.softshrink(difference, lr * self.beta)
