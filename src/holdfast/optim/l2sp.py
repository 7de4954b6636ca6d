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

    def value(self, difference: Tensor) -> Tensor:
        """½ · strength · ‖d‖²."""
        return 0.5 * self.strength * difference.square().sum()

    def gradient(self, difference: Tensor) -> Tensor:
        """The derivative, strength · d."""
        return self.strength * difference

    def move(self, difference: Tensor, lr: float) -> Tensor:
        """The share lr · strength of the way back, no further than θ*."""
        return difference * (1 - min(1.0, lr * self.strength))
