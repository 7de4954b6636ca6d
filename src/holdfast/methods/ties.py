"""TIES: trim small changes, elect a sign per weight, and average the changes that agree with it.

Yadav et al., *TIES-Merging: Resolving Interference When Merging Models*, NeurIPS 2023,
https://arxiv.org/abs/2306.01708.

    τ̂ₜ = the largest changes of τₜ = θₜ − θ*, 0 elsewhere                    trim
    γ = sgn(Σₜ τ̂ₜ)                                                          elect
    τ = mean of τ̂ₜ over the models t with sgn(τ̂ₜ) = γ ≠ 0                    merge
    θ = θ* + λ·τ

Trimming compares the weights of one tensor. (The paper's code compares those of the whole model.)
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast._torch.checks import above_zero, positive_share
from holdfast._torch.largest import Largest, largest_of
from holdfast._torch.merging import Slice, Slices, Where, chosen
from holdfast.methods._merging import TensorMerging
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

    def survey(self, where: Where, slices: Slices) -> list[Largest]:
        """The largest changes of each model."""
        count = max(1, int(self.density * slices.size))
        models = range(slices.models)
        return [largest_of(slices, partial(_size_of_change, model=m), count) for m in models]

    def merged_slice(self, where: Where, part: Slice, known: list[Largest]) -> Tensor:
        trimmed = [_size_of_change(part, model) for model in range(len(known))]
        for values, largest in zip(trimmed, known, strict=True):
            largest.mask_(part.begin, values)
        total = part.buffer("total")
        if len(known) == 1 and self.lam == 1:  # exact, where θ* + (θ₁ − θ*) would be rounded
            return chosen(trimmed[0], part.tuned[0], part.base, out=total)
        agrees, elected = part.buffer("agrees"), part.buffer("elected").zero_()
        for kept, model in zip(trimmed, part.tuned, strict=True):
            elected.add_(kept.mul_(torch.sub(model, part.base, out=agrees)))
        elected.sign_()
        total.zero_()
        count = part.buffer("count").zero_()
        for change in trimmed:
            torch.mul(change, elected, out=agrees).gt_(0)
            total.addcmul_(change, agrees)
            count.add_(agrees)
        return torch.add(part.base, total.div_(count.clamp_(min=1)), alpha=self.lam, out=total)


def _size_of_change(part: Slice, model: int) -> Tensor:
    return torch.sub(part.tuned[model], part.base, out=part.buffer(f"change {model}")).abs_()
