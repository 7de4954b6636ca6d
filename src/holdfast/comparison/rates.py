"""Learning rates where neither the plan nor the recipe has one: those of the default recipe.

A comparison must not give one recipe the learning rate that fits the model, and the others a lower
one. So all recipes get the rate that the default recipe would have with the same trainable set.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from holdfast.comparison.inputs import check_inputs
from holdfast.comparison.plan import Plan
from holdfast.hosts.job import DEFAULT_LR
from holdfast.io.encoding import TrainingData
from holdfast.io.models import Loader
from holdfast.recipe import DEFAULT_RECIPE, Recipe
from holdfast.run import resolved


def with_rates(plan: Plan) -> Plan:
    """The plan with a learning rate for every recipe; reads the model if one has none."""
    lacking = {
        spec.recipe: Recipe.from_dict(spec.settings)
        for spec in plan.runs
        if spec.training.lr is None and spec.settings["update"]["lr"] is None
    }
    if not lacking:
        return plan
    check_inputs(plan)
    # Only the names and sizes of the weights are used; the worker processes need the GPU.
    loader = Loader(device="cpu", dtype=torch.bfloat16)
    data = TrainingData.open(plan.model, plan.data, loader, head=plan.head, new=plan.new)
    model, new = data.load()
    rates = {name: default_lr(recipe, model, new) for name, recipe in lacking.items()}
    return replace(plan, rates={**plan.rates, **rates})


def default_lr(recipe: Recipe, model: nn.Module, new: Sequence[str]) -> float:
    """The learning rate that the default recipe would have with the trainable set of a recipe.

    2e-5 if it has none for the model, such as a model of an unknown kind.
    """
    # Without the settings of stage 1: they may not fit what the default recipe adds.
    default = replace(Recipe.preset(DEFAULT_RECIPE), trainable=type(recipe.trainable)())
    with _quiet():
        return resolved(default, model, default_lr=DEFAULT_LR, new=new)[1]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing: the default recipe is not the one that is trained."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
