"""The interface to the named tensors of a model, which are read in slices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.io.slices import Scratch

__all__ = ["LiveWeights", "Spec", "Weights"]


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor. The weights of an adapter have the dtype of its base."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


class Weights(Mapping[str, Spec]):
    """The named tensors of a checkpoint: their shapes, and their values in slices.

    Args:
        label: the name in messages.
        specs: name → shape and dtype.
        config: the model's configuration, if there is one.
        path: the file or directory of the checkpoint, if it is on disk.
        shards: the files of the checkpoint with their tensors, if it is on disk.
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
        """Return the values ``begin`` to ``end`` of the flattened tensor. Do not modify them.

        They have the tensor's dtype, or float32 if they are computed (adapters, GGUF). With
        ``scratch``, this thread's next read of these weights may overwrite them.
        """
        return self._read(name, begin, self[name].size if end is None else end, scratch)

    def _read(self, name: str, begin: int, end: int, scratch: Scratch | None) -> Tensor:
        raise NotImplementedError

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor in its shape."""
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


class LiveWeights(Weights):
    """Weights in memory: those of a model, or of a pickled file."""

    def __init__(self, label: str, tensors: Mapping[str, Tensor], **about: Any) -> None:
        specs = {name: Spec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
        super().__init__(label, specs, **about)
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def _read(self, name: str, begin: int, end: int, scratch: Scratch | None) -> Tensor:
        return self.tensors[name].reshape(-1)[begin:end].cpu()
