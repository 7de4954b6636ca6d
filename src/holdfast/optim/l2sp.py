"""L2-SP: a quadratic penalty on the distance to the pretrained weights.

Li et al., *Explicit Inductive Bias for Transfer Learning with Convolutional Networks*, ICML 2018,
https://arxiv.org/abs/1802.01483:  ½·β·‖θ − θ*‖².
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from holdfast.optim.penalty import Penalty

__all__ = ["L2SP"]


@dataclass(frozen=True)
class L2SP(Penalty):
    """½ · strength · ‖θ − θ*‖². Decoupled: θ ← θ − min(1, lr · strength) · (θ − θ*)."""

    def value(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        """½ · strength · Σ F·d²."""
        return 0.5 * self.strength * (importance * difference.square()).sum()

    def gradient(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        """The derivative, strength · F·d."""
        return self.strength * importance * difference

    def move(self, difference: Tensor, importance: Tensor | float, lr: float) -> Tensor:
        """The share lr · strength · F of the way back, no further than θ*."""
        share = lr * self.strength * importance
        share = share.clamp(max=1.0) if isinstance(share, Tensor) else min(1.0, share)
        return difference * (1 - share)
