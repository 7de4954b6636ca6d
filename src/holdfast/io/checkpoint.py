"""The weights of a checkpoint, wherever it lies, tensor by tensor and in constant memory."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from holdfast._torch.names import shorten
from holdfast.io.safetensors_files import Stored, read_header, safetensors_files
from holdfast.io.slices import Scratch

__all__ = ["Source", "Spec", "Weights", "open_weights"]

PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Spec:
    """What a tensor is, without its values. An adapter's weights are stored as its base's are."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


class Weights(Mapping[str, Spec]):
    """The named tensors of a checkpoint: what they are, and their values in slices.

    Args:
        label: what to call it in messages.
        specs: name → shape and dtype.
        config: the model's configuration, as far as there is one.
        path: the file or the directory that it lies in, if it lies in one.
        shards: the files it consists of, each with its tensors, if it lies in files.
    """

    def __init__(
        self,
        label: str,
        specs: Mapping[str, Spec],
        *,
        config: Mapping[str, Any] | None = None,
        path: Path | None = None,
        shards: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.label, self.specs = label, dict(specs)
        self.config = dict(config or {})
        self.path = path
        self.shards = {file: list(names) for file, names in (shards or {}).items()}

    def read(
        self, name: str, begin: int = 0, end: int | None = None, scratch: Scratch | None = None
    ) -> Tensor:
        """The values of a tensor, flat, from one to another; not to be modified.

        They come in the tensor's dtype, or in float32 where they are computed (adapters, GGUF).
        With ``scratch`` they may be overwritten by this thread's next read of these weights.
        """
        raise NotImplementedError

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in its shape."""
        return self.read(name).view(self[name].shape)

    def __getitem__(self, name: str) -> Spec:
        return self.specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __repr__(self) -> str:
        size = sum(spec.size for spec in self.values())
        return f"Weights({self.label}: {len(self)} tensors, {size:,} weights)"


#: What weights are read from.
Source: TypeAlias = str | os.PathLike[str] | nn.Module | Weights


def open_weights(
    source: Source, *, base: Source | None = None, allow_pickle: bool = False
) -> Weights:
    """Open the weights of a checkpoint. Headers are read now, values when they are asked for.

    Args:
        source: a directory as Hugging Face writes it, a ``.safetensors`` file, the directory of a
            LoRA adapter (its weights are then the effective ones, base + s·B·A), a GGUF file, or a
            model.
        base: what an adapter was trained on; None takes the directory that the adapter names.
        allow_pickle: read pickled weights (``.bin``, ``.pt``) too, restricted to tensors.

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
    path = _here(source)
    if (path / "adapter_config.json").is_file():
        from holdfast.io.adapter import open_adapter

        return open_adapter(path, base, allow_pickle=allow_pickle)
    if path.is_file() and path.suffix == ".gguf":
        from holdfast.io.gguf import open_gguf

        return open_gguf(path)
    if pickles := _pickles(path):
        if not allow_pickle:
            raise ValueError(
                f"{path} holds pickled weights, which can run code when they are loaded: save the "
                "model anew with save_pretrained, or allow them (allow_pickle=True, --allow-pickle)"
            )
        return _of_pickles(path, pickles)
    return _of_safetensors(path)


def _here(source: str | os.PathLike[str]) -> Path:
    """Where a checkpoint lies; one on the hub is downloaded, or found in the hub's cache."""
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
    except Exception as error:  # no such name, no network, no permission: each a class of its own
        first = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"{source} is neither a file or directory nor a model that the Hugging Face hub gives: "
            f"{first[:200]}"
        ) from error


class StoredWeights(Weights):
    """Weights in safetensors files."""

    def __init__(self, label: str, stored: Mapping[str, Stored], **about: Any) -> None:
        super().__init__(label, {n: Spec(s.shape, s.dtype) for n, s in stored.items()}, **about)
        self._stored = dict(stored)

    def read(
        self, name: str, begin: int = 0, end: int | None = None, scratch: Scratch | None = None
    ) -> Tensor:
        """The values of a tensor, flat, from one to another."""
        spec = self[name]
        end = spec.size if end is None else end
        into = scratch(f"read {id(self)}", end - begin, spec.dtype) if scratch else None
        return self._stored[name].read(begin, end, into)


class LiveWeights(Weights):
    """Weights that are tensors already: a model's, or those of a pickle."""

    def __init__(self, label: str, tensors: Mapping[str, Tensor], **about: Any) -> None:
        specs = {name: Spec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
        super().__init__(label, specs, **about)
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def read(
        self, name: str, begin: int = 0, end: int | None = None, scratch: Scratch | None = None
    ) -> Tensor:
        """The values of a tensor, flat, from one to another."""
        return self.tensors[name].reshape(-1)[begin:end].cpu()


def _of_safetensors(path: Path) -> Weights:
    stored: dict[str, Stored] = {}
    shards: dict[str, list[str]] = {}
    for file, wanted in safetensors_files(path).items():
        here = read_header(file)
        if wanted is not None and (lacking := sorted(wanted - set(here))):
            raise ValueError(f"{file} lacks tensors: {shorten(lacking)}")
        shards[file.name] = [name for name in here if wanted is None or name in wanted]
        stored.update((name, here[name]) for name in shards[file.name])
    return StoredWeights(str(path), stored, shards=shards, **_beside(path))


def _of_model(model: nn.Module) -> Weights:
    config: Any = getattr(model, "config", None)
    about = config.to_dict() if hasattr(config, "to_dict") else None
    label = type(model).__name__
    if hasattr(model, "peft_config"):
        from holdfast.io.adapter import of_peft_model

        return of_peft_model(model, label, about)
    return LiveWeights(label, _once(model.state_dict()), config=about)


def _once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the further names of tensors that have several."""
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() == 0 or place not in seen:
            kept[name] = tensor
        seen.add(place)
    return kept


def _pickles(path: Path) -> list[Path]:
    """The pickled weights that a path means, if it means no others."""
    if path.is_file():
        return [path] if path.suffix in PICKLES else []
    index = path / "pytorch_model.bin.index.json"
    if any(path.glob("model.safetensors*")):
        return []
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [file for file in files if not (path / Path(file).name).is_file()]
        if missing:
            raise FileNotFoundError(f"{path} lacks shards that its index names: {shorten(missing)}")
        return [path / Path(file).name for file in files]
    whole = path / "pytorch_model.bin"
    return [whole] if whole.is_file() else []


def _of_pickles(path: Path, files: list[Path]) -> Weights:
    tensors: dict[str, Tensor] = {}
    shards: dict[str, list[str]] = {}
    for file in files:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # it raises whatever the bytes lead it to
            raise ValueError(
                f"{file} is not a readable file of tensors (cut short, of an old format, or with "
                f"more in it): {str(error).splitlines()[0]}"
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
            raise ValueError(f"{file} holds no tensors by name")
        shards[file.name.replace("pytorch_model", "model").removesuffix(file.suffix)] = list(found)
        tensors.update(found)
    shards = {f"{stem}.safetensors": names for stem, names in shards.items()}
    return LiveWeights(str(path), tensors, shards=shards, **_beside(path))


def _beside(path: Path) -> dict[str, Any]:
    """Where a checkpoint lies, and the configuration beside it."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    return {"path": path, "config": config}
