"""A forgetting budget: strength, learning rate and interpolation keep a divergence below it.

While training, u ≥ 0 rises if the divergence on held-out texts is above what is allowed, and falls
slowly if it is below:

    strength ← strength₀ · min(e^u, 10),    learning rate ← learning rate · e^(−u)

The strength alone is not enough, because the size of Adam's steps does not depend on it. Where u
rises by d, the next step also takes the weights back, θ ← θ* + e^(−d)·(θ − θ*), as if the learning
rate had been smaller from the start; the divergence is nearly quadratic in θ − θ*, so
d = ½ log(divergence / allowed). What is allowed falls from twice the budget with the learning rate:
large steps leave noise in the weights which small steps remove. After training, the largest α whose
point θ* + α·(θ − θ*) is within the budget is kept, so that the budget holds whatever happened
before.
"""

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from holdfast._torch.adapters import adapter_parts, adapters_are_new, not_linear
from holdfast._torch.layers import within
from holdfast._torch.layout import like, rank_and_world
from holdfast._torch.names import shorten
from holdfast.methods._merging import copies_of, interpolate, pairs_of, restore
from holdfast.reference import Reference
from holdfast.stages import Penalty

logger = logging.getLogger(__name__)

_AT_ONCE = 2.0  # the most that u rises by one observation
_SLOWLY = 0.05  # of log(allowed / divergence): how much u falls by one observation
_STRONGEST = 10.0  # times the strength of the start
_SPARE = 0.2  # of the budget, that the last interpolation takes away
_CLOSE = 0.02  # of the budget: how near the last interpolation comes to it
_STEPS = 20  # of the last interpolation, at most


class BudgetController:
    """The state of a budget while training.

    Attributes:
        u: the logarithm of the factor of the strength.
        way_back: the share of the way to θ* that the next step takes the weights back.

    Example:
        >>> controller = BudgetController(budget=0.1)
        >>> controller.observe(0.8, lr_share=1.0)        # four times what is allowed
        >>> controller.strength_factor, controller.lr_factor, controller.way_back
        (2.0, 0.5, 0.5)
    """

    def __init__(self, budget: float) -> None:
        self.budget, self.u, self.way_back = budget, 0.0, 0.0

    def observe(self, divergence: float, lr_share: float) -> None:
        """Adapt to a divergence, at a learning rate that is this share of its peak."""
        share = min(1.0, lr_share)
        allowed = self.budget * (2.0 * share + (1.0 + _SPARE) * (1.0 - share))
        excess = math.log(max(divergence, 1e-12) / allowed)
        step = min(_AT_ONCE, excess / 2) if excess > 0 else _SLOWLY * max(-2.0, excess)
        self.u, self.way_back = max(0.0, self.u + step), max(0.0, -math.expm1(-step))

    @property
    def strength_factor(self) -> float:
        return min(math.exp(self.u), _STRONGEST)

    @property
    def lr_factor(self) -> float:
        return math.exp(-self.u)


@dataclass(frozen=True)
class WayBack(Penalty):
    """Takes the weights back as a controller says, in the step of the optimizer."""

    needs_gradient: ClassVar[bool] = False

    controller: BudgetController

    def acts_at(self, update: int, total_updates: int | None) -> bool:
        return self.controller.way_back > 0

    def rate(self, lr: float) -> float:
        return self.controller.way_back


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


class Estimate(NamedTuple):
    """A mean over texts, and its standard error."""

    value: float
    error: float


def estimate(sums: Tensor, counts: Tensor) -> Estimate:
    """Σ sums / Σ counts over groups of texts. NaN counts as infinite.

    >>> estimate(torch.tensor([3.0, 5.0]), torch.tensor([10.0, 10.0]))
    Estimate(value=0.4, error=0.1)
    """
    if not sums.isfinite().all():
        return Estimate(math.inf, math.inf)
    groups, total = len(sums), float(counts.sum())
    value = float(sums.sum()) / total
    squares = float((sums - value * counts).square().sum())
    return Estimate(value, math.sqrt(squares * groups / max(1, groups - 1)) / total)


def check_that_all_can_return(model: nn.Module, reference: Reference | None) -> None:
    """Raise ValueError if an interpolation would not lead back to a model that starts to train.

    The pretrained model is the one without its adapters.
    """
    if not adapters_are_new(model):
        raise ValueError(
            "a budget moves adapters toward the pretrained model in the end (LoRA's B toward 0), "
            "but the adapters of this model do not start there: merge them into the weights first, "
            "or leave out budget="
        )
    if reason := not_linear(model):
        raise ValueError(reason)
    adapters = adapter_parts(model)
    pairs = [*pairs_of(model, reference, buffers=False)]
    others = {p: name for name, p in model.named_parameters() if not within(name, adapters)}
    ends: dict[Tensor, Tensor] = {pair.tensor: pair.base for pair in pairs}
    if stuck := [name for p, name in others.items() if p.requires_grad and p not in ends]:
        raise ValueError(
            "a budget moves the trained weights toward the pretrained ones in the end, but "
            f"{shorten(stuck)} have none: freeze them, or leave out budget="
        )
    both = [(p, name) for p, name in others.items() if p in ends]
    if apart := [name for p, name in both if not torch.equal(p, like(ends[p], p))]:
        raise ValueError(
            "a budget moves the trained weights toward the pretrained ones in the end, but the "
            f"model does not start there: {shorten(apart)} differ. Pass the weights of this model "
            "as reference=, or leave out budget="
        )


def keep_within(
    budget: float,
    model: nn.Module,
    reference: Reference | None,
    measure: Callable[[nn.Module], Estimate],
) -> tuple[float, float]:
    """Move a tuned model toward θ* until its divergence is within a budget, as little as needed.

    The divergence and one standard error are within it, so that other texts hardly exceed it.
    Return α, the share of the way from θ* that is left, and the divergence there.
    """
    found = measure(model)
    if sum(found) <= budget:
        return 1.0, found.value
    pairs = [*pairs_of(model, reference, buffers=False)]
    tensors = [pair.tensor for pair in pairs]
    tuned = copies_of(tensors)

    def at(alpha: float) -> Estimate:
        restore(tensors, tuned)
        interpolate(pairs, alpha)
        return measure(model)

    low, alpha, high = 0.0, 1.0, 1.0
    for _ in range(_STEPS):
        # The divergence is nearly quadratic in α, so this comes close at once.
        alpha *= math.sqrt((1 - _CLOSE / 2) * budget / max(sum(found), 1e-12))
        alpha = alpha if low < alpha < high else (low + high) / 2
        found = at(alpha)
        if (1 - _CLOSE) * budget <= sum(found) <= budget:
            break
        low, high = (alpha, high) if sum(found) <= budget else (low, alpha)
    else:
        alpha = low  # the largest that was within the budget, or 0
        found = at(alpha)
    if sum(found) > budget:
        warnings.warn(
            f"the budget of {budget:g} nats per token cannot be kept: the divergence is measured "
            f"as {found.value:.4g} even with the pretrained weights",
            stacklevel=2,
        )
    elif alpha == 0:
        warnings.warn(
            f"within the budget of {budget:g} nats per token nothing is left of the training",
            stacklevel=2,
        )
    if rank_and_world()[0] == 0:
        logger.warning(
            f"to keep the budget of {budget:g} nats per token, {alpha:.0%} of the change of the "
            f"weights is kept; the divergence is {max(0.0, found.value):.4g} nats per token"
        )
    return alpha, found.value
