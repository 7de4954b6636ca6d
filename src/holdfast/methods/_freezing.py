"""Freeze parts of a model: their weights, phase by phase, and their mode.

Phases and mode are attributes of the model: methods stay plain settings, and a copied or unpickled
model keeps them.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast._torch.adapters import unwrapped
from holdfast._torch.names import plain_name
from holdfast.stages import Trainable

_PHASES = "_holdfast_phases"


@dataclass
class Phases:
    """Names of the parameters that required gradients before, and of the frozen ones per phase."""

    trainable: frozenset[str]
    frozen: tuple[frozenset[str], ...]
    now: int | None = None


class Freezing(Trainable):
    """A method that freezes parts of the model until training is finished."""

    def finish(self, model: nn.Module) -> nn.Module:
        inner = unwrapped(model)
        if hasattr(inner, _PHASES):
            _freeze(inner, frozenset())
            delattr(inner, _PHASES)
        leave_eval(model)
        return model


def trainable_names(model: nn.Module) -> list[str]:
    """The parameters that require gradients; those that the user has frozen stay frozen."""
    return [name for name, p in model.named_parameters() if p.requires_grad]


def set_phases(model: nn.Module, frozen: Sequence[Collection[str]]) -> None:
    """Store the frozen parameters of each phase, and freeze those that are frozen in all."""
    model = unwrapped(model)
    trainable = frozenset(map(plain_name, trainable_names(model)))
    phases = tuple(trainable & set(map(plain_name, names)) for names in frozen)
    setattr(model, _PHASES, Phases(trainable, phases))
    _freeze(model, frozenset.intersection(*phases))


def enter(model: nn.Module, phase: int) -> None:
    """Freeze the parameters of a phase, counted from 0, and unfreeze the others."""
    phases = _phases_of(model)
    if phases.now != phase:
        phases.now = phase
        _freeze(model, phases.frozen[phase])


def phase_count(model: nn.Module) -> int:
    return len(_phases_of(model).frozen)


def _phases_of(model: nn.Module) -> Phases:
    phases: Any = getattr(unwrapped(model), _PHASES, None)
    if not isinstance(phases, Phases):
        raise ValueError(f"this {type(model).__name__} was not prepared: call prepare(run) first")
    return phases


def _freeze(model: nn.Module, frozen: frozenset[str]) -> None:
    trainable = _phases_of(model).trainable
    for name, p in unwrapped(model).named_parameters():
        if (plain := plain_name(name)) in trainable:
            p.requires_grad_(plain not in frozen)
            if plain in frozen:
                p.grad = None  # a remaining gradient would move it once more


@dataclass(frozen=True)
class StayInEval:
    """A forward pre-hook that keeps modules in eval mode, even after ``model.train()``.

    Frozen weights are not enough: in training mode BatchNorm updates its statistics, and dropout
    acts. Unlike an overridden ``train()``, a hook can be copied and pickled.
    """

    names: frozenset[str]

    def __call__(self, model: nn.Module, _: Any) -> None:
        """Put the modules with these names into eval mode, but not their children."""
        for name, module in model.named_modules():
            if module.training and name in self.names:
                module.training = False


def stay_in_eval(model: nn.Module, names: Iterable[str]) -> None:
    model.register_forward_pre_hook(StayInEval(frozenset(names)))


def leave_eval(model: nn.Module) -> None:
    """Undo :func:`stay_in_eval`."""
    hooks = model._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, StayInEval)]:
        del hooks[key]


def held_in_eval(model: nn.Module) -> set[nn.Module]:
    held: set[nn.Module] = set()
    for part in model.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, StayInEval):
                held |= {m for name, m in part.named_modules() if name in hook.names}
    return held
