"""Safetensors files and directories of them, memory-mapped."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors
from torch import Tensor

from holdfast._names import shorten


def map_safetensors(root: Path) -> dict[str, Tensor]:
    """Every tensor of a file, or of a directory as Hugging Face writes it, by name.

    Nothing is read but the headers: safetensors maps the files and hands out views.
    """
    tensors: dict[str, Tensor] = {}
    for file, wanted in _safetensors_files(root).items():
        tensors.update(_map_file(file, wanted))
    return tensors


def _safetensors_files(root: Path) -> dict[Path, set[str] | None]:
    """The files to read, each with the tensors wanted from it (None: all of them)."""
    if root.is_file():
        return {root: None}
    if not root.is_dir():
        raise FileNotFoundError(
            f"no such file or directory: {root} (a model on the Hugging Face hub is downloaded "
            "first: huggingface_hub.snapshot_download)"
        )
    index = root / "model.safetensors.index.json"
    if (root / "model.safetensors").is_file():
        return {root / "model.safetensors": None}
    if not index.is_file():
        raise FileNotFoundError(
            f"{root} holds neither model.safetensors nor model.safetensors.index.json; pickled "
            "weights (.bin, .pt) are not read: load and save the model anew with save_pretrained"
        )
    files: dict[Path, set[str]] = {}
    try:
        weight_map = json.loads(index.read_text())["weight_map"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
    for name, file in weight_map:
        # Shards lie beside their index; a path that leads elsewhere is not followed.
        if Path(file).name != file:
            raise ValueError(f"{index} names a shard outside its directory: {file!r}")
        files.setdefault(root / file, set()).add(name)
    missing = sorted(file.name for file in files if not file.is_file())
    if missing:
        raise FileNotFoundError(f"{root} lacks shards that its index names: {shorten(missing)}")
    return {**files}


def _map_file(file: Path, wanted: set[str] | None) -> dict[str, Tensor]:
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            if wanted is not None and not wanted <= names:
                raise ValueError(f"{file} lacks tensors: {shorten(sorted(wanted - names))}")
            return {name: opened.get_tensor(name) for name in sorted(wanted or names)}
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{file} is not a readable safetensors file (cut short, or another format): {error}"
        ) from error
