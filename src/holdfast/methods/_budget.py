"""A forgetting budget: strength, learning rate and a last interpolation keep a divergence below it.

While training, one dual variable u ≥ 0 rises if the divergence on held-out texts is above what is
allowed, and falls if it is below:

    strength ← strength₀ · min(e^u, 10),    learning rate ← learning rate · e^(−u)

The strength alone is not enough, because the size of Adam's steps does not depend on it. What is
allowed starts at twice the budget and ends at the budget, with the learning rate: large steps
leave noise in the weights which small steps remove. After training, the largest α whose point
θ* + α·(θ − θ*) is within the budget is kept, so that the budget holds whatever happened before.
"""

import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from holdfast.methods._interpolation import copy_all, interpolate, pairs_to_interpolate
from holdfast.reference import Reference

logger = logging.getLogger(__name__)

_GAIN = 0.5  # of u per observation, times log(divergence / allowed)
_STRONGEST = 10.0  # times the strength of the start
_CLOSE = 0.02  # of the budget: how near the last interpolation comes to it


class BudgetController:
    """The dual variable of a budget.

    Example:
        >>> controller = BudgetController(budget=0.1)
        >>> controller.observe(0.4, lr_share=1.0)        # twice of what is allowed
        >>> round(controller.strength_factor, 3), round(controller.lr_factor, 3)
        (1.414, 0.707)
    """

    def __init__(self, budget: float) -> None:
        self.budget, self.u = budget, 0.0

    def observe(self, divergence: float, lr_share: float) -> None:
        """Adapt to a divergence, at a learning rate that is this share of its peak."""
        allowed = self.budget * (1.0 + min(1.0, lr_share))
        excess = math.log(max(divergence, 1e-12) / allowed)
        self.u = max(0.0, self.u + _GAIN * max(-2.0, min(2.0, excess)))

    @property
    def strength_factor(self) -> float:
        return min(math.exp(self.u), _STRONGEST)

    @property
    def lr_factor(self) -> float:
        return math.exp(-self.u)


def scale_learning_rate(optimizer: Optimizer, factor: Callable[[], float]) -> None:
    """Multiply the learning rates within each step of an optimizer; schedules do not see it."""
    before: list[Any] = []

    # torch passes the optimizer, so that the hooks do not keep it in memory.
    def scale(stepping: Optimizer, *_: Any) -> None:
        before[:] = [group["lr"] for group in stepping.param_groups]
        for group in stepping.param_groups:
            group["lr"] = group["lr"] * factor()

    def restore(stepping: Optimizer, *_: Any) -> None:
        for group, lr in zip(stepping.param_groups, before, strict=True):
            group["lr"] = lr

    optimizer.register_step_pre_hook(scale)
    optimizer.register_step_post_hook(restore)


def check_interpolation(model: nn.Module, reference: Reference | None) -> None:
    """Raise ValueError if a model cannot be moved toward θ*."""
    for _ in pairs_to_interpolate(model, reference, buffers=False):
        pass


def keep_within(
    budget: float,
    model: nn.Module,
    reference: Reference | None,
    divergence: Callable[[nn.Module], float],
) -> tuple[float, float]:
    """Move a tuned model toward θ* until its divergence is within a budget, as little as needed.

    Return α, the share of the way from θ* that is left, and the divergence there. A warning says if
    even α = 0 is not within the budget: parts without pretrained values do not move.
    """
    found = divergence(model)
    if found <= budget:
        return 1.0, found
    pairs = [*pairs_to_interpolate(model, reference, buffers=False)]
    tensors = [tensor for tensor, _ in pairs]
    tuned = [tensor.detach().clone() for tensor in tensors]

    def at(alpha: float) -> float:
        copy_all(tensors, tuned)
        interpolate(pairs, alpha)
        return divergence(model)

    # The divergence is nearly quadratic in α, so the first guess is close.
    low, high = 0.0, 1.0
    alpha = math.sqrt(budget / found) if math.isfinite(found) else 0.5
    for _ in range(20):
        found = at(alpha)
        if (1 - _CLOSE) * budget <= found <= budget:
            break
        low, high = (alpha, high) if found <= budget else (low, alpha)
        alpha = (low + high) / 2
    else:
        alpha = low  # the largest that was within the budget, or 0
        found = at(alpha)
    if found <= budget:
        logger.info(f"budget {budget:g}: kept α = {alpha:.3f}, with {found:.4g} nats per token")
    else:
        warnings.warn(
            f"the budget of {budget:g} nats per token cannot be kept: the model diverges by "
            f"{found:.4g} even with the pretrained weights, because other parts were trained too",
            stacklevel=2,
        )
    return alpha, found
