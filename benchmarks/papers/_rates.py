"""The learning rate of a plan, whatever is trained."""

from __future__ import annotations

from typing import Any

from torch import nn

from holdfast import Recipe
from holdfast.run import resolved


def learning_rate(
    recipe: Recipe, model: nn.Module, lr: float | None, times: float | None, **given: Any
) -> float | None:
    """What a run gets: ``lr``, or a multiple of the recipe's default; None is the default itself.

    Args:
        lr: the learning rate, if ``times`` is None.
        times: a multiple of the recipe's default learning rate.
        given: what :class:`~holdfast.run.Run` gets of ``new``, ``task`` and ``size``, which the
            default may depend on.
    """
    if times is None:
        return lr
    if lr is not None:
        raise ValueError(f"a plan has lr {lr:g} and times {times:g}: give one of them")
    return times * resolved(recipe, model, **given)[1]
