"""What ``tune`` searches: a range for each setting that matters, by method.

The ranges are wide enough to hold both ends: hardly any change of the model, and hardly any
protection. The defaults of a recipe are one point of the space, and always the first to be tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast._optim.penalty import SHARE
from holdfast.anneal import Constant
from holdfast.optim import RecAdamUpdate
from holdfast.recipe import Recipe
from holdfast.registry import entry_of, nearest
from holdfast.stages import Method

__all__ = ["ALPHA", "Range", "space_of"]

#: WiSE-FT's share of the tuned weights: not trained for, but tried afterwards.
ALPHA = "merging.alpha"


@dataclass(frozen=True)
class Range:
    """The values that a setting may have.

    Attributes:
        low, high: the ends.
        default: the value without a search.
        log: draw its logarithm.
    """

    low: float
    high: float
    default: float
    log: bool = True

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"a range must go up, from above 0: got {self.low:g} to {self.high:g}")

    def suggest(self, trial: Any, name: str) -> float:
        """A value for an Optuna trial; whole numbers where the default is one."""
        if isinstance(self.default, int):
            return int(trial.suggest_int(name, int(self.low), int(self.high), log=self.log))
        return float(trial.suggest_float(name, self.low, self.high, log=self.log))


def space_of(
    recipe: Recipe, lr: float, tau: float | None, given: Mapping[str, Sequence[float]]
) -> dict[str, Range]:
    """The settings of a recipe to search, by dotted name.

    Args:
        recipe: whose methods' settings they are.
        lr: the learning rate to search around.
        tau: FLOW's τ without a search, the median loss; None if it is not needed.
        given: the user's own ranges, ``{"update.pull": [0.01, 0.5]}``; they come instead of ours.
    """
    space = {"lr": Range(lr / 10, lr * 3, lr)}
    for stage, method in recipe:
        for name, range_ in _ranges(method, lr, tau).items():
            value = getattr(method, name)
            default = range_.default if value is None or isinstance(value, str) else value
            space[f"{stage}.{name}"] = replace(
                range_, low=min(range_.low, default or range_.low), default=default,
                high=max(range_.high, default),
            )  # fmt: skip
    for name, ends in given.items():
        if name not in space:
            raise ValueError(
                f"{recipe.name} has no setting {name!r} to search{nearest(name, list(space))}"
            )
        if len(ends) != 2:
            raise ValueError(f"{name} needs two ends, such as [0.01, 0.5], got {list(ends)}")
        old = space[name]
        default = type(old.default)(min(max(old.default, ends[0]), ends[1]))
        space[name] = replace(old, low=ends[0], high=ends[1], default=default)
    return space


def _ranges(method: Method, lr: float, tau: float | None) -> dict[str, Range]:
    name = entry_of(method).name
    if isinstance(method, RecAdamUpdate):  # γ = pull / lr; t0 and 1/k as fractions of the run
        pull, gamma = Range(0.003, 1.0, 0.1), Range(0.003 / lr, 1.0 / lr, 0.1 / lr)
        strength = {"pull": pull} if method.gamma is None else {"gamma": gamma}
        if method.anneal is not None:  # instead of t0 and width; λ = 1 leaves no pull either
            return {} if method.anneal == Constant(1.0) else strength
        shift = {
            "t0": Range(0.0, 0.9, RecAdamUpdate.t0, log=False),
            "width": Range(0.005, 1.0, RecAdamUpdate.width),
        }
        return {**strength, **shift}
    if name == "flow" and tau is not None:
        return {"tau": Range(tau / 5, tau * 5, tau)}
    if name in ("l2-sp", "ewc", "mas"):  # what an update goes of its way back: 0.3 % to 30 %
        return {"strength": Range(0.003 / lr, 0.3 / lr, SHARE / lr)}
    return {
        "mofo": {"fraction": Range(0.01, 0.8, 0.15)},
        "lora": {"r": Range(1, 128, 16)},
        "distill": {"strength": Range(0.03, 30.0, 1.0)},
        "mixout": {"p": Range(0.1, 0.95, 0.7, log=False)},
        "sfa": {"weight": Range(0.05, 0.95, 0.5, log=False)},
        "wise-ft": {"alpha": Range(0.05, 1.0, 0.5, log=False)},
    }.get(name, {})
