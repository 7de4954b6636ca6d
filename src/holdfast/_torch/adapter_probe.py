"""What the adapters of a layer do, measured on the layer: PEFT has dozens of kinds of adapters.

Their parameters have no common meaning, but three facts are enough to pull and to merge them:

- whether a new adapter is the identity: the layer computes the same with and without it;
- its *pulled* parameters: those that change the layer if they move alone. The others, such as
  LoRA's A while B = 0, have no effect by themselves;
- whether the change of the layer is linear in the pulled parameters, so that an interpolation of
  the parameters is an interpolation of the weights.

PEFT is not imported here: its layers are recognized by their attributes.
"""

import copy
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast._torch.layout import is_sharded, whole

#: Above all rounding, below any real change: relative to the outputs of a layer, and to their
#: change. The second ones are for a quantized layer, which may compute in half precision.
_SAME, _SAME_IN_HALF = 1e-5, 2e-2
_LINEAR, _LINEAR_IN_HALF = 1e-3, 5e-2


class Facts(NamedTuple):
    """What a new adapter of a layer does. ``pulled`` are names of parameters within the layer."""

    is_identity: bool
    pulled: tuple[str, ...]
    is_linear: bool


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that PEFT has wrapped, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "base_layer", None), nn.Module)
        and hasattr(module, "adapter_layer_names")
    }


def trained_in(layer: nn.Module) -> dict[str, Tensor]:
    """The parameters of a layer's adapters that are trained, by their names within the layer."""
    named = layer.named_parameters()
    return {n: p for n, p in named if p.requires_grad and not n.startswith("base_layer.")}


def facts_of(layer: nn.Module, origin: Mapping[str, Tensor] | None = None) -> Facts:
    """Measure what an adapter does, at its present values or at those of an origin."""
    probe, names = _Probe(layer), [*trained_in(layer)]
    with torch.no_grad():
        for name, value in (origin or {}).items():
            probe.parameters[name].copy_(whole(value))
    if not probe.is_same(probe.change()):
        return Facts(False, (), False)
    pulled = [name for name in names if not probe.is_same(probe.change([name]))]
    free = [name for name in names if name not in pulled]
    if not probe.is_same(probe.change(free)):  # without effect alone, but not together
        pulled, free = names, []
    end, half = probe.change(pulled, free=free), probe.change(pulled, 0.5, free=free)
    bend = float((half - end / 2).abs().max() / end.abs().max().clamp(min=1e-30))
    return Facts(True, tuple(pulled), bend <= (_LINEAR if probe.is_exact else _LINEAR_IN_HALF))


def is_identity(layer: nn.Module) -> bool:
    """Whether a layer computes the same with and without its adapters, up to rounding."""
    probe = _Probe(layer)
    return probe.is_same(probe.change())


def change_norm(layer: nn.Module) -> float:
    """‖W − W*‖ of a linear layer with adapters, and of its bias; NaN for other layers."""
    probe = _Probe(layer)
    if not probe.is_linear_layer or not probe.is_exact:
        return math.nan
    size = probe.inputs.shape[-1]
    probe.inputs = torch.cat([torch.eye(size), torch.zeros(1, size)]).to(probe.inputs)
    change = probe.change().double()
    bias = change[-1:]
    return float(torch.linalg.vector_norm(torch.cat([change[:-1] - bias, bias])))


def _whole_copy(layer: nn.Module) -> Any:
    """A copy with whole parameters. FSDP2 shards them, and its hooks are in some of the modules."""
    sharded = (p for p in layer.parameters() if is_sharded(p))
    copies: dict[int, Any] = {id(p): nn.Parameter(whole(p.detach()).clone()) for p in sharded}
    for module in reversed([*layer.modules()]):  # children before their parents
        if hasattr(module, "unshard"):  # FSDP2 has replaced its class by one that has no copies
            cls: Any = type(module).__mro__[2]
            plain = cls.__new__(cls)
            nn.Module.__init__(plain)
            own = {n: x for n, x in vars(module).items() if not re.search("hook|__composable", n)}
            vars(plain).update(copy.deepcopy(own, copies))
            copies[id(module)] = plain
    return copy.deepcopy(layer, copies)


class _Probe:
    """A copy of a layer and random inputs; in float32, unless the layer is quantized."""

    def __init__(self, layer: Any) -> None:
        self.is_exact = all(p.is_floating_point() for p in layer.parameters())
        self.layer = _whole_copy(layer).eval().requires_grad_(False)
        if self.is_exact:
            self.layer.float()
        self.parameters = dict(self.layer.named_parameters())
        self.generator = torch.Generator().manual_seed(0)
        base: Any = self.layer.get_base_layer()
        self.is_linear_layer = isinstance(base, nn.Linear) or type(base).__name__ == "Conv1D"
        self.inputs = self._inputs_of(base)
        moved = {name: self.parameters[name] for name in trained_in(layer)}
        self.steps = {n: 0.5 * self._normal(p.shape).to(p) for n, p in moved.items()}

    @torch.no_grad()
    def change(
        self, names: Collection[str] = (), share: float = 1.0, free: Collection[str] = ()
    ) -> Tensor:
        """The change of the outputs by the adapters, after a share of a step of parameters."""
        shares = dict.fromkeys(free, 1.0) | dict.fromkeys(names, share)
        before = {name: self.parameters[name].clone() for name in shares}
        for name, size in shares.items():
            self.parameters[name].add_(self.steps[name], alpha=size)
        outputs: Tensor = self.layer(self.inputs)
        for name, value in before.items():
            self.parameters[name].copy_(value)
        return outputs - self._base_outputs()

    def is_same(self, change: Tensor) -> bool:
        tolerance = _SAME if self.is_exact else _SAME_IN_HALF
        return bool(change.abs().max() <= tolerance * self._base_outputs().abs().max())

    @torch.no_grad()
    def _base_outputs(self) -> Tensor:
        outputs: Tensor = self.layer.base_layer(self.inputs)
        return outputs

    def _normal(self, shape: Any) -> Tensor:
        return torch.randn(tuple(shape), generator=self.generator)

    def _inputs_of(self, base: Any) -> Tensor:
        device = base.weight.device
        if isinstance(base, nn.Embedding):
            return torch.arange(min(3, base.num_embeddings), device=device)
        if hasattr(base, "kernel_size"):
            shape = (1, base.in_channels, *(2 * size for size in base.kernel_size))
        else:  # a linear layer, or a norm with a weight per feature
            size = getattr(base, "in_features", None) or base.weight.shape[0]
            shape = (3, size)
        return self._normal(shape).to(device)
