"""What a plan leaves to the model: learning rates, and recipes that depend on the model.

A comparison must not give one recipe the learning rate that fits the model, and the others a lower
one. So where neither the plan nor the recipe has one, all recipes get the rate that the default
recipe would have with the same trainable set.
"""

from dataclasses import replace

import torch

from holdfast.comparison.inputs import check_inputs, training_data
from holdfast.comparison.plan import Plan
from holdfast.hosts.job import default_lr, resolved_quietly
from holdfast.io import codec as _codec
from holdfast.io.models import Loader
from holdfast.recipe import Recipe


def with_rates(plan: Plan) -> Plan:
    """The plan with a learning rate for every recipe, and with all recipes resolved.

    Reads the model if it is needed for this.
    """
    recipes = {spec.recipe: Recipe.from_dict(spec.settings) for spec in plan.runs}
    lacking = {
        spec.recipe: recipes[spec.recipe]
        for spec in plan.runs
        if spec.training.lr is None and spec.settings["update"]["lr"] is None
    }
    if len({spec.training.extent for spec in plan.runs}) > 1:
        lacking = {}  # the rate depends on it: each run chooses its own
    open_ones = {
        name: recipe
        for name, recipe in recipes.items()
        if recipe.recall.depends_on_model and name not in plan.resolved
    }
    if not lacking and not open_ones:
        return plan
    size = plan.runs[0].training.size_on(check_inputs(plan))
    # Only the names and sizes of the weights are used; the worker processes need the GPU.
    loader = Loader(device="cpu", dtype=torch.bfloat16, trust_remote_code=plan.trust_remote_code)
    model, new = training_data(plan, loader).load()
    rates = {name: default_lr(recipe, model, new, size) for name, recipe in lacking.items()}
    found = {
        name: _codec.encode(resolved_quietly(recipe, model, new)[0].to_dict())
        for name, recipe in open_ones.items()
    }
    return replace(plan, rates={**plan.rates, **rates}, resolved={**plan.resolved, **found})
