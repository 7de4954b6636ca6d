"""Penalties on the way from the pretrained weights, for any optimizer.

A penalty acts in the optimizer's step, once an update: a term in the loss would be counted once a
micro-batch under gradient accumulation, and would see placeholders under parameter sharding.

- *decoupled* (the default): after the step, θ moves by lr times the penalty's own gradient (or to
  its proximal point), untouched by Adam's normalisation, as weight decay is in AdamW;
- *coupled*: the penalty's gradient is added to the parameter's before the step, as a term in the
  loss would do it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from holdfast._checks import at_least_zero
from holdfast._names import align
from holdfast.reference import Reference

__all__ = ["AttachedPenalties", "Penalty", "attach_penalties"]


@dataclass(frozen=True)
class Penalty(ABC):
    """A penalty strength · P(θ − θ*). A method defines P three times: value, gradient, step.

    Args:
        strength: 0 is no penalty.
        coupled: add the gradient to the parameter's, instead of moving the weights by themselves.
    """

    strength: float
    coupled: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", at_least_zero("strength", self.strength))

    @abstractmethod
    def value(self, difference: Tensor) -> Tensor:
        """strength · P, summed; ``difference`` is θ − θ*."""

    @abstractmethod
    def gradient(self, difference: Tensor) -> Tensor:
        """strength · ∇P."""

    @abstractmethod
    def move(self, difference: Tensor, lr: float) -> Tensor:
        """θ − θ* after a decoupled step of rate ``lr``."""


class AttachedPenalties:
    """Penalties that act in an optimizer's step, until :meth:`remove`."""

    def __init__(
        self, optimizer: Optimizer, penalties: Sequence[Penalty], reference: Reference
    ) -> None:
        self.optimizer, self.penalties = optimizer, tuple(penalties)
        self._anchors = _match_groups(optimizer, reference)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Let the optimizer go on without them."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def values(self) -> dict[str, float]:
        """What each penalty amounts to now, for the log."""
        return {
            type(penalty).__name__: float(
                sum(penalty.value(p.float() - a.to(p).float()) for _, p, a in self._parameters())
            )
            for penalty in self.penalties
        }

    def _parameters(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        for group, anchors in zip(self.optimizer.param_groups, self._anchors, strict=True):
            for p, anchor in zip(group["params"], anchors, strict=True):
                if anchor is not None:
                    yield group, p, anchor

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        coupled = [p for p in self.penalties if p.coupled and p.strength]
        if not coupled:
            return
        # A fused step under a GradScaler starts with gradients that are still scaled.
        scale = getattr(optimizer, "grad_scale", None)
        for group, p, anchor in self._parameters():
            if p.grad is None:
                continue
            added = sum(penalty.gradient(p - anchor.to(p)) for penalty in coupled)
            added = added if scale is None else added * scale.to(p.device)
            p.grad.sub_(added) if group.get("maximize") else p.grad.add_(added)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        decoupled = [p for p in self.penalties if not p.coupled and p.strength]
        skipped = getattr(optimizer, "found_inf", None)
        if not decoupled or (skipped is not None and bool(skipped)):
            return
        for group, p, anchor in self._parameters():
            if p.grad is None:
                continue
            for penalty in decoupled:
                here = anchor.to(p)
                p.copy_(here + penalty.move(p - here, float(group["lr"])))


def attach_penalties(
    optimizer: Optimizer, penalties: Sequence[Penalty], reference: Reference
) -> AttachedPenalties:
    """Let penalties act in the step of an optimizer, whichever it is.

    Args:
        optimizer: any; made with ``model.named_parameters()``, unless the reference knows the
            parameters by identity.
        penalties: any number; they add up.
        reference: the pretrained weights. A parameter without one is not penalised.

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
    return AttachedPenalties(optimizer, penalties, reference)


def _match_groups(optimizer: Optimizer, reference: Reference) -> list[list[Tensor | None]]:
    groups = optimizer.param_groups
    names = [n for g in groups for n in g.get("param_names", ())]
    alignment = align(names, reference) if names else None
    found = [reference.match(g["params"], g.get("param_names"), alignment) for g in groups]
    if all(anchor is None for anchors in found for anchor in anchors):
        raise ValueError(reference.nothing_matches(names))
    return found
