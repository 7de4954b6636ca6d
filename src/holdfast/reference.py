"""The pretrained weights θ*: by parameter name, wherever they live.

>>> import torch, holdfast
>>> model = torch.nn.Linear(3, 2)
>>> reference = holdfast.Reference.of(model)          # a copy of the weights as they are now
>>> _ = model.weight.data.add_(1.0)
>>> round(reference.distance(model).total, 4)         # ‖θ − θ*‖ = √6
2.4495
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from holdfast._fingerprint import fingerprint
from holdfast._names import align, shorten, strip_wrappers

__all__ = ["Distance", "Reference"]


@dataclass(frozen=True)
class Distance:
    """How far a model is from its pretrained weights, over the parameters that have them.

    Attributes:
        total: ‖θ − θ*‖, the Euclidean distance over all of them.
        relative: total / ‖θ*‖.
        per_parameter: the same distance for each parameter, by the model's own name.
        relative_per_parameter: each one's distance over its own pretrained norm.
        without_anchor: parameters that have no pretrained counterpart and are not counted.
    """

    total: float
    relative: float
    per_parameter: dict[str, float]
    relative_per_parameter: dict[str, float]
    without_anchor: tuple[str, ...]


class Reference(Mapping[str, Tensor]):
    """The pretrained weights θ*, a read-only mapping from parameter name to tensor.

    Make one with :meth:`of` (from a live model, before training) or :meth:`open` (from
    safetensors files, memory-mapped). Tensors keep their own dtype: an anchor in the
    checkpoint's dtype is exact. They must not be modified.

    Args:
        tensors: name → tensor. The tensors are used as they are, not copied.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise TypeError(
                    "anchors must map parameter names to tensors, got "
                    f"{name!r}: {type(tensor).__name__}"
                )
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._owners: Mapping[Tensor, str] = {}
        self._path: Path | None = None

    @classmethod
    def of(cls, model: nn.Module, *, device: torch.device | str | None = None) -> Reference:
        """Copy a model's parameters as they are now.

        The result also knows the parameters by identity, so it serves optimizers that are given
        tensors without names.

        Args:
            model: the model, holding its pretrained weights.
            device: where to keep the copy; None keeps each tensor beside its parameter.
        """
        tensors: dict[str, Tensor] = {}
        owners = WeakTensorKeyDictionary()
        for name, p in model.named_parameters():
            plain = strip_wrappers(name)
            tensors[plain] = p.detach().to(device=device, copy=True)
            owners[p] = plain
        if not tensors:
            raise ValueError(f"{type(model).__name__} has no parameters to refer to")
        reference = cls(tensors)
        reference._owners = owners
        return reference

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, device: torch.device | str | None = None
    ) -> Reference:
        """Open the weights in a safetensors file, or in a directory that holds them.

        A directory is read as Hugging Face writes it: ``model.safetensors``, or shards named by
        ``model.safetensors.index.json``.

        Args:
            path: a ``.safetensors`` file or a directory.
            device: None leaves the weights on disk, memory-mapped: pages are read when they are
                used and can be dropped again. So keep the files: do not save a tuned model over
                them. A device reads them into its memory.
        """
        root = Path(path)
        tensors: dict[str, Tensor] = {}
        for file, wanted in _safetensors_files(root).items():
            tensors.update(_map_file(file, wanted))
        if device is not None:
            # copy: a mapped tensor is on "cpu" already, but reading it in is what was asked for.
            tensors = {name: t.to(device, copy=True) for name, t in tensors.items()}
        reference = cls(tensors)
        reference._path = root if device is None else None
        return reference

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights to one safetensors file, whole or not at all."""
        target = Path(path)
        handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".safetensors.tmp")
        os.close(handle)
        try:
            save_file({k: t.contiguous().cpu() for k, t in self.items()}, temporary)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        size = sum(t.numel() for t in self.values())
        where = f"mapped from {self._path}" if self._path else "in memory"
        return f"Reference({len(self)} tensors, {size:,} weights, {where})"

    def __getstate__(self) -> dict[str, Any]:
        # Identity does not outlive the process; a mapping is made anew from its path.
        tensors = {} if self._path else self._tensors
        return {"_tensors": tensors, "_owners": {}, "_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._path:
            self._tensors = Reference.open(self._path)._tensors

    def fingerprint(self) -> str:
        """A short text that says whether two references hold the same weights.

        It covers shapes and float32 values in the order of the names, not the names themselves,
        and is the same on every device and after saving and opening again.
        """
        return fingerprint((tuple(self[n].shape), self[n]) for n in sorted(self))

    def distance(self, model: nn.Module) -> Distance:
        """How far ``model`` is from these weights. Fails if they share no parameter."""
        names, params = zip(*model.named_parameters(), strict=True)
        anchors = self.resolve(params, names)
        pairs = [(n, p, a) for n, p, a in zip(names, params, anchors, strict=True) if a is not None]
        distances = {n: distance(p, a) for n, p, a in pairs}
        norms = {n: float(torch.linalg.vector_norm(a.float())) for n, _, a in pairs}
        total, norm = math.hypot(*distances.values()), math.hypot(*norms.values())
        return Distance(
            total=total,
            relative=_ratio(total, norm),
            per_parameter=distances,
            relative_per_parameter={n: _ratio(d, norms[n]) for n, d in distances.items()},
            without_anchor=tuple(n for n, a in zip(names, anchors, strict=True) if a is None),
        )

    def resolve(self, params: Sequence[Tensor], names: Sequence[str] | None) -> list[Tensor | None]:
        """The anchor of each parameter, by identity where known, else by name; None without one.

        Raises ValueError, listing names, if not one parameter has an anchor or a shape differs.
        """
        if names is None:
            if not self._owners:
                raise ValueError(
                    "anchors are found by name, but the parameters have none: pass "
                    "model.named_parameters() (or groups of them), or anchors=Reference.of(model)"
                )
            keys = [self._owners.get(p) for p in params]
            labels: Sequence[str] = [key or f"parameter {i}" for i, key in enumerate(keys)]
        else:
            by_name = align(names, self)
            keys = [
                self._owners.get(p) or by_name.get(n) for p, n in zip(params, names, strict=True)
            ]
            labels = names
        if not any(keys):
            raise ValueError(
                "no parameter has an anchor. Parameters: "
                f"{shorten(labels)}. Anchors: {shorten(list(self))}"
            )
        anchors = [None if key is None else self[key] for key in keys]
        wrong = [
            f"{label} is {tuple(p.shape)}, its anchor {tuple(a.shape)}"
            for label, p, a in zip(labels, params, anchors, strict=True)
            if a is not None and a.shape != p.shape
        ]
        if wrong:
            raise ValueError(f"anchors of the wrong shape: {shorten(wrong, '; ')}")
        return anchors


def distance(param: Tensor, anchor: Tensor) -> float:
    """‖θ − θ*‖ of one parameter, in at least float32."""
    dtype = torch.promote_types(torch.promote_types(param.dtype, anchor.dtype), torch.float32)
    difference = param.detach().to(dtype) - anchor.to(device=param.device, dtype=dtype)
    return float(torch.linalg.vector_norm(difference))


def _ratio(distance: float, norm: float) -> float:
    if norm > 0:
        return distance / norm
    return 0.0 if distance == 0 else math.inf


def _safetensors_files(root: Path) -> dict[Path, set[str] | None]:
    """The files to read, each with the tensors wanted from it (None: all of them)."""
    if root.is_file():
        return {root: None}
    if not root.is_dir():
        raise FileNotFoundError(f"no such file or directory: {root}")
    index = root / "model.safetensors.index.json"
    if (root / "model.safetensors").is_file():
        return {root / "model.safetensors": None}
    if not index.is_file():
        raise FileNotFoundError(
            f"{root} holds neither model.safetensors nor model.safetensors.index.json"
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
