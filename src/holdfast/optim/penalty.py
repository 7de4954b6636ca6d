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
from typing import Any, ClassVar

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
    #: Whether each coordinate counts by its importance (EWC, MAS) or all count alike.
    weighted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", at_least_zero("strength", self.strength))

    @abstractmethod
    def value(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        """strength · P, summed; ``difference`` is θ − θ*, ``importance`` 1 if all count alike."""

    @abstractmethod
    def gradient(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        """strength · ∇P."""

    @abstractmethod
    def move(self, difference: Tensor, importance: Tensor | float, lr: float) -> Tensor:
        """θ − θ* after a decoupled step of rate ``lr``."""


class AttachedPenalties:
    """Penalties that act in an optimizer's step, until :meth:`remove`."""

    def __init__(
        self,
        optimizer: Optimizer,
        penalties: Sequence[Penalty],
        reference: Reference,
        importance: Reference | None,
    ) -> None:
        self.optimizer, self.penalties = optimizer, tuple(penalties)
        needy = [type(p).__name__ for p in penalties if p.weighted]
        if needy and importance is None:
            raise ValueError(
                f"{', '.join(needy)} weighs each coordinate: pass importance=, from "
                "fisher_importance(model, data) or mas_importance(model, data)"
            )
        self._anchors = _match_groups(optimizer, reference)
        self._importance: list[list[Tensor | None]] = [[None] * len(a) for a in self._anchors]
        if importance is not None:
            self._importance = _match_groups(optimizer, importance)
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
        totals = dict.fromkeys((type(penalty).__name__ for penalty in self.penalties), 0.0)
        for _, p, anchor, importance in self._parameters():
            for penalty in self.penalties:
                weight = importance if penalty.weighted else 1.0
                value = penalty.value((p - anchor.to(p)).float(), weight)
                totals[type(penalty).__name__] += float(value)
        return totals

    def _parameters(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor, Tensor | float]]:
        """Every parameter that has an anchor, with it and its importance (0 where not known)."""
        rows = zip(self.optimizer.param_groups, self._anchors, self._importance, strict=True)
        for group, anchors, weights in rows:
            for p, anchor, weight in zip(group["params"], anchors, weights, strict=True):
                if anchor is not None:
                    yield group, p, anchor, 0.0 if weight is None else weight.to(p)

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        coupled = [p for p in self.penalties if p.coupled and p.strength]
        if not coupled:
            return
        # A fused step under a GradScaler starts with gradients that are still scaled.
        scale = getattr(optimizer, "grad_scale", None)
        for group, p, anchor, importance in self._parameters():
            if p.grad is None:
                continue
            difference = p - anchor.to(p)
            added = sum(x.gradient(difference, importance if x.weighted else 1.0) for x in coupled)
            added = added if scale is None else added * scale.to(p.device)
            p.grad.sub_(added) if group.get("maximize") else p.grad.add_(added)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        decoupled = [p for p in self.penalties if not p.coupled and p.strength]
        skipped = getattr(optimizer, "found_inf", None)
        if not decoupled or (skipped is not None and bool(skipped)):
            return
        for group, p, anchor, importance in self._parameters():
            if p.grad is None:
                continue
            here, lr = anchor.to(p), float(group["lr"])
            for penalty in decoupled:
                before = p - here
                after = penalty.move(before, importance if penalty.weighted else 1.0, lr)
                # What is not moved keeps its bits: θ* + (θ − θ*) is θ only up to rounding.
                p.copy_(torch.where(after == before, p, here + after))


def attach_penalties(
    optimizer: Optimizer,
    penalties: Sequence[Penalty],
    reference: Reference,
    importance: Reference | None = None,
) -> AttachedPenalties:
    """Let penalties act in the step of an optimizer, whichever it is.

    Args:
        optimizer: any; made with ``model.named_parameters()``, unless the reference knows the
            parameters by identity.
        penalties: any number; they add up.
        reference: the pretrained weights. A parameter without one is not penalised.
        importance: for EWC and MAS, how much each coordinate matters.

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
    return AttachedPenalties(optimizer, penalties, reference, importance)


def _match_groups(optimizer: Optimizer, reference: Reference) -> list[list[Tensor | None]]:
    groups = optimizer.param_groups
    names = [n for g in groups for n in g.get("param_names", ())]
    alignment = align(names, reference) if names else None
    found = [reference.match(g["params"], g.get("param_names"), alignment) for g in groups]
    if all(anchor is None for anchors in found for anchor in anchors):
        raise ValueError(reference.nothing_matches(names))
    return found
