"""Learning rates where neither the plan nor the recipe has one: those of the default recipe.

A comparison must not give one recipe the learning rate that fits the model, and the others a lower
one. So all recipes get the rate that the default recipe would have with the same trainable set.
"""

from dataclasses import replace

import torch

from holdfast.comparison.inputs import check_inputs
from holdfast.comparison.plan import Plan
from holdfast.hosts.job import default_lr
from holdfast.io.encoding import TrainingData
from holdfast.io.models import Loader
from holdfast.recipe import Recipe


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
    loader = Loader(device="cpu", dtype=torch.bfloat16, trust_remote_code=plan.trust_remote_code)
    data = TrainingData.open(plan.model, plan.data, loader, head=plan.head, new=plan.new)
    model, new = data.load()
    rates = {name: default_lr(recipe, model, new) for name, recipe in lacking.items()}
    return replace(plan, rates={**plan.rates, **rates})
