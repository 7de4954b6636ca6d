"""Columns: values that each sample carries with it, whatever is done to the dataset.

data = with_column(dataset, values, "weight")       # a value in each sample
loader = DataLoader(data, 32, shuffle=True, collate_fn=keeping(collate, "weight"))
batch, values = take_column(batch, "weight")        # the values of a batch, and the rest of it
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from holdfast.data import Collate

__all__ = ["keeping", "take_column", "with_column"]


def with_column(dataset: Any, values: Sequence[Any], column: str) -> Any:
    """The dataset with a value in each sample: a number, or a list or vector of numbers.

    Args:
        dataset, column: as for :func:`holdfast.with_weights`.
        values: one a sample, in the dataset's order.

    Example:
        >>> with_column([("a", 0), ("b", 1)], [[0.1, 0.2], [0.3, 0.4]], "logits")[1]
        ('b', 1, [0.3, 0.4])
    """
    if len(values) != len(dataset):
        raise ValueError(f"{len(values)} values do not fit {len(dataset)} samples")
    # What a transform makes of a row on the fly need not hold a column that it does not know.
    if hasattr(dataset, "add_column") and dataset.format["type"] != "custom":
        if column in dataset.column_names:
            raise ValueError(f"the dataset has a column {column!r} already: choose another name")
        plain = [value.numpy() if isinstance(value, Tensor) else value for value in values]
        return dataset.add_column(column, plain)
    return _WithColumn(dataset, values, column)


def keeping(collate: Collate, column: str | None, *, optional: bool = False) -> Collate:
    """A collate function that brings a column through another one, which need not know of it.

    The values come out of the samples, the rest is collated, and the batch gets their tensor: as
    an entry of a mapping, or as the last element of a tuple. Values for each token are padded with
    0 to the labels' length, on the side on which ``attention_mask`` is padded.

    Args:
        collate: makes a batch of samples.
        column: its name; None changes nothing.
        optional: let samples pass that do not have it, for a collator that evaluation shares.

    Example:
        >>> from torch.utils.data import default_collate
        >>> collate = keeping(default_collate, "weight")
        >>> collate([{"x": 1, "weight": 0.5}, {"x": 2, "weight": 0.25}])
        {'x': tensor([1, 2]), 'weight': tensor([0.5000, 0.2500])}
    """
    return collate if column is None else _Keeping(collate, column, optional)


def take_column(batch: Any, column: str) -> tuple[Any, Tensor]:
    """The batch without a column, and the column.

    Example:
        >>> import torch
        >>> take_column({"x": 1, "weight": torch.ones(2)}, "weight")
        ({'x': 1}, tensor([1., 1.]))
    """
    if isinstance(batch, Mapping) and isinstance(batch.get(column), Tensor):
        return {name: value for name, value in batch.items() if name != column}, batch[column]
    if isinstance(batch, tuple | list) and len(batch) > 2 and isinstance(batch[-1], Tensor):
        return tuple(batch[:-1]), batch[-1]
    what = f"of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else "that came"
    raise ValueError(
        f"the batch {what} has no {column!r}: train on the data that holds it (criterion.data), "
        f"with holdfast.columns.keeping(collate, {column!r}) to collate it"
    )


class _WithColumn(Dataset[Any]):
    def __init__(self, dataset: Any, values: Any, column: str) -> None:
        if isinstance(values, Tensor) and values.dim() == 1 and values.device.type == "cpu":
            values = values.numpy()  # of which an element is quick to take
        self.dataset, self.values, self.column = dataset, values, column

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> Any:
        sample = self.dataset[i]
        if isinstance(sample, tuple | list):
            return (*sample, self.values[i])
        if not isinstance(sample, Mapping):
            raise TypeError(
                f"a sample must be a mapping or a tuple to carry {self.column!r} with it, got "
                f"{type(sample).__name__}"
            )
        if self.column in sample:
            raise ValueError(f"the samples have an entry {self.column!r} already")
        return {**sample, self.column: self.values[i]}


class _Keeping:
    """A class and no closure, so that the workers of a DataLoader can be sent one."""

    def __init__(self, collate: Collate, column: str, optional: bool) -> None:
        self.collate, self.column, self.optional = collate, column, optional

    def __call__(self, samples: Sequence[Any]) -> Any:
        if self.optional and not any(self.column in sample for sample in samples):
            return self.collate(list(samples))
        parts = [self._part(sample) for sample in samples]
        batch = self.collate([rest for rest, _ in parts])
        values = _batched([value for _, value in parts], batch, self.column)
        if isinstance(batch, MutableMapping):
            batch[self.column] = values
            return batch
        if isinstance(batch, tuple | list):
            return (*batch, values)
        raise TypeError(
            f"{self.column!r} can be kept in batches that are mappings or tuples, got "
            f"{type(batch).__name__}"
        )

    def _part(self, sample: Any) -> tuple[Any, Any]:
        """A sample without its value, and the value."""
        if isinstance(sample, Mapping) and self.column in sample:
            rest = {name: value for name, value in sample.items() if name != self.column}
            return rest, sample[self.column]
        if isinstance(sample, tuple | list) and len(sample) > 2:  # inputs, labels, value
            return tuple(sample[:-1]), sample[-1]
        what = f"of {', '.join(sample)}" if isinstance(sample, Mapping) else "that came"
        raise ValueError(
            f"the sample {what} has no {self.column!r}, which the objective needs. A trainer that "
            "drops columns has dropped it: set remove_unused_columns=False; a map() or a transform "
            "of the dataset must hand it on"
        )


def _batched(given: list[Any], batch: Any, column: str) -> Tensor:
    """One tensor: numbers and vectors are stacked, values along labels are padded as these are."""
    if isinstance(given[0], np.generic):
        return torch.from_numpy(np.asarray(given))
    values = [torch.as_tensor(value) for value in given]
    labels = batch.get("labels") if isinstance(batch, Mapping) else batch[-1]
    if values[0].dim() == 0 or not isinstance(labels, Tensor) or labels.dim() != 2:
        return torch.stack(values)
    width = labels.shape[1]
    if len(labels) == 1 and len(values) > 1:  # the samples one after another, without padding
        values = [torch.cat(values)]
    if len(labels) != len(values) or any(len(value) > width for value in values):
        raise ValueError(
            f"{column!r} has {[len(value) for value in values]} values for labels of shape "
            f"{tuple(labels.shape)}: samples must be cut or packed before the column is added"
        )
    left = _padded_on_the_left(batch, [len(value) for value in values], width)
    padded = values[0].new_zeros(len(values), width)
    for row, value in zip(padded, values, strict=True):
        start = width - len(value) if left else 0
        row[start : start + len(value)] = value
    return padded


def _padded_on_the_left(batch: Any, lengths: list[int], width: int) -> bool:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    return any(n < width and row[0] == 0 for n, row in zip(lengths, mask, strict=True))
