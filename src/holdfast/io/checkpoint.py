"""Open the weights of a checkpoint in any format, to read them in slices and constant memory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from holdfast._torch.names import shorten
from holdfast.io.adapter import adapter_config, is_adapter, of_peft_model, open_adapter
from holdfast.io.gguf import open_gguf
from holdfast.io.safetensors_files import Stored, read_header, safetensors_files
from holdfast.io.weights import LiveWeights, Scratch, Spec, Weights

PICKLES = (".bin", ".pt", ".pth", ".ckpt")

#: A directory, file or hub name of a checkpoint, a model in memory, or open weights.
WeightsSource: TypeAlias = str | os.PathLike[str] | nn.Module | Weights


def open_weights(
    source: WeightsSource, *, base: WeightsSource | None = None, allow_pickle: bool = False
) -> Weights:
    """Open the weights of a checkpoint. Headers are read now, values on access.

    Args:
        source: a directory in the Hugging Face format, a ``.safetensors`` file, the directory of a
            LoRA adapter (whose weights are the effective ones, base + s·B·A), a GGUF file, or a
            model.
        base: the model that an adapter was trained on; None uses the directory that the adapter
            names.
        allow_pickle: also read pickled weights (``.bin``, ``.pt``), restricted to tensors.

    Example:
        >>> weights = open_weights(nn.Linear(3, 2))
        >>> {name: spec.shape for name, spec in weights.items()}
        {'weight': (2, 3), 'bias': (2,)}
        >>> weights.read("bias", 0, 1).shape
        torch.Size([1])
    """
    if isinstance(source, Weights):
        return source
    if isinstance(source, nn.Module):
        return _of_model(source)
    path = _local_path(source)
    if is_adapter(path):
        config = adapter_config(path)
        under = open_weights(base or _base_named_in(config, path), allow_pickle=allow_pickle)
        return open_adapter(path, config, under)
    if path.is_file() and path.suffix == ".gguf":
        return open_gguf(path)
    if pickles := _pickles(path):
        if not allow_pickle:
            raise ValueError(
                f"{path} holds pickled weights, which can execute code when loaded: save the model "
                "again with save_pretrained, or allow them (allow_pickle=True, --allow-pickle)"
            )
        return _of_pickles(path, pickles)
    return _of_safetensors(path)


def _local_path(source: str | os.PathLike[str]) -> Path:
    """Return the path of a checkpoint; download it first if it is on the hub."""
    path = Path(source)
    looks_like_a_name = isinstance(source, str) and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source)
    if path.exists() or not looks_like_a_name:
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return path
    wanted = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(str(source), allow_patterns=wanted))
    except Exception as error:  # no such name, no network, no permission: each has its own type
        first = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"{source} is neither a local file or directory nor a model on the hub: {first[:200]}"
        ) from error


def _base_named_in(config: Mapping[str, Any], adapter: Path) -> str:
    base = str(config.get("base_model_name_or_path") or "")
    if not base or not Path(base).exists():
        named = (
            f"names the base {base}, which is not a local directory" if base else "names no base"
        )
        raise FileNotFoundError(f"the adapter {adapter} {named}: pass its base model")
    return base


class StoredWeights(Weights):
    """Weights in safetensors files."""

    def __init__(self, label: str, stored: Mapping[str, Stored], **about: Any) -> None:
        super().__init__(label, {n: Spec(s.shape, s.dtype) for n, s in stored.items()}, **about)
        self._stored = dict(stored)

    def _read(self, name: str, begin: int, end: int, scratch: Scratch | None) -> Tensor:
        into = scratch(f"read {id(self)}", end - begin, self[name].dtype) if scratch else None
        return self._stored[name].read(begin, end, into)


def _of_safetensors(path: Path) -> Weights:
    stored: dict[str, Stored] = {}
    shards: dict[str, list[str]] = {}
    for file, wanted in safetensors_files(path).items():
        here = read_header(file)
        if wanted is not None and (missing := sorted(wanted - set(here))):
            raise ValueError(f"{file} lacks the tensors {shorten(missing)}")
        shards[file.name] = [name for name in here if wanted is None or name in wanted]
        stored.update((name, here[name]) for name in shards[file.name])
    return StoredWeights(str(path), stored, shards=shards, path=path, config=_config_in(path))


def _of_model(model: nn.Module) -> Weights:
    config: Any = getattr(model, "config", None)
    about = config.to_dict() if hasattr(config, "to_dict") else None
    label = type(model).__name__
    if hasattr(model, "peft_config"):
        return of_peft_model(model, label, about)
    return LiveWeights(label, _without_aliases(model.state_dict()), config=about)


def _without_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep only the first name of each tensor."""
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() == 0 or place not in seen:
            kept[name] = tensor
        seen.add(place)
    return kept


def _pickles(path: Path) -> list[Path]:
    """Return the files of pickled weights, unless there are safetensors."""
    if path.is_file():
        return [path] if path.suffix in PICKLES else []
    index = path / "pytorch_model.bin.index.json"
    if any(path.glob("model.safetensors*")):
        return []
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [file for file in files if not (path / Path(file).name).is_file()]
        if missing:
            raise FileNotFoundError(f"{path} lacks the shards {shorten(missing)} of its index")
        return [path / Path(file).name for file in files]
    whole = path / "pytorch_model.bin"
    return [whole] if whole.is_file() else []


def _of_pickles(path: Path, files: list[Path]) -> Weights:
    tensors: dict[str, Tensor] = {}
    shards: dict[str, list[str]] = {}
    for file in files:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # damaged bytes make it raise many types
            raise ValueError(
                f"{file} is not a readable file of tensors (truncated, an old format, or other "
                f"objects in it): {str(error).splitlines()[0]}"
            ) from error
        for key in ("state_dict", "model"):  # where training scripts put the weights
            if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
                loaded = loaded[key]
        found = {
            name: value
            for name, value in (loaded.items() if isinstance(loaded, dict) else ())
            if isinstance(value, Tensor)
        }
        if not found:
            raise ValueError(f"{file} holds no named tensors")
        stem = file.name.replace("pytorch_model", "model").removesuffix(file.suffix)
        shards[f"{stem}.safetensors"] = list(found)
        tensors.update(found)
    return LiveWeights(str(path), tensors, shards=shards, path=path, config=_config_in(path))


def _config_in(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        return json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
