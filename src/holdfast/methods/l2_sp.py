"""L2-SP: a quadratic penalty on the distance to the pretrained weights.

Li et al., *Explicit Inductive Bias for Transfer Learning with Convolutional Networks*, ICML 2018,
https://arxiv.org/abs/1802.01483:  ½·β·‖θ − θ*‖².
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from holdfast._torch.checks import at_least_zero, flag
from holdfast.stages import Checks, MedianLoss, Penalty, SearchRange, SearchSpace

#: The share of the way back to θ* per update, for penalties without a given strength.
SHARE = 0.01


@dataclass(frozen=True)
class ScaledPenalty(Penalty, ABC):
    """A penalty strength · P(θ − θ*). A method defines P by its value and its rate.

    A penalty without a rate defines its gradient and its move instead. ``strength=None`` is
    SHARE / lr at the run's peak learning rate: an update goes that share of the way back.
    """

    checks: ClassVar[Checks] = {"strength": at_least_zero, "coupled": flag}
    neutral: ClassVar[dict[str, Any] | None] = {"strength": 0.0}

    strength: float | None = None
    coupled: bool = False

    @property
    def acts(self) -> bool:
        return self.strength != 0

    @property
    def needs_fitted_head(self) -> bool:
        return self.weighted and self.acts  # importance is measured through the head

    def at(self, lr: float) -> ScaledPenalty:
        if self.strength is not None:
            return self
        if lr == 0:
            raise ValueError(
                f"{type(self).__name__} derives its strength from the learning rate, which is 0: "
                "attach it before the scheduler starts, or pass strength="
            )
        return replace(self, strength=SHARE / lr)

    @property
    def beta(self) -> float:
        """The strength; raises if it is not known yet."""
        if self.strength is None:
            raise ValueError("the strength depends on the learning rate of a run: see at(lr)")
        return self.strength

    @abstractmethod
    def value(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        """strength · P, summed; ``difference`` is θ − θ*, ``importance`` 1 if all count alike."""


@dataclass(frozen=True)
class QuadraticPenalty(ScaledPenalty):
    """½ · strength · Σ F·(θ − θ*)², where F is the importance of each coordinate, or 1."""

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        """The strength, so that an update goes 0.3 % to 30 % of the way back to θ*."""
        return {"strength": SearchRange(0.003 / lr, 0.3 / lr, SHARE / lr)}

    def value(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        return 0.5 * self.beta * (importance * difference.square()).sum()

    def rate(self, lr: float) -> float:
        return lr * self.beta

    def warning(self, lr: float) -> str | None:
        if self.coupled or lr * self.beta <= 1:
            return None
        return (
            f"{type(self).__name__}: lr·strength = {lr * self.beta:g} is above 1: every "
            "update puts the weights back onto the pretrained ones. Choose a strength well below "
            f"1/lr = {1 / lr:g}"
        )


@dataclass(frozen=True)
class L2SP(QuadraticPenalty):
    """½ · strength · ‖θ − θ*‖². Decoupled: θ ← θ − min(1, lr · strength) · (θ − θ*).

    Args:
        strength: β. A decoupled penalty undoes an update within about 1/(lr·strength) further
            updates. Under Adam, whose steps have size lr, no coordinate moves further than about
            1/strength from θ*. If None, 0.01 / lr at the run's peak learning rate: a memory of
            100 updates with any optimizer. (The paper, coupled with SGD: 0.001 to 0.1.)
        coupled: add the penalty's gradient to the parameter's, instead of moving the weights.

    Example:
        >>> from holdfast import L2SP
        >>> L2SP(0.01, coupled=True)
        L2SP(strength=0.01, coupled=True)
    """
