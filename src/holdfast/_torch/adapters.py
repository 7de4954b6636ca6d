"""Wrapped models and their adapters: everything that holdfast knows about PEFT.

A LoRA layer computes W + s·B·A with B = 0 at the start, so B = 0 is the pretrained model. PEFT is
not imported here: its modules are recognized by their attributes.
"""

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from holdfast._torch.layout import whole


def unwrapped(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(getattr(m, "lora_B", None), nn.ModuleDict) for m in model.modules())


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


def is_of_adapter(name: str) -> bool:
    """Whether a parameter or module belongs to an adapter, or is a copy that is trained in full.

    >>> is_of_adapter("q_proj.lora_A.default.weight"), is_of_adapter("q_proj.base_layer.weight")
    (True, False)
    """
    return re.search(r"\.(lora_\w+|modules_to_save)\.", name) is not None


def is_drawn_at_random(name: str) -> bool:
    """Whether a parameter is LoRA's A: random at the start, without effect while B is 0."""
    return ".lora_A." in name


def adapter_origin(model: nn.Module) -> dict[str, Tensor]:
    """The values at which adapters change nothing: B = 0, and DoRA's current norms."""
    origin: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            origin[name] = p.new_zeros(()).expand(p.shape)
        elif ".lora_magnitude_vector." in name:
            origin[name] = p.detach().clone()
    return origin


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """The name of each LoRA parameter, the parameter, and whether it is a B.

    Raises ValueError where scaling B would not interpolate the effective weights.
    """
    for prefix, module in model.named_modules():
        for kind in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
            layers = getattr(module, kind, None)
            if not isinstance(layers, nn.ModuleDict | nn.ParameterDict) or not len(layers):
                continue
            if any(getattr(module, "use_dora", {}).values()):
                raise ValueError(
                    f"{prefix} uses DoRA, whose weights are not linear in B: merge the adapters "
                    "into the model first (merge_and_unload), then interpolate with a Reference"
                )
            if getattr(module, "merged", False):
                raise ValueError(
                    f"the adapters of {prefix} are merged into its weights: unmerge them first "
                    "(unmerge_adapter), or unload them and interpolate with a Reference"
                )
            for name, p in layers.named_parameters(prefix=f"{prefix}.{kind}".lstrip(".")):
                yield name, p, kind.endswith("B")


def adapters_are_new(model: nn.Module) -> bool:
    """Whether a model with its adapters off is the model of now.

    No B of LoRA has changed, nor A of an embedding, which PEFT sets to 0 instead, and parts that
    are trained in full equal their originals.
    """
    if any(p.any() for name, p in model.named_parameters() if ".lora_B." in name):
        return False
    return not any(_changes_embedding(m) or _changes_copy(m) for m in model.modules())


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

    This holds for new adapters (B = 0) if nothing else changes: no other trained parameter, no
    running statistics.
    """
    inner = unwrapped(model)
    if not (has_adapters(inner) and hasattr(inner, "disable_adapter")):
        return False
    if any(getattr(m, "running_mean", None) is not None for m in inner.modules()):
        return False
    known = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.")
    trained = [name for name, p in inner.named_parameters() if p.requires_grad]
    return adapters_are_new(inner) and all(any(k in name for k in known) for name in trained)


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
    """‖s·BA‖ of each LoRA layer; NaN if a layer uses DoRA, which does not add to the weights."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "lora_B")]
    if any(any(getattr(layer, "use_dora", {}).values()) for layer in layers):
        return [math.nan]
    return [_added_norm(layer) for layer in layers]


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
