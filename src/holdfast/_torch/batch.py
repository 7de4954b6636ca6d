"""Batches: move and slice them, split off the labels, run a model on them."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from holdfast._torch.adapters import unwrapped, without_peft

#: How configurations name the coefficient of a router's auxiliary loss.
AUXILIARY = ("router_aux_loss_coef", "aux_loss_coef")


def pad_id_of(model: nn.Module) -> int | None:
    return getattr(getattr(unwrapped(model), "config", None), "pad_token_id", None)


def normalized(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {name: normalized(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple) and any(isinstance(x, Tensor | Mapping) for x in batch):
        return tuple(normalized(value) for value in batch)
    return batch


def batch_length(batch: Any) -> int:
    """The number of samples; taken from the labels, if there are any."""
    if isinstance(batch, Mapping):
        tensors = [v for v in batch.values() if isinstance(v, Tensor) and v.dim() > 0]
        labels = batch.get("labels")
        return len(labels if isinstance(labels, Tensor) else tensors[0])
    if isinstance(batch, tuple | list) and batch and isinstance(batch[-1], Tensor):
        return len(batch[-1])
    return len(batch)


def take(batch: Any, part: slice, size: int) -> Any:
    """Slice a batch of ``size`` samples; values of another length are shared by all samples."""

    def cut(value: Any) -> Any:
        has_length = isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)
        return value[part] if has_length and len(value) == size else value

    return tree_map(cut, batch, is_leaf=lambda value: isinstance(value, list))


def to_device(batch: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def inputs_and_labels(model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    """Split a batch; of a mapping, keep the tensors that the model's forward accepts."""
    if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
        accepted, anything = accepted_names(model)
        inputs = {
            name: value
            for name, value in batch.items()
            if name != "labels" and isinstance(value, Tensor) and (anything or name in accepted)
        }
        return inputs, batch["labels"]
    columns = f"columns {', '.join(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
    raise ValueError(
        "a batch must be a mapping with a tensor of labels or a pair (inputs, labels), got "
        f"{columns}. Pass a collate= that builds such batches, add labels, or pass a function "
        "(model, batch) -> one loss per sample as task="
    )


def sequences(batch: Any, labels: Tensor) -> Tensor:
    """The number of the sequence that each label belongs to, counted over the batch from 0.

    A row is a sequence. Samples that are packed into a row are told apart by their positions, which
    start again at 0.

    Example:
        >>> import torch
        >>> labels = torch.zeros(2, 4)
        >>> sequences({"position_ids": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])}, labels)
        tensor([[0, 0, 1, 1],
                [2, 2, 2, 2]])
    """
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    begins = torch.zeros_like(labels, dtype=torch.bool)
    if isinstance(positions, Tensor) and positions.shape == labels.shape:
        begins = positions == 0
    begins.reshape(len(labels), -1)[:, 0] = True
    return begins.flatten().cumsum(0).reshape(labels.shape) - 1


def accepted_names(model: nn.Module) -> tuple[frozenset[str], bool]:
    """The names of the arguments of a model's forward, and whether it accepts others."""
    forward = without_peft(model).forward  # PEFT's own accepts anything
    return _accepted(getattr(forward, "__func__", forward))


@functools.lru_cache(maxsize=32)
def _accepted(forward: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """The names of a function's arguments, and whether it accepts others; cached because slow."""
    parameters = inspect.signature(forward).parameters
    return frozenset(parameters), any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def logits_of(model: nn.Module, inputs: Any, *, features: bool = False) -> Tensor:
    """Run a model and return its logits; with ``features``, those of a body without a head."""
    return _logits(model, _outputs(model, inputs), features)


def logits_and_auxiliary(model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor | None]:
    """The logits and the model's own auxiliary loss, which balances a router's experts."""
    outputs = _outputs(model, inputs)
    found = getattr(outputs, "aux_loss", None)
    if not isinstance(found, Tensor):
        return _logits(model, outputs), None
    inner: Any = unwrapped(model)
    config: Any = getattr(inner, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for holder in (text, inner):
        for name in AUXILIARY:
            if (strength := getattr(holder, name, None)) is not None:
                return _logits(model, outputs), strength * found
    raise ValueError(
        f"{type(inner).__name__} returns an aux_loss without a coefficient: set "
        "router_aux_loss_coef, or output_router_logits=False, in its configuration"
    )


def _outputs(model: nn.Module, inputs: Any) -> Any:
    return model(**without_cache(model, inputs)) if isinstance(inputs, Mapping) else model(inputs)


def without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a model, which keeps no keys and values of attention for further tokens."""
    return {**inputs, "use_cache": False} if "use_cache" in accepted_names(model)[0] else {**inputs}


def _logits(model: nn.Module, outputs: Any, features: bool = False) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    for name in ("logits", "pooler_output", "last_hidden_state") if features else ("logits",):
        if isinstance(found := getattr(outputs, name, None), Tensor):
            return found
    raise ValueError(f"{type(model).__name__} returns no logits but a {type(outputs).__name__}")


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)  # some modules free what they keep for eval mode
        for module, training in modes:
            module.training = training
