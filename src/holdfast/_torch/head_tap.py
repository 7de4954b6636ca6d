"""Run a function on the hidden states before the output layer, inside a language model's own call.

The whole model is called, as it is wrapped, so that the hooks of DDP, FSDP2 and ZeRO run. During
the call the output layer has another forward. In the place of logits it returns a 0 that carries
the gradient of the function's result through the rest of the model.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from holdfast._torch.adapters import without_peft
from holdfast._torch.batch import accepted_names, logits_of
from holdfast._torch.layout import is_sharded
from holdfast._torch.lm_head import is_out_of_memory
from holdfast._torch.rng import rewind_to_here

#: Values that go through the model in the place of logits, to see what it does with them: a small
#: one shows a factor, a large one a cap, and the others whether this is all.
_PROBES = (2.0**-20, 2.0**14, 3.0, -7.0)


@dataclass(frozen=True)
class After:
    """cap · tanh(scale · z / cap): what a model does with the output z of its output layer."""

    scale: float = 1.0
    cap: float = math.inf

    def __call__(self, z: Tensor) -> Tensor:
        z = z if self.scale == 1 else z * self.scale
        return z if self.cap == math.inf else self.cap * torch.tanh(z / self.cap)


@dataclass(frozen=True)
class Head:
    """Maps hidden states to logits: an output layer with its own forward, and what comes after."""

    layer: nn.Module
    forward: Callable[[Tensor], Tensor]
    after: After

    def __call__(self, states: Tensor) -> Tensor:
        return self.after(self.forward(states))

    def call(self, parameters: Mapping[str, Tensor], states: Tensor) -> Tensor:
        """The logits with other tensors as parameters of the layer."""
        if not parameters:
            return self(states)
        named = {f"layer.{name}": p for name, p in parameters.items()}
        return cast(Tensor, functional_call(_Module(self), named, (states,)))

    @property
    def vocabulary(self) -> int:
        """The number of logits per position; a guess where the layer does not say it."""
        return getattr(self.layer, "out_features", 1 << 16)

    def trained(self) -> dict[str, Tensor] | None:
        """The parameters that are trained; None if there are sharded tensors or hidden ones."""
        for module in self.layer.modules():
            for value in vars(module).values():
                if isinstance(value, Tensor) and value.requires_grad:
                    return None
        named = dict(self.layer.named_parameters())
        if any(map(is_sharded, named.values())):
            return None
        return {name: p for name, p in named.items() if p.requires_grad}


Job = Callable[[Tensor, Head | None], Tensor]


def at_head(
    model: nn.Module, inputs: Mapping[str, Any], shape: torch.Size, rows: Tensor, job: Job
) -> Tensor:
    """Call a model on inputs of ``shape``, and a job with rows of the hidden states and the head.

    ``rows`` are indices in the flattened batch. The job returns a scalar. This function returns it
    too, and its gradient goes through the output of the model. If a model does not allow that, the
    job gets rows of the logits, and None.
    """
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    if "use_cache" in accepted_names(model)[0]:
        inputs["use_cache"] = False
    tap = _tap_of(model)
    for _ in range(2):  # the first call may show what the model does after its head
        if tap is not None and tap.after is not None:
            found = tap.run(model, inputs, shape, rows, job)
            if found is not None:
                return found
    logits = logits_of(model, inputs)
    if logits.shape[:-1] != shape:
        raise ValueError(
            "the model must return logits at every position of its input, as causal language "
            f"models do: the input has the shape {tuple(shape)}, the logits {tuple(logits.shape)}"
        )
    if tap is not None and not tap.is_checked:
        tap.after = None
    return job(logits.flatten(0, -2).index_select(0, rows.to(logits.device)), None)


class _Tap:
    """The other forward of an output layer.

    There is one per layer, so that a compiled model is compiled only once more.

    Attributes:
        after: what the model does after the layer; None if it is something else.
        is_checked: whether a call has confirmed it.
    """

    def __init__(self) -> None:
        self.after: After | None = After()
        self.is_checked = False
        self.call: _Call | None = None
        self.forward = torch.compiler.disable(lambda states: cast(_Call, self.call).forward(states))

    def run(
        self, model: nn.Module, inputs: Any, shape: torch.Size, rows: Tensor, job: Job
    ) -> Tensor | None:
        """The result of a job; None if the model does not allow it, as far as is known."""
        layer = cast(nn.Module, _output_layer(model))
        call = _Call(Head(layer, layer.forward, self.after or After()), shape, rows, job)
        rewind = None if self.is_checked else rewind_to_here(_device_of(model))
        try:
            with self.replaced(call):
                logits = logits_of(model, inputs)
        except Exception as error:
            if rewind is None or call.is_in_job or is_out_of_memory(error):
                raise
            rewind()  # and let a call with the whole logits show whether the model can run
            return None
        if rewind is not None:
            after, self.after = self.after, call.seen(logits)
            self.is_checked = self.after is not None and self.after == after
            if not self.is_checked:
                rewind()
                return None
        return call.result(logits)

    @contextlib.contextmanager
    def replaced(self, call: "_Call") -> Iterator[None]:
        layer: Any = call.head.layer
        before = vars(layer).get("forward")
        self.call, layer.forward = call, self.forward
        try:
            yield
        finally:
            self.call = None
            del layer.forward
            if before is not None:
                layer.forward = before


@dataclass
class _Call:
    """One call of a model with another forward in its output layer."""

    head: Head
    shape: torch.Size
    rows: Tensor
    job: Job
    found: list[Tensor | None] = field(default_factory=list)
    is_in_job: bool = False

    def forward(self, states: Tensor) -> Tensor:
        if self.found or is_sharded(states) or states.shape[:-1].numel() != self.shape.numel():
            self.found.append(None)
            return self.head.forward(states)
        self.is_in_job = True
        chosen = states.flatten(0, -2).index_select(0, self.rows.to(states.device))
        found = self.job(chosen, self.head)
        self.is_in_job = False
        self.found.append(found)
        zero = found - found.detach()
        values = torch.cat([zero.view(1), found.new_tensor(_PROBES)])
        return values.expand(*states.shape[:-1], -1).contiguous()

    def seen(self, logits: Tensor) -> After | None:
        """What the model has done with the output of its head; None if this cannot be said."""
        if not self.has_worked or logits.shape != (*self.shape, 1 + len(_PROBES)):
            return None
        small, large, *others = logits.detach().flatten(0, -2)[0, 1:].tolist()
        scale, cap = small / _PROBES[0], math.inf
        if not math.isclose(large, scale * _PROBES[1], rel_tol=1e-5):
            cap = large
        after = After(scale, cap)
        expected = after(torch.tensor(_PROBES[2:], dtype=torch.float64)).tolist()
        is_all = all(
            math.isclose(*pair, rel_tol=1e-5) for pair in zip(others, expected, strict=True)
        )
        is_exact = logits.dtype.itemsize >= 4 or after == After()
        return after if scale > 0 and is_all and is_exact else None

    @property
    def has_worked(self) -> bool:
        """Whether the model has used its output layer once, at every position."""
        return len(self.found) == 1 and self.found[0] is not None

    def result(self, logits: Tensor) -> Tensor:
        if not self.has_worked:
            raise RuntimeError("the model has used its output layer in another way than before")
        found = cast(Tensor, self.found[0])
        if not found.requires_grad:
            return found
        # The gradient of cap · tanh(scale · z / cap) at 0 is scale.
        carried = logits.flatten()[0].to(found) / self.head.after.scale
        return found.detach() + carried


def _tap_of(model: nn.Module) -> _Tap | None:
    layer = _output_layer(model)
    return None if layer is None else _TAPS.setdefault(layer, _Tap())


def _output_layer(model: nn.Module) -> nn.Module | None:
    """The output layer of a language model; None if there is none, or copies of it are used."""
    ask = getattr(without_peft(model), "get_output_embeddings", None)
    layer = ask() if callable(ask) and not isinstance(model, nn.DataParallel) else None
    return layer if isinstance(layer, nn.Module) else None


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class _Module(nn.Module):
    """A head as a module, without the hooks of its layer."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.layer = head.layer
        self.head = head

    def forward(self, states: Tensor) -> Tensor:
        return self.head(states)


_TAPS: WeakKeyDictionary[nn.Module, _Tap] = WeakKeyDictionary()
