"""Open the weights of a checkpoint in any format, to read them in slices and constant memory."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from holdfast.builtin import located_model
from holdfast.io.adapter import base_of, is_adapter, is_plain_lora, of_peft_model, open_adapter
from holdfast.io.files import first_line
from holdfast.io.gguf import open_gguf
from holdfast.io.hub import check_hub, is_hub_name
from holdfast.io.safetensors_files import StoredWeights, shards_of
from holdfast.io.untrusted import read_object
from holdfast.io.weights import LiveWeights, Weights

PICKLES = (".bin", ".pt", ".pth", ".ckpt")

#: A directory, file or hub name of a checkpoint, a model in memory, or open weights.
WeightsSource: TypeAlias = str | os.PathLike[str] | nn.Module | Weights


def open_weights(
    source: WeightsSource, *, base: WeightsSource | None = None, allow_pickle: bool = False
) -> Weights:
    """Open the weights of a checkpoint. Headers are read now, values on access.

    Args:
        source: a directory in the Hugging Face format, a ``.safetensors`` file, the directory of a
            LoRA adapter (read as the effective weights, base + s·B·A), that of another adapter
            (its model is loaded, and PEFT merges it), a GGUF file, or a model.
        base: the model under an adapter, or under that of a quantized model. If None, the directory
            that the adapter names is used.
        allow_pickle: also read pickled weights (``.bin``, ``.pt``), restricted to tensors.

    >>> weights = open_weights(nn.Linear(3, 2))
    >>> {name: spec.shape for name, spec in weights.items()}, weights.read("bias", 0, 1).shape
    ({'weight': (2, 3), 'bias': (2,)}, torch.Size([1]))
    """
    if isinstance(source, Weights):
        return source
    if isinstance(source, nn.Module):
        return _of_model(source, base)
    path = _local_path(source)
    if is_adapter(path):
        if base is None:
            base = base_of(path)
            if not Path(base).exists():
                raise FileNotFoundError(
                    f"the base {base} of {path} is not on disk: pass its base model"
                )
        under = open_weights(base, allow_pickle=allow_pickle)
        if is_plain_lora(path):
            return open_adapter(path, under)
        from holdfast.io.merged_adapter import merged_adapter  # it loads models, with this module

        return merged_adapter(path, under, allow_pickle=allow_pickle)
    if path.is_file() and path.suffix == ".gguf":
        return open_gguf(path)
    if pickles := _pickles(path):
        if not allow_pickle:
            raise ValueError(
                f"{path} holds pickled weights, which can execute code when loaded: save the model "
                "again with save_pretrained, or allow them (allow_pickle=True, --allow-pickle)"
            )
        return _of_pickles(path, pickles)
    return StoredWeights(path, _config_in(path))


def _local_path(source: str | os.PathLike[str]) -> Path:
    path = Path(located_model(source))
    if path.exists() or not isinstance(source, str) or not is_hub_name(source):
        return path
    online = check_hub(source, "model")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return path
    wanted = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(source, allow_patterns=wanted, local_files_only=not online))
    except Exception as error:  # no such name, no network, no permission: each has its own type
        raise FileNotFoundError(
            f"{source} is neither a local file or directory nor a model on the hub: "
            f"{first_line(error)}"
        ) from error


def _of_model(model: nn.Module, base: WeightsSource | None = None) -> Weights:
    config: Any = getattr(model, "config", None)
    about = config.to_dict() if hasattr(config, "to_dict") else None
    label = type(model).__name__
    if hasattr(model, "peft_config"):
        is_packed = getattr(model, "is_quantized", False)
        under = open_weights(base) if base is not None and is_packed else None
        return of_peft_model(model, label, about, under)
    return LiveWeights(label, _without_aliases(model.state_dict()), config=about)


def _without_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first: dict[Any, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device)
        first.setdefault(place if tensor.numel() else name, (name, tensor))
    return dict(first.values())


def _pickles(path: Path) -> list[Path]:
    """Return the files of pickled weights, unless there are safetensors."""
    if path.is_file():
        return [path] if path.suffix in PICKLES else []
    whole, index = path / "pytorch_model.bin", path / "pytorch_model.bin.index.json"
    if any(path.glob("model.safetensors*")):
        return []
    if index.is_file():
        return sorted(shards_of(index))
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
                f"objects in it): {first_line(error)}"
            ) from error
        for key in ("state_dict", "model"):  # where training scripts put the weights
            if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
                loaded = loaded[key]
        named = loaded if isinstance(loaded, dict) else {}
        found = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        if not found:
            raise ValueError(f"{file} holds no named tensors")
        stem = file.name.replace("pytorch_model", "model").removesuffix(file.suffix)
        shards[f"{stem}.safetensors"] = list(found)
        tensors.update(found)
    return LiveWeights(str(path), tensors, shards=shards, path=path, config=_config_in(path))


def _config_in(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    return read_object(file) if file.is_file() else {}
