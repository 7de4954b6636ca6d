"""Keep parts of a model in eval mode, even after ``model.train()``.

Frozen weights are not enough: in training mode BatchNorm updates its statistics, and dropout acts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class StayInEval:
    """A forward pre-hook. Unlike an overridden ``train()``, it can be copied and pickled."""

    names: frozenset[str]

    def __call__(self, model: nn.Module, _: Any) -> None:
        """Put the modules with these names into eval mode."""
        for name, module in model.named_modules():
            if module.training and name in self.names:
                module.training = False


def stay_in_eval(model: nn.Module, names: Iterable[str]) -> None:
    """Keep the modules with these names in eval mode, but not their children."""
    model.register_forward_pre_hook(StayInEval(frozenset(names)))


def leave_eval(model: nn.Module) -> None:
    """Undo :func:`stay_in_eval`."""
    hooks = model._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, StayInEval)]:
        del hooks[key]


def held_in_eval(model: nn.Module) -> set[nn.Module]:
    """The modules that are kept in eval mode."""
    held: set[nn.Module] = set()
    for part in model.modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, StayInEval):
                held |= {m for name, m in part.named_modules() if name in hook.names}
    return held
