"""FAPM: keep the changes that are large but small beside their weight, and undo the others.

Huang et al., *Mitigating Catastrophic Forgetting in Large Language Models with Forgetting-aware
Pruning*, EMNLP 2025, https://arxiv.org/abs/2509.08255.

    S = |ΔW| − mean|W*| · |ΔW| / |W*|,    ΔW = W₁ − W*

The weights of each tensor with the largest S keep their change. A change whose size relative to its
weight is large is undone first: it is the one that forgets.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast._torch.checks import positive_share
from holdfast._torch.largest import Largest, largest_of
from holdfast._torch.merging import Slice, Slices, Where, chosen
from holdfast.methods._merging import TensorMerging
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

    def survey(self, where: Where, slices: Slices) -> tuple[float, Largest]:
        """mean|W*|, and the changes with the largest S."""
        mean = math.fsum(slices.map(_sum_of_sizes)) / slices.size
        count = max(1, int(self.keep * slices.size))
        return mean, largest_of(slices, lambda part: score(part, mean), count)

    def merged_slice(self, where: Where, part: Slice, known: tuple[float, Largest]) -> Tensor:
        mean, largest = known
        kept = largest.mask_(part.begin, score(part, mean))
        return chosen(kept, part.tuned[0], part.base, out=part.buffer("merged"))


def _sum_of_sizes(part: Slice) -> float:
    return float(torch.abs(part.base, out=part.buffer("size")).sum())


def score(part: Slice, mean: float) -> Tensor:
    """S of each weight; −∞ for a change of a weight that was 0, and 0 without a change.

    >>> base, tuned = torch.tensor([2.0, 1.0, 0.0, 1.0]), torch.tensor([3.0, 2.0, 1.0, 1.0])
    >>> score(Slice(0, base, [tuned]), mean=1.0)
    tensor([0.5000, 0.0000,   -inf, 0.0000])
    """
    change = torch.sub(part.tuned[0], part.base, out=part.buffer("change")).abs_()
    size = torch.abs(part.base, out=part.buffer("size"))
    mean = max(mean, torch.finfo(size.dtype).tiny)
    value = torch.addcdiv(change, change, size, value=-mean, out=size)
    return value.nan_to_num_(0.0, math.inf, -math.inf)  # 0/0: no weight and no change
