"""A run in phases, and what may not change in each of them.

The plan is kept on the model itself, so that methods stay plain settings, and a copy of the model
or one that went through a file goes on with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast._torch.adapters import unwrapped
from holdfast._torch.names import plain_name

_PLAN = "_holdfast_phases"


@dataclass
class Plan:
    """Names of parameters: those that required gradients before, and the frozen ones by phase."""

    trainable: frozenset[str]
    frozen: tuple[frozenset[str], ...]
    now: int | None = None


def trainable_names(model: nn.Module) -> list[str]:
    """The parameters that require gradients: what a user has frozen is not for us to free."""
    return [name for name, p in model.named_parameters() if p.requires_grad]


def plan(model: nn.Module, frozen: Sequence[Collection[str]]) -> None:
    """Remember what is frozen in each phase, and freeze what is so in all of them."""
    model = unwrapped(model)
    trainable = frozenset(map(plain_name, trainable_names(model)))
    phases = tuple(trainable & set(map(plain_name, names)) for names in frozen)
    setattr(model, _PLAN, Plan(trainable, phases))
    _freeze(model, trainable, frozenset.intersection(*phases))


def enter(model: nn.Module, phase: int) -> None:
    """Freeze what is frozen in a phase, counted from 0, and free the rest."""
    model = unwrapped(model)
    known = _plan_of(model)
    if known.now != phase:
        known.now = phase
        _freeze(model, known.trainable, known.frozen[phase])


def number_of_phases(model: nn.Module) -> int:
    """How many phases were planned."""
    return len(_plan_of(unwrapped(model)).frozen)


def release(model: nn.Module) -> None:
    """Free all that was free before the plan, and forget it. Does nothing a second time."""
    model = unwrapped(model)
    if hasattr(model, _PLAN):
        _freeze(model, _plan_of(model).trainable, frozenset())
        delattr(model, _PLAN)


def _plan_of(model: nn.Module) -> Plan:
    known: Any = getattr(model, _PLAN, None)
    if not isinstance(known, Plan):
        raise ValueError(f"this {type(model).__name__} was not prepared: call prepare(run) first")
    return known


def _freeze(model: nn.Module, trainable: frozenset[str], frozen: frozenset[str]) -> None:
    for name, p in model.named_parameters():
        if (plain := plain_name(name)) in trainable:
            p.requires_grad_(plain not in frozen)
            if plain in frozen:
                p.grad = None  # a gradient left over would move it once more
