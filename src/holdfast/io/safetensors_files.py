"""Safetensors files: memory-mapped, read in slices, written as a stream."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from holdfast._torch.names import shorten

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LETTERS = {dtype: letters for letters, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """The position of a tensor in a file."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, begin: int, end: int, into: Tensor | None = None) -> Tensor:
        """Return the values ``begin`` to ``end`` of the flattened tensor, in ``into`` if given."""
        values = torch.empty(end - begin, dtype=self.dtype) if into is None else into
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.offset + begin * self.dtype.itemsize)
            left = values.view(torch.uint8).numpy().data
            while left and (count := file.readinto(left)):  # a read may be partial
                left = left[count:]
        if left:
            raise ValueError(f"{self.file} was truncated while it was read")
        return values


def read_header(file: Path) -> dict[str, Stored]:
    """Return every tensor of a file by name, in the order of the file."""
    with _opened(file):  # validates the whole file
        pass
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    if unknown := sorted({entry["dtype"] for entry in header.values()} - set(_DTYPES)):
        raise ValueError(f"{file} holds tensors of unsupported dtypes: {shorten(unknown)}")
    stored = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        offset = 8 + length + entry["data_offsets"][0]
        stored[name] = Stored(file, offset, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return stored


def header_for(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file with these tensors, and the offset of each tensor."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        offsets[name] = begin
        entries[name] = {"dtype": _LETTERS[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the values are aligned to 8 bytes
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


def map_safetensors(root: Path) -> dict[str, Tensor]:
    """Return every tensor of a file, or of a directory in the Hugging Face format, by name.

    Only the headers are read: the tensors are views of memory-mapped files.
    """
    tensors: dict[str, Tensor] = {}
    for file, wanted in safetensors_files(root).items():
        with _opened(file) as opened:
            names = wanted_names(file, opened.keys(), wanted)
            tensors |= {name: opened.get_tensor(name) for name in sorted(names)}
    return tensors


def wanted_names(file: Path, held: Iterable[str], wanted: set[str] | None) -> list[str]:
    """Return the tensors to read from a file, in its order; raise ValueError if one is missing."""
    held = list(held)
    if missing := sorted((wanted or set()) - set(held)):
        raise ValueError(f"{file} lacks the tensors {shorten(missing)}")
    return [name for name in held if wanted is None or name in wanted]


def safetensors_files(root: Path) -> dict[Path, set[str] | None]:
    """Return the files to read with the names of their tensors (None: all tensors)."""
    if root.is_file():
        return {root: None}
    if not root.is_dir():
        raise FileNotFoundError(
            f"no such file or directory: {root} (download a model on the Hugging Face hub first, "
            "with huggingface_hub.snapshot_download)"
        )
    index = root / "model.safetensors.index.json"
    if (root / "model.safetensors").is_file():
        return {root / "model.safetensors": None}
    if not index.is_file():
        raise FileNotFoundError(
            f"{root} has neither model.safetensors nor model.safetensors.index.json; pickled "
            "weights (.bin, .pt) are not read: save the model again with save_pretrained"
        )
    files: dict[Path, set[str]] = {}
    try:
        weight_map = json.loads(index.read_text())["weight_map"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
    for name, file in weight_map:
        # Shards must be next to their index; other paths are not followed.
        if Path(file).name != file:
            raise ValueError(f"{index} names a shard outside its directory: {file!r}")
        files.setdefault(root / file, set()).add(name)
    if missing := sorted(file.name for file in files if not file.is_file()):
        raise FileNotFoundError(f"{root} lacks the shards {shorten(missing)} of its index")
    return {**files}


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            yield opened
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{file} is not a readable safetensors file (truncated, or another format): {error}"
        ) from error
