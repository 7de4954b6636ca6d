"""The pretrained model during training: the same model without its adapters, or a frozen copy."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from holdfast._torch.adapters import adapters_are_removable, adapters_off, unwrapped
from holdfast._torch.batch import evaluating, logits_of
from holdfast.stages import Cost, Planned, Run

Outputs = Callable[[nn.Module, Any], Any]  # a model, inputs → its outputs
BaseModel = Callable[[nn.Module, Any], Any]  # the model in training, inputs → z*


def base_model_of(run: Run, outputs: Outputs = logits_of) -> BaseModel:
    """Return a function that computes the outputs of the pretrained model in training."""
    removable = run.recipe.trainable.keeps_base or adapters_are_removable(run.model)
    return partial(adapters_off_base, outputs=outputs) if removable else Frozen(run.model, outputs)


def base_model_cost(planned: Planned) -> Cost:
    """The pretrained model predicts the samples of every update."""
    copies = 0 if planned.keeps_base else 1
    return Cost(copies=copies, predicted=planned.samples * planned.length)


class Frozen:
    """A frozen copy of the model at the start of training."""

    def __init__(self, model: nn.Module, outputs: Outputs = logits_of) -> None:
        self.outputs = outputs
        self.model = copy.deepcopy(unwrapped(model)).eval().requires_grad_(False)
        for module in self.model.modules():
            if not hasattr(module, "_hf_hook"):  # Accelerate uses it to place parts on devices
                # A forward that a host has set on the object may call the original model.
                vars(module).pop("forward", None)

    def __call__(self, model: nn.Module, inputs: Any) -> Any:
        first = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs
        if next(self.model.parameters()).device != first.device:
            self.model.to(first.device)  # a host has moved the model
        return self.outputs(self.model, inputs)


def adapters_off_base(model: nn.Module, inputs: Any, outputs: Outputs = logits_of) -> Any:
    """z* of a model with adapters: its outputs with the adapters off."""
    inner = unwrapped(model)  # no gradients, so DDP is not needed
    with adapters_off(inner), evaluating(inner):
        return outputs(inner, inputs)


def precision(model: nn.Module, autocast: torch.dtype | None) -> AbstractContextManager[object]:
    """The precision of the training, in which predictions of the pretrained model are made."""
    if autocast is None:
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, autocast)
