"""AdamW, torch's own: the default and the baseline of the other updates.

Loshchilov and Hutter, *Decoupled Weight Decay Regularization*, ICLR 2019,
https://arxiv.org/abs/1711.05101.
"""

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import Optimizer

from holdfast._optim.backends import check_betas
from holdfast._torch.checks import at_least_zero
from holdfast.stages import Checks, Cost, Planned, Run, Update


@dataclass(frozen=True)
class AdamUpdate(Update, ABC):
    """The settings of an optimizer of Adam's family."""

    checks: ClassVar[Checks] = {"betas": check_betas, "eps": at_least_zero}

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def cost(self, planned: Planned) -> Cost:
        """Two moments. A step reads θ, g, m and v, and writes θ, m and v."""
        return Cost(
            state={"optimizer state": 2 * planned.value},
            moved=7 * planned.value,
            kernel="torch_fused_adamw",
        )


@dataclass(frozen=True)
class AdamWUpdate(AdamUpdate):
    """``torch.optim.AdamW``, the default of a recipe. On a GPU the fused implementation is used.

    Args:
        lr, weight_decay, layer_decay: as in :class:`~holdfast.stages.Update`.
        betas, eps: coefficients and ε of Adam.

    Example:
        >>> from holdfast import AdamWUpdate
        >>> AdamWUpdate(lr=2e-5, weight_decay=0.01).betas
        (0.9, 0.999)
    """

    def optimizer(self, groups: list[dict[str, Any]], run: Run, total_updates: int) -> Optimizer:
        params = [p for group in groups for _, p in group["params"]]
        # Groups that set no weight decay would get torch's default of 0.01.
        return torch.optim.AdamW(
            groups,
            lr=run.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=0.0,
            fused=all(p.is_cuda for p in params) or None,  # twice as fast, but not torch's default
        )
