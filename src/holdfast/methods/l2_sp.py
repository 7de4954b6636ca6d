"""L2-SP: a quadratic penalty on the distance to the pretrained weights.

Li et al., *Explicit Inductive Bias for Transfer Learning with Convolutional Networks*, ICML 2018,
https://arxiv.org/abs/1802.01483:  ½·β·‖θ − θ*‖².
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from holdfast._optim.penalty import SHARE, ScaledPenalty
from holdfast.stages import MedianLoss, SearchRange, SearchSpace

__all__ = ["L2SP"]


@dataclass(frozen=True)
class L2SP(ScaledPenalty):
    """½ · strength · ‖θ − θ*‖². Decoupled: θ ← θ − min(1, lr · strength) · (θ − θ*).

    Args:
        strength: β. Decoupled, what happened 1/(lr·strength) updates ago is forgotten, and under
            Adam, whose steps are of size lr, no coordinate gets further than about 1/strength
            from θ*. None is 0.01 / lr at the run's peak: a memory of 100 updates, whatever the
            optimizer and its learning rate. (The paper, coupled with SGD: 0.001 to 0.1.)
        coupled: add the gradient to the parameter's, instead of moving the weights by themselves.

    Example:
        >>> from holdfast.optim import L2SP
        >>> L2SP(0.01, coupled=True)
        L2SP(strength=0.01, coupled=True)
    """

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        """The strength, so that an update goes 0.3 % to 30 % of the way back to θ*."""
        return {"strength": SearchRange(0.003 / lr, 0.3 / lr, SHARE / lr)}

    def value(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        """½ · strength · Σ F·d²."""
        return 0.5 * self.beta * (importance * difference.square()).sum()

    def rate(self, lr: float) -> float:
        """lr · strength: it goes the share lr · strength · F of the way back, as far as θ*."""
        return lr * self.beta

    def warning(self, lr: float) -> str | None:
        """That nothing can be learned."""
        if self.coupled or lr * self.beta <= 1:
            return None
        return (
            f"{type(self).__name__}: lr·strength = {lr * self.beta:g} is above 1: every "
            "update puts the weights back onto the pretrained ones. Take a strength well below "
            f"1/lr = {1 / lr:g}"
        )
