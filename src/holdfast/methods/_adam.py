"""What optimizers built on torch's Adam have in common: the settings, the checks, the state."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast._torch import eight_bit
from holdfast._torch.checks import at_least_zero
from holdfast._torch.sharding import is_sharded
from holdfast.stages import Update


@dataclass(frozen=True)
class AdamUpdate(Update, ABC):
    """Stage 3 by one of Adam's family.

    Args:
        betas, eps: Adam's.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_betas(self.betas)
        beta1, beta2 = self.betas  # a recipe file has a list
        object.__setattr__(self, "betas", (float(beta1), float(beta2)))
        object.__setattr__(self, "eps", at_least_zero("eps", self.eps))


def check_betas(betas: Any) -> None:
    """Two numbers in [0, 1)."""
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(isinstance(b, float | int) and 0 <= b < 1 for b in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")


def check_adam_group(group: dict[str, Any]) -> None:
    """Validate Adam's own settings of a group."""
    for name in ("lr", "eps", "weight_decay"):
        at_least_zero(name, group[name])
    check_betas(group["betas"])
    if group["foreach"] and group["fused"]:
        raise ValueError("foreach and fused cannot both be True: choose one, or leave both None")
    if isinstance(group["lr"], Tensor) and group["foreach"] and not group["capturable"]:
        raise ValueError("lr as a tensor needs capturable=True with foreach=True")


def make_adam_state(
    state: dict[str, Tensor],
    p: Tensor,
    group: dict[str, Any],
    dtype: torch.dtype | Literal["8bit"],
) -> None:
    """Fill a parameter's empty state: the step and the two moments."""
    if dtype == "8bit" and is_sharded(p):
        raise ValueError("moments of 8 bits are not for sharded parameters: leave out state_dtype")
    # As in torch.optim.Adam: the step lives on the CPU unless the implementation needs it on the
    # device, which spares a synchronisation for each parameter.
    on_device = group["capturable"] or (group["fused"] and dtype == p.dtype)
    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")
    for moment in ("exp_avg", "exp_avg_sq"):
        kept = torch.uint8 if dtype == "8bit" else dtype
        state[moment] = torch.zeros_like(p, dtype=kept, memory_format=torch.preserve_format)
        if dtype == "8bit":
            scales = -(-p.numel() // eight_bit.BLOCK)
            state[f"{moment}_scale"] = torch.zeros(scales, device=p.device)
