"""Runs in phases, with different frozen parameters in each phase.

The plan is an attribute of the model: methods stay plain settings, and a copied or unpickled model
keeps its plan.
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
    """Names of the parameters that required gradients before, and of the frozen ones per phase."""

    trainable: frozenset[str]
    frozen: tuple[frozenset[str], ...]
    now: int | None = None


def trainable_names(model: nn.Module) -> list[str]:
    """The parameters that require gradients; those that the user has frozen stay frozen."""
    return [name for name, p in model.named_parameters() if p.requires_grad]


def plan(model: nn.Module, frozen: Sequence[Collection[str]]) -> None:
    """Store the frozen parameters of each phase, and freeze those that are frozen in all."""
    model = unwrapped(model)
    trainable = frozenset(map(plain_name, trainable_names(model)))
    phases = tuple(trainable & set(map(plain_name, names)) for names in frozen)
    setattr(model, _PLAN, Plan(trainable, phases))
    _freeze(model, trainable, frozenset.intersection(*phases))


def enter(model: nn.Module, phase: int) -> None:
    """Freeze the parameters of a phase, counted from 0, and unfreeze the others."""
    model = unwrapped(model)
    known = _plan_of(model)
    if known.now != phase:
        known.now = phase
        _freeze(model, known.trainable, known.frozen[phase])


def number_of_phases(model: nn.Module) -> int:
    """The number of planned phases."""
    return len(_plan_of(unwrapped(model)).frozen)


def unfreeze(model: nn.Module) -> None:
    """Remove the plan and undo its freezing. Does nothing without a plan."""
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
                p.grad = None  # a remaining gradient would move it once more
