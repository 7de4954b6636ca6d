"""L1-SP: a penalty on the sum of absolute distances, which holds small changes back entirely.

The L1 variant of Li et al., ICML 2018, https://arxiv.org/abs/1802.01483:  β·‖θ − θ*‖₁.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast._optim.penalty import ScaledPenalty

__all__ = ["L1SP"]


@dataclass(frozen=True)
class L1SP(ScaledPenalty):
    """strength · ‖θ − θ*‖₁. Decoupled it is the proximal step, so that zeros are exact:

    θ − θ* ← sign(θ − θ*) · max(0, |θ − θ*| − lr · strength).

    Args:
        strength: β. Decoupled it competes with the optimizer's own step, whatever the learning
            rate: under Adam, whose steps are at most about lr, 1 holds everything at θ*. At the
            default of 0.1 a coordinate leaves θ* if its steps agree in direction to a tenth.
        coupled: add the gradient to the parameter's; no weight is then exactly at θ*.

    Example:
        >>> from holdfast.optim import L1SP
        >>> L1SP().strength
        0.1
    """

    strength: float | None = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength is None:
            raise ValueError("the strength of L1SP does not depend on the learning rate: give it")

    def value(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        """strength · ‖d‖₁."""
        return self.beta * difference.abs().sum()

    def gradient(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        """A subgradient, strength · sign(d)."""
        return self.beta * difference.sign()

    def move(self, difference: Tensor, importance: Tensor | float, lr: float) -> Tensor:
        """Soft thresholding by lr · strength."""
        return torch.nn.functional.softshrink(difference, lr * self.beta)
