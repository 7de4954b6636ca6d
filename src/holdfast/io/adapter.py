"""LoRA adapters as weights: what a model computes with, base + s·B·A, and not what a file holds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from holdfast._torch.adapters import base_name
from holdfast._torch.names import align, shorten
from holdfast.io.checkpoint import LiveWeights, Source, Spec, Weights, open_weights
from holdfast.io.safetensors_files import map_safetensors
from holdfast.io.slices import Scratch

_PART = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<letter>[AB])(\.weight)?")


@dataclass(frozen=True)
class _Product:
    """s·left·right, added to the rows of a weight seen as a matrix."""

    left: Tensor
    right: Tensor
    scale: float

    def read(self, begin: int, end: int) -> Tensor:
        """The values from one to another, flat."""
        columns = self.right.shape[1]
        first, last = begin // columns, -(-end // columns)
        rows = self.left[first:last].float() @ self.right.float()
        start = first * columns
        return rows.mul_(self.scale).view(-1)[begin - start : end - start]


class AdaptedWeights(Weights):
    """A base's weights with an adapter's on top."""

    def __init__(
        self,
        label: str,
        base: Weights,
        products: Mapping[str, _Product],
        replaced: Mapping[str, Tensor],
        path: Path | None,
    ) -> None:
        specs = base.specs | {n: Spec(tuple(t.shape), t.dtype) for n, t in replaced.items()}
        shards = {file: list(names) for file, names in base.shards.items()}
        if shards:  # what the base lacks goes into its last file
            shards[list(shards)[-1]] += [name for name in specs if name not in base]
        super().__init__(label, specs, config=base.config, path=path, shards=shards)
        self.base, self._products = base, dict(products)
        self._replaced = LiveWeights(label, replaced)

    def read(
        self, name: str, begin: int = 0, end: int | None = None, scratch: Scratch | None = None
    ) -> Tensor:
        """The values of a tensor, flat, from one to another."""
        end = self[name].size if end is None else end
        part = self._replaced if name in self._replaced else self.base
        values = part.read(name, begin, end, scratch)
        if name not in self._products:
            return values
        return self._products[name].read(begin, end).add_(values)


def open_adapter(path: Path, base: Source | None, *, allow_pickle: bool) -> Weights:
    """The effective weights of a LoRA adapter that PEFT has saved."""
    try:
        config = json.loads((path / "adapter_config.json").read_text())
    except ValueError as error:
        raise ValueError(f"{path / 'adapter_config.json'} is not JSON: {error}") from error
    file = path / "adapter_model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} is an adapter without adapter_model.safetensors; save it anew with PEFT's "
            "save_pretrained"
        )
    if base is None:
        base = str(config.get("base_model_name_or_path") or "")
        if not base or not Path(base).exists():
            raise FileNotFoundError(
                f"{path} is an adapter of {base or 'a model that it does not name'}, which is no "
                "directory here: give the model that it was trained on as base"
            )
    model = open_weights(base, allow_pickle=allow_pickle)
    return adapt(str(path), model, config, map_safetensors(file), path)


def adapt(
    label: str,
    base: Weights,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    path: Path | None = None,
) -> Weights:
    """Put the tensors of an adapter onto its base."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{label} is an adapter of type {kind}; only LoRA is read: merge it first")
    odd = [key for key in ("use_dora", "use_qalora", "lora_bias") if config.get(key)]
    start = str(config.get("init_lora_weights", "")).lower()
    if start.startswith(("pissa", "olora", "corda", "loftq", "eva", "lora_ga")):
        odd.append(f"init_lora_weights={start}, which changes the base")
    odd += [name for name in tensors if "lora_" in name and not _PART.fullmatch(name)]
    odd += [name for name in tensors if "trainable_tokens" in name]
    if odd:
        raise ValueError(
            f"{label} is more than plain LoRA ({shorten(odd, most=2)}): merge it into its model "
            "with PEFT's merge_and_unload, save that and use it instead"
        )
    parts: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("base_model.model.")
        if match := _PART.fullmatch(name):
            letter = (match["embedding"] or "") + match["letter"]
            parts.setdefault(f"{match['module']}.weight", {})[letter] = tensor
        else:
            whole[base_name(name)] = tensor
    named = align([*parts, *whole], base)
    of_base = {name: own for name in [*parts, *whole] if (own := named(name)) is not None}
    replaced = {of_base.get(name, name): tensor for name, tensor in whole.items()}
    products: dict[str, _Product] = {}
    for name, letters in parts.items():
        own = of_base.get(name)
        if own is None:
            raise ValueError(
                f"{label} adapts {name}, which {base.label} does not hold: give the model that it "
                "was trained on as base"
            )
        products[own] = _product(name, letters, config, replaced.get(own, base[own]), label)
    return AdaptedWeights(label, base, products, replaced, path)


def _product(
    name: str, letters: Mapping[str, Tensor], config: Mapping[str, Any], target: Any, label: str
) -> _Product:
    embedding = "embedding_A" in letters
    try:
        a, b = (letters[f"embedding_{x}" if embedding else x].flatten(1) for x in "AB")
    except KeyError as error:
        raise ValueError(f"{label} holds only one half of the adapter of {name}") from error
    rank, module = a.shape[0], name.removesuffix(".weight")
    patterns = config.get("alpha_pattern") or {}
    # As PEFT does: a pattern is a regular expression for the end of the module's name.
    keys = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
    alpha = patterns.get(next(keys, ""), config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    # A Conv1D and an embedding hold the transpose of what a Linear holds.
    across = embedding or config.get("fan_in_fan_out")
    left, right = (a.T, b.T) if across else (b, a)
    shape = (target.shape[0], math.prod(target.shape[1:]))
    if (left.shape[0], right.shape[1]) != shape:
        raise ValueError(
            f"the adapter of {name} in {label} is for {left.shape[0]} × {right.shape[1]} weights, "
            f"the base has {shape[0]} × {shape[1]}: give the model that it was trained on as base"
        )
    return _Product(left, right, scale)


def of_peft_model(model: nn.Module, label: str, about: Mapping[str, Any] | None) -> Weights:
    """The effective weights of a model that PEFT has put adapters into."""
    try:
        from peft import get_peft_model_state_dict
    except ImportError as error:
        raise ImportError('adapters are read with PEFT: pip install "holdfast[peft]"') from error
    live: Any = model
    active = live.active_adapter
    if not isinstance(active, str):
        raise ValueError(f"{label} has several active adapters: choose one with set_adapter")
    if any(getattr(module, "merged", False) for module in model.modules()):
        raise ValueError(f"the adapters of {label} are merged into its weights: unmerge them first")
    tensors = get_peft_model_state_dict(model, adapter_name=active, save_embedding_layers=False)
    own = {
        base_name(name): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name and ".modules_to_save." not in name
    }
    config = live.peft_config[active].to_dict()
    config["peft_type"] = getattr(config["peft_type"], "value", config["peft_type"])
    return adapt(label, LiveWeights(label, own, config=about), config, tensors)
