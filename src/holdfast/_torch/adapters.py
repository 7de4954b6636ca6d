"""Wrapped models and their adapters: everything that holdfast knows about PEFT.

A LoRA layer computes W + s·B·A with B = 0 at the start, so B = 0 is the pretrained model, also for
adapters that were trained. What other kinds of adapters do is measured on them while they are new
(:mod:`holdfast._torch.adapter_probe`). PEFT is not imported here: its modules are recognized by
their attributes.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holdfast._torch.adapter_probe import (
    adapter_layers,
    change_norm,
    facts_of,
    is_identity,
    trained_in,
)
from holdfast._torch.layers import within
from holdfast._torch.layout import whole
from holdfast._torch.names import plain_name


def unwrapped(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def has_adapters(model: nn.Module) -> bool:
    return bool(adapter_layers(model))


def adapter_parts(model: nn.Module) -> list[str]:
    """The names of the modules that hold adapters: all of a layer except its base layer."""
    return [
        f"{name}.{child}".lstrip(".")
        for name, layer in adapter_layers(model).items()
        for child, _ in layer.named_children()
        if child != "base_layer"
    ]


def full_copies(model: nn.Module) -> list[str]:
    """The names of the modules that hold copies of parts, which are trained in full."""
    return [
        f"{name}.modules_to_save".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict)
    ]


def _is_lora(layer: Any) -> bool:
    """Whether a layer is W + s·B·A, or DoRA's."""
    return isinstance(getattr(layer, "lora_B", None), nn.ModuleDict)


def without_peft(model: nn.Module) -> Any:
    """The model inside PEFT's wrapper and inside DDP or torch.compile, adapters included."""
    inner: Any = unwrapped(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def base_name(name: str) -> str:
    """The name that a parameter had before PEFT wrapped its module.

    >>> base_name("base_model.model.head.modules_to_save.default.weight")
    'head.weight'
    """
    return re.sub(
        r"^base_model\.model\.|\.modules_to_save\.[^.]+|\.(base_layer|original_module)(?=\.)",
        "",
        name,
    )


def adapter_origin(model: nn.Module) -> dict[str, Tensor]:
    """The values of the pulled parameters at which adapters change nothing.

    For LoRA, B = 0 and DoRA's current norms. For other adapters, which must be new, the current
    values of the parameters that change their layer.
    """
    pulled = {id(p) for layer in _other_layers(model) for p in _pulled_in(layer)}
    zero = {id(b) for b in _lora_b(model)}
    origin: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if id(p) in zero or (id(p) in pulled and not p.any()):
            origin[name] = p.new_zeros(()).expand(p.shape)
        elif ".lora_magnitude_vector." in name or id(p) in pulled:
            origin[name] = p.detach().clone()
    return origin


def _other_layers(model: nn.Module) -> list[Any]:
    """The layers with adapters that are not LoRA's."""
    return [layer for layer in adapter_layers(model).values() if not _is_lora(layer)]


def _lora_b(model: nn.Module) -> list[Tensor]:
    """Every B of LoRA, except those of embeddings."""
    layers = filter(_is_lora, adapter_layers(model).values())
    return [b for layer in layers for b in layer.lora_B.parameters()]


def _pulled_in(layer: Any) -> list[Tensor]:
    facts, named = facts_of(layer), trained_in(layer)
    if not facts.is_identity:
        raise ValueError(
            f"the adapters of this model ({kind_of_adapter(layer)}) do not start at the pretrained "
            "model, so it is not known where it is: merge them first (merge_and_unload), or use an "
            "initialization that changes nothing"
        )
    return [named[name] for name in facts.pulled]


def kind_of_adapter(layer: Any) -> str:
    """PEFT's name for the adapters of a layer."""
    return str(type(layer).__module__).split(".")[-2].upper()  # peft.tuners.oft.layer


def unfit_kind(peft: Any, kind: str) -> str | None:
    """Return why holdfast neither trains nor merges a kind of adapter; None if it does.

    >>> import peft
    >>> unfit_kind(peft, "PROMPT_TUNING")
    'PROMPT_TUNING changes what the model reads, not its layers'
    """
    kinds = {known.value: cls for known, cls in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if kind not in kinds:
        return f"PEFT has no adapter {kind}"
    tuner = peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING.get(kind)
    settings = {field.name for field in dataclasses.fields(kinds[kind]) if field.init}
    if not {"target_modules", "modules_to_save"} <= settings or not hasattr(
        tuner, "tuner_layer_cls"
    ):
        return f"{kind} changes what the model reads, not its layers"
    if hasattr(tuner, "update_and_allocate"):
        return (
            f"{kind} changes its ranks in calls between the updates (update_and_allocate), which "
            "hosts do not make"
        )
    return None


def not_linear(model: nn.Module, origin: Mapping[str, Tensor] | None = None) -> str | None:
    """Return why adapters cannot interpolate the weights of a model; None if they can.

    For trained adapters that are not LoRA's, the values at which they change nothing are needed.
    """
    values = {plain_name(name): value for name, value in (origin or {}).items()}
    named = [(plain_name(name), p) for name, p in model.named_parameters()]
    known = {id(p): values[name] for name, p in named if name in values}  # layers may share it
    for name, layer in adapter_layers(model).items():
        if _is_lora(layer):
            is_linear, kind = not any(getattr(layer, "use_dora", {}).values()), "DoRA"
        else:
            kind, trained = kind_of_adapter(layer), trained_in(layer)
            facts = facts_of(layer, {n: known[id(p)] for n, p in trained.items() if id(p) in known})
            if origin is not None and not facts.is_identity:
                return (
                    f"{base_name(name)} uses {kind}, and the values at which it changes nothing "
                    "are not known: keep the tuned model, and interpolate its weights with "
                    "'holdfast merge', which reads adapters"
                )
            is_linear = facts.is_linear or not facts.is_identity
        if not is_linear:
            return (
                f"{base_name(name)} uses {kind}, whose weights are not linear in its parameters: "
                "keep the tuned model, and interpolate its weights with 'holdfast merge', which "
                "reads adapters"
            )
    return None


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """The name of each LoRA parameter, the parameter, and whether it is a B.

    Raises ValueError if adapters are merged into the weights.
    """
    for prefix, module in adapter_layers(model).items():
        if not _is_lora(module):
            continue
        for kind in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
            layers = getattr(module, kind, None)
            if not isinstance(layers, nn.ModuleDict | nn.ParameterDict) or not len(layers):
                continue
            if getattr(module, "merged", False):
                raise ValueError(
                    f"the adapters of {prefix} are merged into its weights: unmerge them first "
                    "(unmerge_adapter), or unload them and interpolate with a Reference"
                )
            for name, p in layers.named_parameters(prefix=f"{prefix}.{kind}".lstrip(".")):
                yield name, p, kind.endswith("B")


def adapters_are_new(model: nn.Module) -> bool:
    """Whether a model with its adapters off is the model of now.

    No B of LoRA has changed, nor A of an embedding, which PEFT sets to 0 instead; layers with other
    adapters compute the same as without them; and parts that are trained in full equal their
    originals.
    """
    if any(b.any() for b in _lora_b(model)):
        return False
    if any(_changes_embedding(m) or _changes_copy(m) for m in model.modules()):
        return False
    return all(map(is_identity, _other_layers(model)))


def _changes_embedding(module: Any) -> bool:
    a, b = getattr(module, "lora_embedding_A", None), getattr(module, "lora_embedding_B", None)
    if not isinstance(a, nn.ParameterDict) or not isinstance(b, nn.ParameterDict):
        return False
    return any(a[name].any() and b[name].any() for name in a)


def _changes_copy(module: Any) -> bool:
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return False
    original = dict(module.original_module.named_parameters())
    trained = (found for copy in copies.values() for found in copy.named_parameters())
    return any((p != original[name].to(p)).any() for name, p in trained)


def adapters_are_removable(model: nn.Module) -> bool:
    """Whether a model with its adapters off is the model of now, also after training.

    This holds for new adapters if nothing else changes: no other trained parameter, no running
    statistics.
    """
    inner = unwrapped(model)
    if not (has_adapters(inner) and hasattr(inner, "disable_adapter")):
        return False
    if any(getattr(m, "running_mean", None) is not None for m in inner.modules()):
        return False
    parts = adapter_parts(inner)
    trained = [name for name, p in inner.named_parameters() if p.requires_grad]
    return all(within(name, parts) for name in trained) and adapters_are_new(inner)


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[nn.Module]:
    """Switch the adapters off: inside the context the model is the pretrained one.

    Parts that are trained in full (``modules_to_save``) have their original weights.

    Example:
        >>> import peft, torch
        >>> net, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()), torch.ones(1, 3)
        >>> before = net(x)
        >>> tuned = peft.LoraConfig(target_modules=["0"], init_lora_weights=False)  # B is not 0
        >>> with adapters_off(peft.get_peft_model(net, tuned)) as base:
        ...     bool((base(x) == before).all())
        True
    """
    inner: Any = unwrapped(model)
    if not hasattr(inner, "disable_adapter"):
        raise ValueError(f"{type(inner).__name__} has no adapters to switch off")
    flags = [(p, p.requires_grad) for p in inner.parameters()]
    try:
        with inner.disable_adapter():
            yield model
    finally:
        for p, flag in flags:  # PEFT sets them by its own rule
            p.requires_grad_(flag)


@torch.no_grad()
def adapter_norms(model: nn.Module) -> list[float]:
    """‖W − W*‖ of each layer with adapters; NaN where it is not known, such as a quantized one."""
    return [
        change_norm(layer)
        if not _is_lora(layer) or any(getattr(layer, "use_dora", {}).values())
        else _added_norm(layer)
        for layer in adapter_layers(model).values()
    ]


def _added_norm(layer: Any) -> float:
    """‖s·BA‖ of a layer's active adapters; for a single linear one without computing BA."""
    names = [n for n in layer.active_adapters if n in layer.lora_A or n in layer.lora_embedding_A]
    if not names:
        return 0.0
    first = names[0]
    if len(names) == 1 and first in layer.lora_B and isinstance(layer.lora_B[first], nn.Linear):
        a = whole(layer.lora_A[first].weight).double()
        b = whole(layer.lora_B[first].weight).double()
        square = float(((b.T @ b) * (a @ a.T)).sum())  # ‖BA‖² = tr(BᵀB·AAᵀ)
        return abs(float(layer.scaling[first])) * math.sqrt(max(0.0, square))
    added: Tensor = sum(layer.get_delta_weight(name) for name in names)
    return float(whole(torch.linalg.vector_norm(added.double())))
