"""DARE: drop a random share of the changes, and rescale the others.

Yu et al., *Language Models are Super Mario: Absorbing Abilities from Homologous Models as a Free
Lunch*, ICML 2024, https://arxiv.org/abs/2311.03099.

    mₜ ~ Bernoulli(p),    δ̂ₜ = (1 − mₜ)·(θₜ − θ*) / (1 − p),    θ = θ* + λ·mean of δ̂ₜ

The expectation over the masks is θ* + λ·mean of (θₜ − θ*).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast._torch.checks import above_zero, natural_number, share_below_one
from holdfast._torch.merging import Slice, Where
from holdfast._torch.rng import generator_of
from holdfast.methods._merging import TensorMerging
from holdfast.stages import Checks, MedianLoss, SearchRange, SearchSpace


@dataclass(frozen=True)
class DARE(TensorMerging):
    """Undo a random share of the changes, and enlarge the others in proportion.

    Args:
        drop: the share p of the changes that is dropped, in [0, 1). 0 keeps all changes.
        lam: the factor λ of the merged change.
        seed: of the masks, which also depend on the tensor's name and the model's position. They
            are drawn on the CPU, so that a merge is the same on every device.

    Example:
        >>> import torch
        >>> from holdfast import DARE
        >>> from holdfast.stages import Where
        >>> base, tuned = torch.zeros(6), torch.ones(6)
        >>> DARE(drop=0.5).merged(Where("weight"), base, [tuned])
        tensor([2., 0., 2., 2., 2., 2.])
    """

    checks: ClassVar[Checks] = {
        "drop": share_below_one, "lam": above_zero, "seed": natural_number,
    }  # fmt: skip
    neutral: ClassVar[dict[str, Any] | None] = {"drop": 0.0, "lam": 1.0}
    swept: ClassVar[str | None] = "drop"
    most_models: ClassVar[int | None] = None

    drop: float = 0.9
    lam: float = 1.0
    seed: int = 0

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"drop": SearchRange(0.0, 0.99, 0.9, log=False)}

    def merged_slice(self, where: Where, part: Slice, known: Any) -> Tensor:
        tuned, total = part.tuned, part.buffer("total")
        if len(tuned) == 1 and self.drop == 0 and self.lam == 1:
            return total.copy_(tuned[0])  # exact, where θ* + (θ₁ − θ*) would be rounded
        total.zero_()
        change, kept = part.buffer("change"), part.buffer("kept")
        for number, model in enumerate(tuned):
            kept.copy_(self._kept(where.name, number, part.begin, len(total)))
            total.addcmul_(torch.sub(model, part.base, out=change), kept)
        scale = self.lam / (1 - self.drop) / len(tuned)
        return torch.add(part.base, total, alpha=scale, out=total)

    def _kept(self, name: str, model: int, begin: int, size: int) -> Tensor:
        """1 where a change is kept, else 0; the same on every device. It has 32 random bits."""
        generator = generator_of("dare", self.seed, name, model, begin)
        bits = torch.empty((size + 1) // 2, dtype=torch.int64)
        drawn = bits.random_(-(2**63), None, generator=generator).view(torch.int32)[:size]
        return drawn.ge_(min(round(self.drop * 2**32), 2**32 - 1) - 2**31)
