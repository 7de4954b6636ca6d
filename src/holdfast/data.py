"""Data sources: any dataset, DataLoader or iterable of batches, as batches for one pass.

An :class:`IndexedSource` reads samples by index and batches them by length, to save padding. A
:class:`StreamSource` yields batches in the order in which they come.
"""

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from holdfast._torch.batch import batch_length, normalized
from holdfast._torch.fingerprint import arrow_fingerprint, content_fingerprint
from holdfast.losses import IGNORED

Collate = Callable[[list[Any]], Any]
IndexedBatch = tuple[list[int], Callable[[], Any]]  # indices of samples; reads the batch


class IndexedSource:
    """Samples read by index, longest first, in batches of about equal padded size.

    Attributes:
        tokens: fill batches of token sequences up to this size, even if ``batch_size`` of the
            longest have fewer tokens.
    """

    tokens = 0

    def __init__(self, data: Any, collate: Collate, batch_size: int) -> None:
        self.data, self.collate, self.batch_size = data, collate, batch_size
        self.total: int | None = len(data)

    def __iter__(self) -> Iterator[IndexedBatch]:
        lengths = self._lengths()
        # Longest first: a sample that does not fit into memory fails at once, not after hours.
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        budget = self.batch_size * max(lengths, default=1)
        if any(length != 1 for length in lengths):
            budget = max(budget, self.tokens)
        start = 0
        while start < len(order):
            size = max(1, budget // max(1, lengths[order[start]]))
            indices = order[start : start + size]
            yield indices, partial(self._read, indices)
            start += size

    def _read(self, indices: list[int]) -> Any:
        return normalized(self.collate([self.data[i] for i in indices]))

    def _lengths(self) -> list[int]:
        if "input_ids" in (getattr(self.data, "column_names", None) or ()):
            return [len(ids) for ids in self.data["input_ids"]]  # reads only that column
        if len(self.data) and _token_count(self.data[0]) is not None:
            return [_token_count(self.data[i]) or 1 for i in range(len(self.data))]
        return [1] * len(self.data)

    def fingerprint(self) -> str | None:
        """A fingerprint of the content; None if there is none."""
        if is_table(self.data):
            return arrow_fingerprint(self.data)
        return content_fingerprint(self.data[i] for i in range(len(self.data)))

    def probe(self) -> str | None:
        """A fingerprint of a few samples, to detect data that changed under the same data_key."""
        n = len(self.data)
        few = sorted({0, n // 3, n // 2, n - 1}) if n else []
        return content_fingerprint(self.data[i] for i in few)


class StreamSource:
    """Batches in the order in which they come."""

    total: int | None = None
    collate: Collate | None = None

    def __init__(self, data: Iterable[Any]) -> None:
        self.once = iter(data) is data
        self.first = list(itertools.islice(iter(data), 1)) if self.once else []
        self.data = itertools.chain(self.first, data) if self.once else data

    def __iter__(self) -> Iterator[IndexedBatch]:
        start = 0
        for batch in self.data:
            indices = list(range(start, start + batch_length(batch)))
            yield indices, partial(normalized, batch)
            start += len(indices)

    def fingerprint(self) -> str | None:
        """A fingerprint of the content; None if there is none or the data can be read only once."""
        return None if self.once else content_fingerprint(self.data)

    def probe(self) -> str | None:
        """A fingerprint of the first batch."""
        return content_fingerprint(self.first if self.once else itertools.islice(self.data, 1))


Source = IndexedSource | StreamSource


def as_source(
    data: Any, collate: Collate | None, batch_size: int, pad_id: int | None = None
) -> Source:
    """The source for a user's data.

    The dataset of a DataLoader is read in order, without shuffling, and by index if possible.
    """
    if isinstance(data, DataLoader):
        if not _reads_by_index(data):
            return StreamSource(data)
        return IndexedSource(
            data.dataset, collate or data.collate_fn, data.batch_size or batch_size
        )
    by_index = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, Mapping) or not (by_index or isinstance(data, Iterable)):
        raise TypeError(
            "data must be a DataLoader, a dataset (one split of it), or an iterable of batches, "
            f"got {type(data).__name__}"
        )
    first = data[0] if collate is None and by_index and len(data) else None
    is_dataset = isinstance(data, Dataset) or hasattr(data, "column_names")
    if by_index and (collate is not None or is_dataset or _is_token_sample(first)):
        if collate is None:
            padded = partial(pad_collate, pad_id=pad_id or 0)
            collate = default_collate if _token_count(first) is None else padded
        return IndexedSource(data, collate, batch_size)
    if collate is not None:
        return StreamSource(_Chunks(data, collate, batch_size))
    return StreamSource(data)


def number_of_samples(data: Any, collate: Collate | None = None) -> int | None:
    """How many samples data has; None if that is not known, as of batches in a stream."""
    if isinstance(data, DataLoader):
        return len(cast(Sized, data.dataset)) if _reads_by_index(data) else None
    if isinstance(data, Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return None  # what is wrong with a mapping is said when it is read, if it is
    source = as_source(data, collate, 1)
    return len(source.data) if isinstance(source, IndexedSource) else None


def _reads_by_index(loader: DataLoader[Any]) -> bool:
    batched = loader.batch_size is not None or loader.batch_sampler is not None
    return batched and not isinstance(loader.dataset, IterableDataset)


def is_table(data: Any) -> bool:
    """Whether data is a ``datasets.Dataset`` without a transform, which may drop added columns."""
    return hasattr(data, "add_column") and data.format["type"] != "custom"


def pad_collate(samples: Sequence[Mapping[str, Any]], pad_id: int = 0) -> dict[str, Tensor]:
    """Pad token sequences on the right to the longest: ids with ``pad_id``, labels with −100.

    Columns that are not numeric are dropped. An attention mask is added if there is none, unless
    ``position_ids`` that start again separate packed samples; ``label`` and ``label_ids`` become
    ``labels``.

    Example:
        >>> pad_collate([{"input_ids": [5, 6]}, {"input_ids": [7]}])["attention_mask"]
        tensor([[1, 1],
                [1, 0]])
    """
    for s in samples:
        labels, ids = s.get("labels"), s["input_ids"]
        if not isinstance(labels, list | tuple):
            continue
        # Floats are one vector per sample (multi_label, regression), integers one label per token.
        if labels and isinstance(labels[0], float):
            if len(labels) != (width := len(samples[0]["labels"])):
                raise ValueError(
                    f"two samples have {width} and {len(labels)} labels, but each needs one number "
                    "per output of the model"
                )
        elif len(labels) != len(ids):
            raise ValueError(f"a sample has {len(labels)} labels for {len(ids)} input_ids")
    fills = {"labels": IGNORED, "input_ids": pad_id}
    batch: dict[str, Tensor] = {}
    for column in samples[0]:
        name = "labels" if column in ("label", "label_ids") else column
        try:
            batch[name] = _padded([s[column] for s in samples], fills.get(name, 0))
        except (TypeError, ValueError, RuntimeError):
            continue
    is_packed = any(0 in sample.get("position_ids", ())[1:] for sample in samples)
    if "attention_mask" not in batch and not is_packed:
        lengths = torch.tensor([len(s["input_ids"]) for s in samples])
        batch["attention_mask"] = (torch.arange(max(lengths)) < lengths[:, None]).long()
    return batch


def _padded(values: list[Any], fill: int) -> Tensor:
    """Stack numbers, or pad sequences on the right."""
    if isinstance(values[0], int | float):
        return torch.tensor(values)
    if all(isinstance(value, list) and value and type(value[0]) is int for value in values):
        return _padded_lists(values, fill)
    tensors = [torch.as_tensor(value) for value in values]
    if tensors[0].dim() == 0:
        return torch.stack(tensors)
    return torch.nn.utils.rnn.pad_sequence(tensors, True, fill)


def _padded_lists(values: list[list[int]], fill: int) -> Tensor:
    width = max(map(len, values))
    rows = [value + [fill] * (width - len(value)) for value in values]
    try:  # three times faster than torch.tensor
        flat = array("q", itertools.chain.from_iterable(rows))
    except TypeError:  # a list that begins with an integer may hold other numbers
        return torch.tensor(rows)
    return torch.frombuffer(flat, dtype=torch.int64).view(len(rows), width)


class _Chunks:
    """Collates a stream of samples into batches."""

    def __init__(self, data: Iterable[Any], collate: Collate, batch_size: int) -> None:
        self.data, self.collate, self.batch_size = data, collate, batch_size

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.data)
        while chunk := list(itertools.islice(samples, self.batch_size)):
            yield self.collate(chunk)


def _token_count(sample: Any) -> int | None:
    if isinstance(sample, Mapping) and "input_ids" in sample:
        return len(sample["input_ids"])
    return None


def _is_token_sample(item: Any) -> bool:
    """Whether an item is one sample of token ids, not a batch."""
    if _token_count(item) is None:
        return False
    ids = item["input_ids"]
    return ids.dim() == 1 if isinstance(ids, Tensor) else not isinstance(ids[0], list | Tensor)
