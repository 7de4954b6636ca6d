"""FAPM: keep the changes that are large but small beside their weight, and undo the others.

Huang et al., *Mitigating Catastrophic Forgetting in Large Language Models with Forgetting-aware
Pruning*, EMNLP 2025, https://arxiv.org/abs/2509.08255.

    S = |ΔW| − mean|W*| · |ΔW| / |W*|,    ΔW = W₁ − W*

The weights of each tensor with the largest S keep their change. A change whose size relative to its
weight is large is undone first: it is the one that forgets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast._torch.checks import positive_share
from holdfast._torch.merging import Where
from holdfast.methods._merging import TensorMerging
from holdfast.methods.mofo import largest
from holdfast.stages import Checks, MedianLoss, SearchRange, SearchSpace


@dataclass(frozen=True)
class FAPM(TensorMerging):
    """Keep the changes with the best score of size against relative size; undo the others.

    Args:
        keep: the share of each tensor's weights that keeps its change. 1 keeps all changes.

    Example:
        >>> import torch
        >>> from holdfast import FAPM
        >>> from holdfast.stages import Where
        >>> base, tuned = torch.tensor([4.0, 0.1, 4.0]), torch.tensor([5.0, 1.1, 4.5])
        >>> FAPM(keep=0.34).merged(Where("weight"), base, [tuned])
        tensor([5.0000, 0.1000, 4.0000])
    """

    checks: ClassVar[Checks] = {"keep": positive_share}
    neutral: ClassVar[dict[str, Any] | None] = {"keep": 1.0}
    swept: ClassVar[str | None] = "keep"

    keep: float = 0.1

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"keep": SearchRange(0.01, 1.0, 0.1)}

    def merged(self, where: Where, base: Tensor, tuned: Sequence[Tensor]) -> Tensor:
        kept = largest(score(base, tuned[0]), max(1, int(self.keep * base.numel())))
        return torch.where(kept, tuned[0], base)


def score(base: Tensor, tuned: Tensor) -> Tensor:
    """S of each weight; −∞ for a change of a weight that was 0, and 0 without a change.

    >>> score(torch.tensor([2.0, 1.0, 0.0, 1.0]), torch.tensor([3.0, 2.0, 1.0, 1.0]))
    tensor([0.5000, 0.0000,   -inf, 0.0000])
    """
    change, size = (tuned - base).abs(), base.abs()
    lost = torch.where(size == 0, torch.inf, size.mean() / size)  # per unit of the change
    return torch.where(change == 0, 0.0, change - lost * change)
