"""Safetensors files: memory-mapped, read in slices, written as a stream."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from holdfast._torch.names import shorten
from holdfast.io.untrusted import read_object
from holdfast.io.weights import Scratch, Spec, Weights

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


class StoredWeights(Weights):
    """Weights in safetensors files, which are read without mapping them: memory stays constant."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        specs: dict[str, Spec] = {}
        shards: dict[str, list[str]] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        for file, wanted in safetensors_files(path).items():
            here = _read_header(file)
            shards[file.name] = _wanted_names(file, here, wanted)
            for name in shards[file.name]:
                specs[name], offset = here[name]
                self._places[name] = (file, offset)
        super().__init__(str(path), specs, shards=shards, path=path, config=config)

    def _read(self, name: str, begin: int, end: int, scratch: Scratch | None) -> Tensor:
        (path, offset), dtype = self._places[name], self[name].dtype
        scratch = scratch or Scratch()
        values = scratch(f"read {id(self)}", end - begin, dtype)
        content, file = values.view(torch.uint8).numpy().data, scratch.opened(path)
        file.seek(offset + begin * dtype.itemsize)
        while content:  # the system reads at most 2 GB at once
            count = file.readinto(content)
            if not count:
                raise ValueError(f"{path} was truncated while it was read")
            content = content[count:]
        return values


def _read_header(file: Path) -> dict[str, tuple[Spec, int]]:
    """Return the shape, dtype and offset of every tensor, in the order of the file."""
    with _opened(file):  # validates the whole file
        pass
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    if unknown := sorted({entry["dtype"] for entry in header.values()} - set(_DTYPES)):
        raise ValueError(f"{file} holds tensors of unsupported dtypes: {shorten(unknown)}")
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {
        name: (Spec(tuple(e["shape"]), _DTYPES[e["dtype"]]), 8 + length + e["data_offsets"][0])
        for name, e in entries
    }


def header_for(specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file with these tensors, and the offset of each tensor."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + spec.bytes
        offsets[name] = begin
        dtype = _LETTERS[spec.dtype]
        entries[name] = {"dtype": dtype, "shape": spec.shape, "data_offsets": [begin, end]}
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
            names = _wanted_names(file, opened.keys(), wanted)
            tensors |= {name: opened.get_tensor(name) for name in sorted(names)}
    return tensors


def _wanted_names(file: Path, held: Iterable[str], wanted: set[str] | None) -> list[str]:
    held = list(held)
    if missing := sorted((wanted or set()) - set(held)):
        raise ValueError(f"{file} lacks the tensors {shorten(missing)}")
    return [name for name in held if wanted is None or name in wanted]


def safetensors_files(root: Path) -> Mapping[Path, set[str] | None]:
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
    return shards_of(index)


def shards_of(index: Path) -> dict[Path, set[str]]:
    files: dict[Path, set[str]] = {}
    try:
        weight_map = read_object(index)["weight_map"].items()
    except (KeyError, AttributeError):
        raise ValueError(f"{index} is not an index of shards: it has no weight_map") from None
    for name, file in weight_map:
        # Shards must be next to their index; other paths are not followed.
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} names a shard outside its directory: {file!r}")
        files.setdefault(index.parent / file, set()).add(name)
    if missing := sorted(file.name for file in files if not file.is_file()):
        raise FileNotFoundError(f"{index.parent} lacks the shards {shorten(missing)} of its index")
    return files


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    open(file, "rb").close()  # its own error names the file if it cannot be read
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            yield opened
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{file} is not a readable safetensors file (truncated, or another format): {error}"
        ) from error
