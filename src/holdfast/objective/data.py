"""Data for one pass over it: in which batches to read it, and a fingerprint of what is in it.

Two kinds: samples that can be fetched by index, which are batched here by length so that little
is spent on padding; and batches that come as they come.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from holdfast.objective.losses import IGNORED

__all__ = ["Batches", "Samples", "as_source", "pad_collate"]

Collate = Callable[[list[Any]], Any]
IndexedBatch = tuple[list[int], Callable[[], Any]]  # the samples' indices; reads the batch


class Samples:
    """Samples by index, read longest first in batches of about equal padded size."""

    def __init__(self, data: Any, collate: Collate, batch_size: int) -> None:
        self.data, self.collate, self.batch_size = data, collate, batch_size
        self.total: int | None = len(data)

    def __iter__(self) -> Iterator[IndexedBatch]:
        lengths = self._lengths()
        # Longest first: what does not fit into memory shows at once, not after hours.
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        budget = self.batch_size * max(lengths, default=1)
        start = 0
        while start < len(order):
            size = max(1, budget // max(1, lengths[order[start]]))
            yield (indices := order[start : start + size]), self._reader(indices)
            start += size

    def _reader(self, indices: list[int]) -> Callable[[], Any]:
        return lambda: self.collate([self.data[i] for i in indices])

    def _lengths(self) -> list[int]:
        columns = getattr(self.data, "column_names", None)  # datasets.Dataset: only that column
        if columns is not None and "input_ids" in columns:
            return [len(ids) for ids in self.data["input_ids"]]
        if len(self.data) and _token_count(self.data[0]) is not None:
            return [_token_count(self.data[i]) or 1 for i in range(len(self.data))]
        return [1] * len(self.data)

    def fingerprint(self) -> str | None:
        """Of the content; None if it cannot be told."""
        if hasattr(self.data, "with_format") and hasattr(self.data, "column_names"):
            return _arrow_fingerprint(self.data)
        return _fingerprint(self.data[i] for i in range(len(self.data)))

    def probe(self) -> str | None:
        """A fingerprint of a few samples, to notice data that changed under a key of the user's."""
        n = len(self.data)
        return _fingerprint(self.data[i] for i in sorted({0, n // 3, n // 2, n - 1}))


class Batches:
    """Batches as they come, in their order."""

    total: int | None = None

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[IndexedBatch]:
        start = 0
        for batch in self.data:
            indices = list(range(start, start + _batch_length(batch)))
            yield indices, _reader_of(batch)
            start += len(indices)

    def fingerprint(self) -> str | None:
        """Of the content; None if it can be read only once, or not be told."""
        return None if iter(self.data) is self.data else _fingerprint(self.data)

    def probe(self) -> str | None:
        """Of the first batch."""
        if iter(self.data) is self.data:
            return None
        return _fingerprint(batch for batch, _ in zip(self.data, range(1), strict=False))


def as_source(data: Any, collate: Collate | None, batch_size: int) -> Samples | Batches:
    """What the user gave, as one of the two kinds.

    A DataLoader over indexable data is opened: its dataset is read in the dataset's own order,
    whatever order the loader shuffles to.
    """
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset):
            return Batches(data)
        return Samples(data.dataset, collate or data.collate_fn, data.batch_size or batch_size)
    by_index = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    is_dataset = isinstance(data, Dataset) or hasattr(data, "column_names")
    if by_index and (collate is not None or is_dataset):
        if collate is None:
            first = data[0] if len(data) else None
            collate = default_collate if _token_count(first) is None else pad_collate
        return Samples(data, collate, batch_size)
    if not isinstance(data, Iterable):
        raise TypeError(
            "data must be a DataLoader, a dataset, or an iterable of batches, got "
            f"{type(data).__name__}"
        )
    return Batches(data)


def pad_collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Pad token sequences to the longest: labels with −100, the attention mask and others with 0.

    Columns that are not numbers are left out. Without an attention mask one is made.

    Example:
        >>> pad_collate([{"input_ids": [5, 6]}, {"input_ids": [7]}])["attention_mask"]
        tensor([[1, 1],
                [1, 0]])
    """
    batch = {}
    samples = [{"attention_mask": [1] * len(s["input_ids"]), **s} for s in samples]
    for name, first in samples[0].items():
        values = [torch.as_tensor(s[name]) for s in samples if not isinstance(first, str)]
        if not values or (values[0].is_floating_point() and values[0].dim() > 1):
            continue
        if values[0].dim() == 0:
            batch[name] = torch.stack(values)
        else:
            fill = IGNORED if name == "labels" else 0
            batch[name] = torch.nn.utils.rnn.pad_sequence(values, True, fill)
    return batch


def _batch_length(batch: Any) -> int:
    if isinstance(batch, Mapping):
        return _batch_length(next(iter(batch.values())))
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor):
        return len(batch[0])
    return len(batch)


def _reader_of(batch: Any) -> Callable[[], Any]:
    return lambda: tuple(batch) if isinstance(batch, list) else batch


def _token_count(sample: Any) -> int | None:
    if isinstance(sample, Mapping) and "input_ids" in sample:
        return len(sample["input_ids"])
    return None


def _fingerprint(items: Iterable[Any]) -> str | None:
    digest = hashlib.sha256()
    try:
        for item in items:
            _feed(digest, item)
    except TypeError:
        return None
    return digest.hexdigest()[:32]


def _arrow_fingerprint(dataset: Any) -> str:
    """Of a ``datasets.Dataset``, whose own fingerprint differs from one process to the next."""
    import pyarrow as pa  # comes with datasets

    digest = hashlib.sha256()
    for table in dataset.with_format("arrow").iter(1000):
        bare = table.replace_schema_metadata(None).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, bare.schema) as writer:
            writer.write_table(bare)
        digest.update(sink.getvalue())
    return digest.hexdigest()[:32]


def _feed(digest: Any, item: Any) -> None:
    """Feed a value's type, shape and content to the digest."""
    if isinstance(item, Mapping):
        for name in sorted(item):
            digest.update(f"{{{name}:".encode())
            _feed(digest, item[name])
    elif isinstance(item, Tensor):
        _feed(digest, item.detach().cpu().contiguous().view(torch.uint8).numpy())
        digest.update(f"{item.dtype}{tuple(item.shape)}".encode())
    elif isinstance(item, str | int | float | bool | bytes | None):
        digest.update(f"{type(item).__name__}{item!r};".encode())
    elif isinstance(item, list | tuple):
        try:  # token ids, nearly always: at the speed of C
            digest.update(array("q", item).tobytes())
        except (TypeError, OverflowError):
            for x in item:
                _feed(digest, x)
        digest.update(b"]")
    elif isinstance(item, np.ndarray | np.generic) or hasattr(item, "__array_interface__"):
        values = np.ascontiguousarray(item)
        digest.update(f"{values.dtype}{values.shape}".encode())
        digest.update(values.tobytes())
    else:
        raise TypeError(f"cannot tell the content of {type(item).__name__}")
