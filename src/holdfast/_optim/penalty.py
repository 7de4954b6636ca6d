"""Penalties with a strength, and how penalties are attached to an optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import Optimizer

from holdfast._optim.attached import AttachedPenalties
from holdfast._torch.checks import at_least_zero
from holdfast.reference import Reference
from holdfast.stages import Penalty

__all__ = ["AttachedPenalties", "ScaledPenalty", "attach_penalties"]

#: The share of the way back to θ* that an update goes, of penalties whose strength is not given.
SHARE = 0.01


@dataclass(frozen=True)
class ScaledPenalty(Penalty, ABC):
    """A penalty strength · P(θ − θ*). A method defines P by its value and its rate.

    Where there is no rate, by its gradient and its step.

    Args:
        strength: β; 0 is no penalty. None is what an update goes :data:`SHARE` of the way back by,
            SHARE / lr at the run's peak learning rate.
        coupled: add the gradient to the parameter's, instead of moving the weights by themselves.
    """

    neutral: ClassVar[dict[str, Any] | None] = {"strength": 0.0}

    strength: float | None = None
    coupled: bool = False

    def __post_init__(self) -> None:
        if self.strength is not None:
            object.__setattr__(self, "strength", at_least_zero("strength", self.strength))
        if not isinstance(self.coupled, bool):
            raise TypeError(f"coupled must be True or False, got {self.coupled!r}")

    @property
    def acts(self) -> bool:
        """False at strength 0."""
        return self.strength != 0

    def at(self, lr: float) -> ScaledPenalty:
        """With its strength given."""
        if self.strength is not None:
            return self
        if lr == 0:
            raise ValueError(
                f"the learning rate is 0, by which {type(self).__name__} sets its strength: attach "
                "it before the scheduler begins, or give strength="
            )
        return replace(self, strength=SHARE / lr)

    @property
    def beta(self) -> float:
        """The strength, once it is given."""
        if self.strength is None:
            raise ValueError("the strength depends on the learning rate of a run: see at(lr)")
        return self.strength

    @abstractmethod
    def value(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        """strength · P, summed; ``difference`` is θ − θ*, ``importance`` 1 if all count alike."""


def attach_penalties(
    optimizer: Optimizer,
    penalties: Sequence[Penalty],
    reference: Reference | None,
    importance: Reference | Sequence[Reference | None] | None = None,
    *,
    total_updates: int | None = None,
) -> AttachedPenalties:
    """Let penalties act in the step of an optimizer, whichever it is.

    ``optimizer.state_dict()`` then carries the count of updates and a fingerprint of the
    reference: to go on from it, attach the same penalties with the *pretrained* weights, then load
    the state. A copy or pickle of the optimizer loses them, as torch does not copy hooks.

    Args:
        optimizer: any; made with ``model.named_parameters()``, unless the reference knows the
            parameters by identity.
        penalties: any number; they add up.
        reference: the pretrained weights. A parameter without one is not penalised.
        importance: for EWC and MAS, how much each coordinate matters: one for all of them, or a
            sequence with one (or None) for each penalty. What has none is not penalised by them.
        total_updates: how many updates the run will make, for penalties that act at shares of it.

    Example:
        >>> import torch
        >>> from holdfast import Reference
        >>> from holdfast.optim import L2SP, attach_penalties
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> attached = attach_penalties(optimizer, [L2SP(1.0)], Reference.of(model))
        >>> attached.values()
        {'L2SP': 0.0}
    """
    return AttachedPenalties(optimizer, penalties, reference, importance, total_updates)
