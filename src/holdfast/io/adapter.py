"""The effective weights of a model with adapters. On disk, those of LoRA: base + s·B·A."""

import copy
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from holdfast._torch.adapter_probe import adapter_layers
from holdfast._torch.adapters import adapter_parts, base_name, full_copies, unfit_kind
from holdfast._torch.imports import require
from holdfast._torch.layers import within
from holdfast._torch.names import align, shorten
from holdfast._torch.vocabulary import is_token_embedding, token_rows
from holdfast.io.patterns import matching
from holdfast.io.safetensors_files import map_safetensors
from holdfast.io.untrusted import read_object
from holdfast.io.weights import LiveWeights, Scratch, Spec, Weights

_PART = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<letter>[AB])(\.weight)?")


@dataclass(frozen=True)
class _Product:
    """The update s·left·right of a weight that is viewed as a matrix."""

    left: Tensor
    right: Tensor
    scale: float

    def read(self, begin: int, end: int) -> Tensor:
        columns = self.right.shape[1]
        first, last = begin // columns, -(-end // columns)
        rows = self.left[first:last].float() @ self.right.float()
        start = first * columns
        return rows.mul_(self.scale).view(-1)[begin - start : end - start]


class AdaptedWeights(Weights):
    def __init__(
        self,
        label: str,
        base: Weights,
        products: Mapping[str, _Product],
        replaced: Mapping[str, Tensor],
        path: Path | None,
    ) -> None:
        specs = dict(base) | {n: Spec(tuple(t.shape), t.dtype) for n, t in replaced.items()}
        shards = {file: list(names) for file, names in base.shards.items()}
        if shards:  # tensors that the base lacks go into its last file
            shards[list(shards)[-1]] += [name for name in specs if name not in base]
        sizes = token_rows((n, base[n].shape, specs[n].shape) for n in replaced if n in base)
        super().__init__(label, specs, config=base.config, path=path, shards=shards)
        #: The number of tokens, if it is not that of the base.
        self.tokens = sizes.tuned if sizes else None
        self.base, self._products = base, dict(products)
        self._replaced = LiveWeights(label, replaced)

    def _read(self, name: str, begin: int, end: int, scratch: Scratch | None) -> Tensor:
        part = self._replaced if name in self._replaced else self.base
        values = part.read(name, begin, end, scratch)
        if name not in self._products:
            return values
        return self._products[name].read(begin, end).add_(values)


def is_adapter(source: str | os.PathLike[str] | nn.Module) -> bool:
    return not isinstance(source, nn.Module) and (Path(source) / "adapter_config.json").is_file()


def base_of(path: Path) -> str:
    """Return the directory or hub name of the model that an adapter was trained on."""
    base = read_config(path).get("base_model_name_or_path")
    if not base:
        raise FileNotFoundError(f"the adapter {path} names no base: pass its base model")
    return str(base)


def open_adapter(path: Path, base: Weights) -> Weights:
    return adapt(str(path), base, read_config(path), map_safetensors(_weights_in(path)), path)


def _weights_in(path: Path) -> Path:
    file = path / "adapter_model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(
            f"the adapter {path} has no adapter_model.safetensors: save it again with PEFT's "
            "save_pretrained"
        )
    return file


def read_config(path: Path) -> dict[str, Any]:
    """Read the settings of an adapter; check those that holdfast and PEFT use."""
    file = path / "adapter_config.json"
    config = read_object(file)
    is_lora = config.get("peft_type") == "LORA"
    for key, value in config.items():
        allowed, words = _SETTINGS.get(key, (None, ""))
        is_unset = value is None or (key == "r" and value == 0)
        may_be_unset = not (is_lora and key in ("r", "lora_alpha"))
        if allowed is None or allowed(value) or (is_unset and may_be_unset):
            continue
        raise ValueError(f"{file}: {key} must be {words}, got {str(value)[:60]!r}")
    return config


def tokens_in(path: Path) -> int | None:
    """Return the number of tokens of the embedding that is saved with an adapter, if any."""
    tensors = map_safetensors(_weights_in(path))
    return next((len(t) for name, t in tensors.items() if is_token_embedding(name)), None)


def check_adapter(path: Path, modules: Iterable[str], peft: Any) -> None:
    """Check before PEFT opens an adapter that it cannot run code, hang, or fill the memory."""
    config, tensors = read_config(path), map_safetensors(_weights_in(path))
    if reason := unfit_kind(peft, str(config.get("peft_type"))):
        raise _merge_first(f"{path} cannot be opened, because {reason}")
    ranks = [config.get(name) for name in _RANKS]
    ranks += (config.get("rank_pattern") or {}).values()
    most = max((rank for rank in ranks if isinstance(rank, int)), default=0)
    # A rank of LoRA is a dimension of its matrices. Other adapters may store them flat.
    size = max if config.get("peft_type") == "LORA" else math.prod
    largest = max((size(t.shape) if t.dim() else 0 for t in tensors.values()), default=0)
    if most > largest:
        raise ValueError(f"{path}: the rank {most} is not the one of its matrices")
    patterns = [*(config.get("alpha_pattern") or ()), *(config.get("rank_pattern") or ())]
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        patterns += [value] if isinstance(value := config.get(key), str) else []
    matching(patterns, modules, f"{path}/adapter_config.json")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _by_name(is_allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_allowed, value.values()))


def _is_names(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    )


#: Settings that are a size of the tensors of an adapter: a rank, or a number of vectors or values.
_RANKS = ("r", "hybrid_r", "n_frequency", "num_vectors", "theta_d_length", "num_B", "u", "depth")
#: What settings of an adapter must be, if they are given.
_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "base_model_name_or_path": (lambda value: isinstance(value, str), "text"),
    "lora_alpha": (_is_number, "a number"),
    "alpha_pattern": (_by_name(_is_number), "numbers by name"),
    "r": (_is_rank, "a positive whole number"),
    "rank_pattern": (_by_name(_is_rank), "positive whole numbers by name"),
    "target_modules": (_is_names, "names of modules"),
    "exclude_modules": (_is_names, "names of modules"),
    "layers_pattern": (_is_names, "names of modules"),
    "layer_replication": (lambda _: False, "null"),  # the layers are then not those of the base
    "megatron_config": (lambda _: False, "null"),  # older versions of PEFT import what it names
}


def adapt(
    label: str,
    base: Weights,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    path: Path | None = None,
) -> Weights:
    if odd := _beyond_lora(config, tensors):
        raise _merge_first(f"{label} uses more than plain LoRA ({shorten(odd, most=2)})")
    parts: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("base_model.model.")
        # Beside a resized embedding that is trained in full, PEFT saves its original, and it again.
        if ".original_module." in name or ".modules_to_save." in name:
            continue
        if match := _PART.fullmatch(name):
            letter = (match["embedding"] or "") + match["letter"]
            parts.setdefault(f"{match['module']}.weight", {})[letter] = tensor
        else:
            whole[base_name(name)] = tensor
    # An adapted embedding is saved twice: its own weight, and the matrices of its adapter.
    named = align(dict.fromkeys([*parts, *whole]), base)
    of_base = {name: own for name in [*parts, *whole] if (own := named(name)) is not None}
    replaced = {of_base.get(name, name): tensor for name, tensor in whole.items()}
    alphas = _alphas(config, parts, label)
    products: dict[str, _Product] = {}
    for name, letters in parts.items():
        own = of_base.get(name)
        if own is None:
            raise ValueError(
                f"{label} adapts {name}, which {base.label} does not have: pass the base model "
                "that the adapter was trained on"
            )
        target = replaced.get(own, base[own])
        products[own] = _product(name, letters, config, alphas[name], target, label)
    return AdaptedWeights(label, base, products, replaced, path)


def _beyond_lora(config: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """What makes the weights of an adapter other than base + s·B·A."""
    if (kind := config.get("peft_type")) != "LORA":
        return [f"an adapter of type {kind}"]
    odd = [key for key in ("use_dora", "use_qalora", "lora_bias") if config.get(key)]
    if start := _start_that_changes_base(config):
        odd.append(f"init_lora_weights={start} changes the base")
    odd += [name for name in tensors if "lora_" in name and not _PART.fullmatch(name)]
    return odd + [name for name in tensors if "trainable_tokens" in name]


def _start_that_changes_base(config: Mapping[str, Any]) -> str | None:
    """The initialization of LoRA, if it has changed the base: adapter and base then fit no more."""
    start = str(config.get("init_lora_weights", "")).lower()
    changing = ("pissa", "olora", "corda", "loftq", "eva", "lora_ga")
    return start if start.startswith(changing) else None


def is_plain_lora(path: Path) -> bool:
    """Whether the weights of an adapter are base + s·B·A; raise if its base is another one."""
    config, tensors = read_config(path), map_safetensors(_weights_in(path))
    if start := _start_that_changes_base(config):
        raise _merge_first(
            f"{path} was trained with init_lora_weights={start}, which changes the base"
        )
    _refuse_rows_of_tokens(str(path), tensors)
    return not _beyond_lora(config, tensors)


def _refuse_rows_of_tokens(label: str, tensors: Iterable[str]) -> None:
    if any("trainable_tokens" in name for name in tensors):
        raise _merge_first(f"{label} has rows of single tokens")


def _merge_first(reason: str) -> ValueError:
    return ValueError(
        f"{reason}: merge it into its model with PEFT's merge_and_unload, and use the merged model"
    )


def _alphas(config: Mapping[str, Any], names: Iterable[str], label: str) -> dict[str, float]:
    """Return the α of every weight: that of the first pattern that its module matches."""
    modules = {name: name.removesuffix(".weight") for name in names}
    patterns, usual = config.get("alpha_pattern") or {}, config.get("lora_alpha", 8)  # as in PEFT
    found = matching(patterns, modules.values(), label)
    return {
        name: next((alpha for key, alpha in patterns.items() if module in found[key]), usual)
        for name, module in modules.items()
    }


def _product(
    name: str,
    letters: Mapping[str, Tensor],
    config: Mapping[str, Any],
    alpha: float,
    target: Any,
    label: str,
) -> _Product:
    embedding = "embedding_A" in letters
    try:
        a, b = (letters[f"embedding_{x}" if embedding else x].flatten(1) for x in "AB")
    except KeyError as error:
        raise ValueError(f"{label} holds only one of the matrices A and B for {name}") from error
    rank = a.shape[0]
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    # Conv1D and embeddings store the transpose of a Linear's weight.
    across = embedding or config.get("fan_in_fan_out")
    left, right = (a.T, b.T) if across else (b, a)
    shape = (target.shape[0], math.prod(target.shape[1:]))
    if (left.shape[0], right.shape[1]) != shape:
        raise ValueError(
            f"{label} adapts {name} with {left.shape[0]} × {right.shape[1]} weights, but the base "
            f"has {shape[0]} × {shape[1]}: pass the base model that the adapter was trained on"
        )
    return _Product(left, right, scale)


def of_peft_model(
    model: nn.Module, label: str, about: Mapping[str, Any] | None, base: Weights | None = None
) -> Weights:
    """Open the effective weights of a model with adapters, by default on its own base."""
    peft = require("peft", extra="peft", what="reading adapters")
    live: Any = model
    active = live.active_adapter
    if not isinstance(active, str):
        raise ValueError(f"{label} has several active adapters: activate one with set_adapter")
    if any(getattr(module, "merged", False) for module in model.modules()):
        raise ValueError(f"the adapters of {label} are merged into its weights: unmerge them first")
    tensors = peft.get_peft_model_state_dict(
        model, adapter_name=active, save_embedding_layers=False
    )
    _refuse_rows_of_tokens(label, tensors)
    inner = live.get_base_model()  # matrices that all layers share are outside of it
    added = [*adapter_parts(inner), *full_copies(inner)]
    own = {
        base_name(name): tensor
        for name, tensor in inner.state_dict().items()
        if not within(name, added)
    }
    config = live.peft_config[active].to_dict()
    config["peft_type"] = getattr(config["peft_type"], "value", config["peft_type"])
    if base is None and _beyond_lora(config, tensors):
        return LiveWeights(label, own | _merged(inner, active), config=about)
    return adapt(label, base or LiveWeights(label, own, config=about), config, tensors)


def _merged(model: nn.Module, active: str) -> dict[str, Tensor]:
    """The weights of the layers with adapters, which are merged, and of full copies."""
    found: dict[str, Tensor] = {}
    for name, layer in adapter_layers(model).items():
        merged = copy.deepcopy(layer)  # of one layer at a time
        merged.merge()
        own = merged.get_base_layer().state_dict()
        found |= {base_name(f"{name}.{n}"): tensor for n, tensor in own.items()}
    for part in full_copies(model):
        trained = model.get_submodule(f"{part}.{active}").state_dict()
        found |= {base_name(f"{part}.{active}.{n}"): tensor for n, tensor in trained.items()}
    return found
