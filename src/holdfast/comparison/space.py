"""The search space of ``tune``: the ranges of all methods of a recipe, and the user's own.

The ranges are wide enough to hold both ends: hardly any change of the model, and hardly any
protection. The defaults of a recipe are one point of the space, and always the first to be tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast._torch.checks import did_you_mean
from holdfast.recipe import Recipe
from holdfast.stages import MedianLoss, SearchRange, SearchSpace

__all__ = ["ALPHA", "space_of", "suggest"]

#: WiSE-FT's share of the tuned weights: not trained for, but tried afterwards.
ALPHA = "merging.alpha"


def suggest(range_: SearchRange, trial: Any, name: str) -> float:
    """Draw a value for an Optuna trial; an integer if the default is one."""
    if isinstance(range_.default, int):
        return int(trial.suggest_int(name, int(range_.low), int(range_.high), log=range_.log))
    return float(trial.suggest_float(name, range_.low, range_.high, log=range_.log))


def space_of(
    recipe: Recipe, lr: float, median_loss: MedianLoss, given: Mapping[str, Sequence[float]]
) -> SearchSpace:
    """The settings of a recipe to search, by dotted name.

    Args:
        recipe: whose methods' settings they are.
        lr: the learning rate to search around.
        median_loss: as for :meth:`holdfast.stages.Method.search_space`.
        given: the user's own ranges, ``{"update.pull": [0.01, 0.5]}``; they come instead of ours.
    """
    space = {"lr": SearchRange(lr / 10, lr * 3, lr)}
    for stage, method in recipe:
        for name, range_ in method.search_space(lr, median_loss).items():
            value = getattr(method, name)
            default = range_.default if value is None or isinstance(value, str) else value
            space[f"{stage}.{name}"] = replace(
                range_, low=min(range_.low, default or range_.low), default=default,
                high=max(range_.high, default),
            )  # fmt: skip
    for name, ends in given.items():
        if name not in space:
            raise ValueError(
                f"{recipe.name} has no setting {name!r} to search{did_you_mean(name, list(space))}"
            )
        if len(ends) != 2:
            raise ValueError(f"{name} needs two ends, such as [0.01, 0.5], got {list(ends)}")
        old = space[name]
        default = type(old.default)(min(max(old.default, ends[0]), ends[1]))
        space[name] = replace(old, low=ends[0], high=ends[1], default=default)
    return space
