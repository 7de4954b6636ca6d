"""Run a function on the hidden states before the output layer, inside a language model's own call.

The whole model is called, as it is wrapped, so that the hooks of DDP, FSDP2 and ZeRO run. During
the call the output layer has another forward. In the place of logits it returns a 0 that carries
the gradient of the function's result through the rest of the model.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd

from holdfast._torch.adapters import without_peft
from holdfast._torch.batch import logits_and_auxiliary, logits_of, without_cache
from holdfast._torch.dtypes import wide
from holdfast._torch.layout import gathered, is_sharded
from holdfast._torch.lm_head import is_out_of_memory
from holdfast._torch.replace import replaced
from holdfast._torch.rng import preserve_rng

#: Values that go through the model in the place of logits, to see what it does with them: a small
#: one shows a factor, a large one a cap, and the others whether this is all.
_PROBES = (2.0**-20, 2.0**14, 3.0, -7.0)
_FEW = 8  # tokens of the calls in which it is seen


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
        """The parameters that are trained; None if the layer must be called once, for all states.

        That is if tensors are sharded or hidden, or if the layer draws random numbers.
        """
        for module in self.layer.modules():
            is_random = getattr(module, "draws_in_training", isinstance(module, _DropoutNd))
            if is_random and module.training and getattr(module, "p", 1) > 0:
                return None
            for value in vars(module).values():
                if isinstance(value, Tensor) and value.requires_grad:
                    return None
        named = dict(self.layer.named_parameters())
        if any(map(is_sharded, named.values())):
            return None
        return {name: p for name, p in named.items() if p.requires_grad}


Job = Callable[[Tensor, Head | None], Tensor]


def at_head(
    model: nn.Module, inputs: Any, shape: torch.Size, rows: Tensor, job: Job
) -> tuple[Tensor, Tensor | None]:
    """Call a model on inputs of ``shape``, and a job with rows of the hidden states and the head.

    ``rows`` are indices in the flattened batch. The job returns a scalar. This function returns it
    too, and its gradient goes through the output of the model. If a model does not allow that, the
    job gets rows of the logits, and None. The second result is the model's own auxiliary loss.
    """
    tap = None
    if isinstance(inputs, Mapping):
        inputs = without_cache(model, {n: value for n, value in inputs.items() if n != "labels"})
        tap = tap_of(model, inputs)
    if tap is not None and tap.after is not None:
        return tap.run(model, inputs, shape, rows, job)
    logits, auxiliary = logits_and_auxiliary(model, inputs)
    if logits.shape[:-1] != shape:
        raise ValueError(
            "the model must return logits at every position of its input, as causal language "
            f"models do: the input has the shape {tuple(shape)}, the logits {tuple(logits.shape)}"
        )
    if tap is not None:
        tap.is_learned = True
    return job(logits.flatten(0, -2).index_select(0, rows.to(logits.device)), None), auxiliary


class Tap:
    """The other forward of an output layer, and what is known about the model around it.

    There is one per layer, so that a compiled model is compiled only once more.

    Attributes:
        after: what the model does after the layer; None if it is something else.
        follows_body: whether the input of the layer is the last hidden state of ``base_model``.
        is_learned: whether both are known.
    """

    def __init__(self) -> None:
        self.after: After | None = None
        self.follows_body = self.is_learned = False
        self.respond: Callable[[Tensor], Tensor] | None = None
        self.forward = torch.compiler.disable(lambda states: cast(Any, self.respond)(states))

    def head(self, model: nn.Module) -> Head:
        """The model's own output layer, with what comes after."""
        layer = cast(nn.Module, output_layer(model))
        return Head(layer, layer.forward, self.after or After())

    def run(
        self, model: nn.Module, inputs: Any, shape: torch.Size, rows: Tensor, job: Job
    ) -> tuple[Tensor, Tensor | None]:
        """The result of a job in a call of the model, and the model's own auxiliary loss."""
        head = self.head(model)
        found: list[Tensor] = []

        def respond(states: Tensor) -> Tensor:
            if found or is_sharded(states) or states.shape[:-1].numel() != shape.numel():
                raise RuntimeError("the model has used its output layer in another way than before")
            chosen = states.flatten(0, -2).index_select(0, rows.to(states.device))
            found.append(job(chosen, head))
            zero = found[0] - found[0].detach()
            return zero.expand(*states.shape[:-1], 1).contiguous()

        with self.answering(head.layer, respond):
            logits, auxiliary = logits_and_auxiliary(model, inputs)
        if not found:
            raise RuntimeError("the model has not used its output layer, as it did before")
        if not found[0].requires_grad:
            return found[0], auxiliary
        # The gradient of cap · tanh(scale · z / cap) at 0 is scale.
        carried = logits.flatten()[0].to(found[0]) / head.after.scale
        return found[0].detach() + carried, auxiliary

    def learn(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Find out what the model does before and after its output layer, in two small calls."""
        few = {n: _few(x) if isinstance(x, Tensor) else x for n, x in inputs.items()}
        after, head = self._probed(model, few), self.head(model)
        body: Any = getattr(without_peft(model), "base_model", head.layer)
        seen: list[tuple[Tensor, Tensor]] = []
        outputs: list[Any] = []

        def respond(states: Tensor) -> Tensor:
            seen.append((states, head.forward(states)))
            return seen[-1][1]

        watching = body.register_forward_hook(lambda module, given, out: outputs.append(out))
        with watching, self.answering(head.layer, respond):
            logits = logits_of(model, few)
        if after is None or len(seen) != 1 or not _are_close(after(seen[0][1]), logits):
            return
        self.after = after
        states = getattr(outputs[0], "last_hidden_state", None) if len(outputs) == 1 else None
        if isinstance(states, Tensor) and states.shape == seen[0][0].shape:
            self.follows_body = torch.equal(states, seen[0][0])

    def _probed(self, model: nn.Module, few: Mapping[str, Any]) -> After | None:
        """What becomes of numbers in the place of logits; None if this cannot be said."""
        shapes: list[torch.Size] = []

        def respond(states: Tensor) -> Tensor:
            shapes.append(states.shape[:-1])
            probes = states.new_tensor(_PROBES, dtype=wide(states))
            return probes.expand(*shapes[0], -1).contiguous()

        with self.answering(self.head(model).layer, respond):
            logits = logits_of(model, few)
        if len(shapes) != 1 or logits.shape != (*shapes[0], len(_PROBES)):
            return None
        small, large, *others = logits.flatten(0, -2)[0].tolist()
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

    @contextlib.contextmanager
    def answering(self, layer: nn.Module, respond: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Within it, a function responds in the place of the layer's forward."""
        self.respond = respond
        try:
            with replaced(layer, "forward", self.forward):
                yield
        finally:
            self.respond = None


def tap_of(model: nn.Module, inputs: Mapping[str, Any]) -> Tap | None:
    """The tap of a model's output layer; None if there is none. All ranks must call it.

    On first use it learns about the model, from a few of the inputs.
    """
    layer = output_layer(model)
    if layer is None:
        return None
    tap = _TAPS.setdefault(layer, Tap())
    if not tap.is_learned:
        devices = {p.device for p in model.parameters() if p.device.type in ("cuda", "xpu")}
        try:
            with torch.no_grad(), preserve_rng(list(devices)), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tap.learn(model, inputs)
            # Older versions of torch would use the casts that were made without gradients.
            torch.clear_autocast_cache()
            tap.is_learned = tap.after is not None
        except Exception as error:  # a call with the whole logits shows whether the model can run
            if is_out_of_memory(error):
                raise
    return tap


def agree_on_tap(model: nn.Module) -> None:
    """Forget the tap of a model unless all ranks have learned it. All ranks must call it.

    Some ranks may have learned it in work that only they did, such as drawing texts that others
    read. Later, when sharded weights are gathered in each call, all ranks must learn it together.
    """
    layer = output_layer(model)
    tap = _TAPS.get(layer) if layer is not None else None
    if not all(gathered(tap is not None and tap.is_learned)) and tap is not None:
        del _TAPS[cast(nn.Module, layer)]


def divisible_head(model: nn.Module, inputs: Mapping[str, Any]) -> Head | None:
    """The head whose logits can be computed in chunks; None if a job needs all logits at once.

    The model needs no values: what it does after its output layer is judged by shapes alone.
    """
    layer = output_layer(model)
    if layer is None or (head := Head(layer, layer.forward, After())).trained() is None:
        return None
    few = {n: _few(x) if isinstance(x, Tensor) else x for n, x in inputs.items()}
    try:
        with torch.no_grad(), replaced(layer, "forward", lambda states: states[..., :1]):
            return head if logits_of(model, few).shape[-1] == 1 else None
    except Exception:  # code of any model: as in tap_of, the whole logits are used
        return None


def output_layer(model: nn.Module) -> nn.Module | None:
    """The output layer of a language model; None if there is none, or copies of it are used."""
    ask = getattr(without_peft(model), "get_output_embeddings", None)
    layer = ask() if callable(ask) and not isinstance(model, nn.DataParallel) else None
    return layer if isinstance(layer, nn.Module) else None


def _few(x: Tensor) -> Tensor:
    """The first tokens of the first sample."""
    return x[:1, :_FEW] if x.dim() > 1 else x[:1]


def _are_close(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    tolerance = 1e-5 if min(ours.dtype.itemsize, theirs.dtype.itemsize) >= 4 else 1e-2
    ours, theirs = ours.to(theirs.device).float(), theirs.float()
    return bool((ours - theirs).norm() <= tolerance * theirs.norm())


class _Module(nn.Module):
    """A head as a module, without the hooks of its layer."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.layer = head.layer
        self.head = head

    def forward(self, states: Tensor) -> Tensor:
        return self.head(states)


_TAPS: WeakKeyDictionary[nn.Module, Tap] = WeakKeyDictionary()
