"""Random initialisation: the RI start of the RecAdam paper.

The model starts from random weights and is pulled to the pretrained ones while λ is small, which
lets it explore; the pretrained weights serve as anchors only (https://arxiv.org/abs/2004.12651).
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from holdfast._names import shorten

__all__ = ["random_init"]

ModelT = TypeVar("ModelT", bound=nn.Module)


def random_init(model: ModelT, *, seed: int | None = None) -> ModelT:
    """Initialise all of a model's weights anew, in place, with the model's own initialiser.

    Take the anchors first: ``Reference.of(model)``, or the pretrained files.

    Args:
        model: a transformers model, or a module whose layers have ``reset_parameters()``.
        seed: makes the new weights reproducible without touching torch's global generators.

    Returns:
        The same model.

    Example:
        >>> import torch, holdfast
        >>> model = torch.nn.Linear(4, 2)
        >>> anchors = holdfast.Reference.of(model)
        >>> _ = holdfast.random_init(model, seed=0)
        >>> optimizer = holdfast.RecAdam(model.named_parameters(), anchors=anchors)
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices), enabled=seed is not None), torch.no_grad():
        if seed is not None:
            torch.manual_seed(seed)
        if hasattr(model, "_init_weights") and hasattr(model, "init_weights"):
            _init_transformers(model)
        else:
            _reset_parameters(model)
    return model


def _init_transformers(model: Any) -> None:
    # from_pretrained marks modules and tensors as initialised, and init_weights() passes over
    # what is marked: without this it would change nothing.
    tensors = [*model.parameters(), *model.buffers()]
    for marked in [*model.modules(), *tensors]:
        if hasattr(marked, "_is_hf_initialized"):
            del marked._is_hf_initialized
    model.init_weights()


def _reset_parameters(model: nn.Module) -> None:
    covered: set[int] = set()
    resets = []
    # Parents come before children, so that a layer that has an initialiser has the last word.
    for module in model.modules():
        # nn.MultiheadAttention spells it with an underscore.
        reset = getattr(module, "reset_parameters", None) or getattr(
            module, "_reset_parameters", None
        )
        if callable(reset):
            resets.append(reset)
            covered.update(id(p) for p in module.parameters(recurse=False))
            if isinstance(module, nn.MultiheadAttention):
                covered.update(id(p) for p in module.parameters())
    missed = [name for name, p in model.named_parameters() if id(p) not in covered]
    if missed:
        raise ValueError(
            "no initialiser is known for these parameters (their modules have no "
            f"reset_parameters()): {shorten(missed)}. Give the module that owns them one."
        )
    for reset in resets:
        reset()
