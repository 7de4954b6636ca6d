"""One batch and a model: move it, cut it, part its labels from its inputs, run the model on it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def inputs_and_labels(model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    """Part a batch; of a mapping only those tensors that the model's forward takes."""
    if isinstance(batch, tuple) and len(batch) == 2:
        return batch
    if isinstance(batch, dict) and "labels" in batch:
        accepted = inspect.signature(model.forward).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        inputs = {
            name: value
            for name, value in batch.items()
            if name != "labels" and isinstance(value, Tensor) and (anything or name in accepted)
        }
        return inputs, batch["labels"]
    columns = f"columns {', '.join(batch)}" if isinstance(batch, dict) else type(batch).__name__
    raise ValueError(
        f"a batch must be a mapping with labels or a pair (inputs, labels), got {columns}. Add "
        "labels, or pass task= a function (model, batch) -> one loss a sample"
    )


def logits_of(model: nn.Module, inputs: Any) -> Tensor:
    """Run a model on inputs and return its logits, or whatever tensor it returns."""
    outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def to_device(batch: Any, device: torch.device) -> Any:
    """All tensors of a batch on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return tuple(to_device(value, device) for value in batch)
    return batch


def take(batch: Any, part: slice) -> Any:
    """Some rows of a batch."""
    if isinstance(batch, Mapping):
        return {name: take(value, part) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(take(value, part) for value in batch)
    return batch[part]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; afterwards every module is in the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
