"""L1-SP: a penalty that leaves most weights exactly at their pretrained values.

The L1 variant of Li et al., ICML 2018, https://arxiv.org/abs/1802.01483:  β·‖θ − θ*‖₁.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.optim.penalty import Penalty

__all__ = ["L1SP"]


@dataclass(frozen=True)
class L1SP(Penalty):
    """strength · ‖θ − θ*‖₁. Decoupled it is the proximal step, so that zeros are exact:

    θ − θ* ← sign(θ − θ*) · max(0, |θ − θ*| − lr · strength).
    """

    def value(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        """strength · ‖d‖₁."""
        return self.strength * difference.abs().sum()

    def gradient(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        """A subgradient, strength · sign(d)."""
        return self.strength * difference.sign()

    def move(self, difference: Tensor, importance: Tensor | float, lr: float) -> Tensor:
        """Soft thresholding by lr · strength."""
        return torch.nn.functional.softshrink(difference, lr * self.strength)
