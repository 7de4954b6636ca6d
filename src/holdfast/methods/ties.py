"""TIES: trim small changes, elect a sign per weight, and average the changes that agree with it.

Yadav et al., *TIES-Merging: Resolving Interference When Merging Models*, NeurIPS 2023,
https://arxiv.org/abs/2306.01708.

    τ̂ₜ = the largest changes of τₜ = θₜ − θ*, 0 elsewhere                    trim
    γ = sgn(Σₜ τ̂ₜ)                                                          elect
    τ = mean of τ̂ₜ over the models t with sgn(τ̂ₜ) = γ ≠ 0                    merge
    θ = θ* + λ·τ

Trimming compares the weights of one tensor. (The paper's code compares those of the whole model.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast._torch.checks import above_zero, positive_share
from holdfast._torch.merging import Where
from holdfast.methods._merging import TensorMerging
from holdfast.methods.mofo import largest
from holdfast.stages import Checks, MedianLoss, SearchRange, SearchSpace


@dataclass(frozen=True)
class TIES(TensorMerging):
    """Keep the largest changes of each tensor; of several models, those with the elected sign.

    Args:
        density: the share of each tensor's weights that keeps its change, the largest ones. 1 keeps
            all changes.
        lam: the factor λ of the merged change.

    Example:
        >>> import torch
        >>> from holdfast import TIES
        >>> from holdfast.stages import Where
        >>> base, tuned = torch.zeros(4), torch.tensor([0.1, -3.0, 2.0, 0.2])
        >>> TIES(density=0.5).merged(Where("weight"), base, [tuned])
        tensor([ 0., -3.,  2.,  0.])
    """

    checks: ClassVar[Checks] = {"density": positive_share, "lam": above_zero}
    neutral: ClassVar[dict[str, Any] | None] = {"density": 1.0, "lam": 1.0}
    swept: ClassVar[str | None] = "density"
    most_models: ClassVar[int | None] = None

    density: float = 0.2
    lam: float = 1.0

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"density": SearchRange(0.05, 1.0, 0.2)}

    def merged(self, where: Where, base: Tensor, tuned: Sequence[Tensor]) -> Tensor:
        if len(tuned) == 1 and self.lam == 1:  # exact, where θ* + (θ₁ − θ*) would be rounded
            return torch.where(self._kept(tuned[0] - base), tuned[0], base)
        changes = torch.stack([self._trimmed(model - base) for model in tuned])
        agree = changes.sign() == changes.sum(0).sign()
        agree &= changes != 0
        mean = torch.where(agree, changes, 0).sum(0) / agree.sum(0).clamp(min=1)
        return base + self.lam * mean

    def _kept(self, change: Tensor) -> Tensor:
        return largest(change.abs(), max(1, int(self.density * change.numel())))

    def _trimmed(self, change: Tensor) -> Tensor:
        return torch.where(self._kept(change), change, 0)
