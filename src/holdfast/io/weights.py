"""The named tensors of a model, which are read in slices, on all cores, in bounded memory."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from holdfast._torch.dtypes import wide

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_THREADS = 16  # more do not read faster, and each holds its own slice
_MOST_FILES = 4  # open per thread: shards of a few models


class Scratch(threading.local):
    """Buffers and open files that each thread reuses for every slice.

    New memory is mapped page by page by the system, which takes as long as reading a file.

    >>> scratch = Scratch()
    >>> scratch("sum", 2, torch.int64).data_ptr() == scratch("sum", 2, torch.float64).data_ptr()
    True
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self._files = _OpenFiles()

    def __call__(self, use: str, size: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor; it overwrites the previous tensor of the same use."""
        last = self._last.get(use)
        if last is not None and len(last) == size and last.dtype == dtype:
            return last  # most slices are of one size
        needed = size * dtype.itemsize
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < needed:
            buffer = self._buffers[use] = torch.empty(needed, dtype=torch.uint8)
        self._last[use] = buffer[:needed].view(dtype)
        return self._last[use]

    def cast(self, use: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        if values.dtype == dtype:
            return values
        return self(use, len(values), dtype).copy_(values)

    def opened(self, path: Path) -> FileIO:
        """Return a file to read. The last few stay open, until the thread or the scratch ends."""
        return self._files[path]


class _OpenFiles(dict[Path, FileIO]):
    """The files that were opened last. A system limits how many there are."""

    def __missing__(self, path: Path) -> FileIO:
        if len(self) == _MOST_FILES:
            self.pop(next(iter(self))).close()
        self[path] = FileIO(path)
        return self[path]

    def __del__(self) -> None:
        for file in self.values():
            file.close()


def widened(before: Tensor, after: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Return two slices in their common dtype, at least float32."""
    dtype = wide(before, after)
    return scratch.cast("before", before, dtype), scratch.cast("after", after, dtype)


class Workers:
    """Threads that process slices, until the end of a ``with`` block.

    One thread processes a slice completely, so reading, arithmetic and writing overlap and a slice
    stays in its core's cache.

    >>> with Workers() as workers:
    ...     list(workers.map(lambda n: n * n, range(4)))
    [0, 1, 4, 9]
    """

    def __enter__(self) -> "Workers":
        self._set_before = torch.get_num_threads()
        self._threads = min(self._set_before, _MOST_THREADS)
        # Within a slice torch must use one thread, because all cores are busy with slices.
        self._pool = ThreadPoolExecutor(
            self._threads, initializer=torch.set_num_threads, initargs=(1,)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._set_before)  # new threads inherit the number that was set last

    def map(self, do: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield the results of a function, in the order of the items, with a bounded queue."""
        if self._threads == 1:
            yield from map(do, items)
            return
        pending: deque[Future[Result]] = deque()
        for item in items:
            pending.append(self._pool.submit(do, item))
            if len(pending) > 2 * self._threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor. The weights of an adapter have the dtype of its base."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize


class Weights(dict[str, Spec]):
    """The named tensors of a checkpoint: their shapes, and their values in slices.

    ``label`` is its name in messages, ``config`` the model's configuration. A checkpoint on disk
    also has a ``path`` and ``shards``: its files with the names of their tensors.
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
        super().__init__(specs)
        self.label, self.path, self.config = label, path, dict(config or {})
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
