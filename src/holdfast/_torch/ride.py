"""Append rows to the batch of a language model's own call, and take their hidden states out again.

On a GPU a small model waits for kernel launches, so that a few more rows cost much less time than a
call of their own. They cost memory: all rows are padded to the same width. Two hooks on the body,
the part below the output layer, append the rows and take them out again: all that comes after the
body, such as the loss, sees only the rows of the caller.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.adapters import without_peft
from holdfast._torch.batch import AUXILIARY
from holdfast._torch.head_tap import Head, Job, tap_of
from holdfast._torch.layout import all_agree, is_sharded

_PADDING = 0.1  # the most padding on a CPU, as a share of the tokens of both batches
#: The most weights × tokens per tensor of weights on a GPU. A forward and a backward pass launch
#: kernels for about .3 ms per tensor, in which a GPU computes so many at 4e14 operations a second.
_WAITING = 2e10
_OTHER_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


@contextlib.contextmanager
def riding(
    model: nn.Module, inputs: Mapping[str, Tensor], rows: Tensor, job: Job
) -> Iterator[Callable[[], Tensor | None]]:
    """Within it, the first call of the model with gradients takes further rows along, if it can.

    Args:
        model: a causal language model, wrapped or not.
        inputs: ``input_ids`` and ``attention_mask`` of the further rows, padded on the right.
        rows: indices in the flattened inputs.
        job: is called with these rows of the hidden states and the head, and returns a scalar.

    Yields:
        A function that returns the scalar, or None if the rows were not taken along. It ends the
        ride: calls after it are ordinary ones.
    """
    tap = tap_of(model, inputs)
    body: Any = getattr(without_peft(model), "base_model", None)
    if tap is None or tap.after is None or not tap.follows_body or _is_compiled(model, body):
        yield lambda: None
        return
    ride = _Ride(model, tap.head(model), inputs, rows, job)
    with (
        body.register_forward_pre_hook(ride.before, with_kwargs=True),
        body.register_forward_hook(ride.after, prepend=True),  # other hooks see the caller's rows
    ):
        yield ride.end


@dataclass
class _Ride:
    model: nn.Module
    head: Head
    inputs: Mapping[str, Tensor]
    rows: Tensor
    job: Job
    is_over: bool = False
    shape: torch.Size | None = None  # of the caller's batch, while the call runs
    found: Tensor | None = None

    def end(self) -> Tensor | None:
        self.is_over = True
        return self.found

    def before(self, body: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        if self.is_over or not torch.is_grad_enabled():
            return None
        self.is_over = True
        given = {"input_ids": args[0], **given} if len(args) == 1 else given
        is_possible = len(args) < 2 and self._fits(given) and self._pays(given["input_ids"])
        # The ranks call the model equally often: sharded weights are gathered in each call.
        if not all_agree(is_possible, self.inputs["input_ids"].device):
            return None
        ids = given["input_ids"]
        mask = given.get("attention_mask")
        self.shape = ids.shape
        ours = ids, torch.ones_like(ids) if mask is None else mask
        names = ("input_ids", "attention_mask")
        stacked = {n: _stacked(x, self.inputs[n]) for n, x in zip(names, ours, strict=True)}
        return (), given | stacked

    def after(self, body: nn.Module, args: Any, outputs: Any) -> Any:
        if self.shape is None:
            return None
        (size, length), self.shape = self.shape, None
        states = outputs.last_hidden_state
        chosen = states[size:, : self.inputs["input_ids"].shape[1]].flatten(0, 1)
        self.found = self.job(chosen.index_select(0, self.rows.to(states.device)), self.head)
        outputs.last_hidden_state = states[:size, :length]
        return outputs

    def _fits(self, given: dict[str, Any]) -> bool:
        """Whether nothing but token ids and their mask depends on the rows of the batch."""
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not _is_whole(self.head.layer):
            return False
        if mask is not None and getattr(mask, "shape", None) != ids.shape:
            return False
        others = [x for name, x in given.items() if name not in ("input_ids", "attention_mask")]
        if not all(
            x is None or isinstance(x, bool | int | float | str) or _is_scalar(x) for x in others
        ):
            return False
        config: Any = without_peft(self.model).config.get_text_config()
        asked = [
            getattr(config, n, None) if given.get(n) is None else given[n] for n in _OTHER_OUTPUTS
        ]
        return not any(asked) and not any(hasattr(config, name) for name in AUXILIARY)

    def _pays(self, ids: Tensor) -> bool:
        """Whether a call of their own would take longer."""
        one, other = ids.shape, self.inputs["input_ids"].shape
        padded = (one[0] + other[0]) * max(one[1], other[1])
        if ids.device.type == "cpu":
            return padded <= (1 + _PADDING) * (one.numel() + other.numel())
        weights = [p.numel() for p in self.model.parameters()]
        return padded * sum(weights) <= _WAITING * len(weights)


def _stacked(one: Tensor, other: Tensor) -> Tensor:
    width = max(one.shape[1], other.shape[1])
    return torch.cat([F.pad(x.to(one), (0, width - x.shape[1])) for x in (one, other)])


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _is_whole(layer: nn.Module) -> bool:
    """Whether a layer has its weights now; FSDP2 and ZeRO-3 may gather them when it is called."""
    return not any(is_sharded(p) or hasattr(p, "ds_id") for p in layer.parameters())


def _is_compiled(model: nn.Module, body: Any) -> bool:
    """Whether the call of the body is part of a compiled graph, in which new hooks do not run."""
    for module in model.modules():  # those around the body come before it
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            return True
        if module is body:
            break
    return False
