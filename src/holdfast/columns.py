"""Columns: a value per sample, such as a weight, that travels with the dataset into batches.

data = with_weights(dataset, weights)               # a value in each sample
loader = DataLoader(data, 32, shuffle=True, collate_fn=keeping(collate, "weight"))
batch, values = take_column(batch, "weight")        # the batch without the values, and the values
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

from holdfast._torch.checks import named_settings
from holdfast.data import Collate, is_table
from holdfast.losses import Task, target_mask


def with_column(dataset: Any, values: Sequence[Any], column: str) -> Any:
    """Add a value to each sample, in the dataset's order: a number, or a vector of numbers.

    Example:
        >>> with_column([("a", 0), ("b", 1)], [[0.1, 0.2], [0.3, 0.4]], "logits")[1]
        ('b', 1, [0.3, 0.4])
    """
    if len(values) != len(dataset):
        raise ValueError(f"got {len(values)} values for {len(dataset)} samples")
    if is_table(dataset):
        if column in dataset.column_names:
            raise ValueError(f"the dataset already has a column {column!r}: choose another name")
        plain = [value.numpy() if isinstance(value, Tensor) else value for value in values]
        return dataset.add_column(column, plain)
    return _WithColumn(dataset, values, column)


@named_settings
def with_weights(
    dataset: Any,
    weights: Tensor | Sequence[Tensor] | Sequence[float],
    *,
    column: str = "weight",
    task: Task = "causal_lm",
) -> Any:
    """Add a weight to each sample, which survives shuffling, filtering and sharding.

    Args:
        dataset: a ``datasets.Dataset``, or any dataset with a length and an index, in the order in
            which it was scored. Shuffle and split it afterwards.
        weights: one per sample, in the dataset's order (``Flow().weigh(scores)``). Token weights
            are one tensor per sample (``scores.split(Flow(level="token").weigh(scores))``): they
            are aligned with the sample's ``labels``, with 0 where there is no target.
        column: the name. Samples that are mappings get an entry, tuples one more element.
        task: for token weights, whether labels are shifted (``causal_lm``) or not.

    Returns:
        A ``datasets.Dataset`` if one was passed, else a dataset that wraps the given one.

    Example:
        >>> import torch
        >>> data = with_weights([{"x": 1}, {"x": 2}], torch.tensor([0.5, 0.25]))
        >>> data[1]
        {'x': 2, 'weight': 0.25}
    """
    if hasattr(weights, "losses"):
        raise TypeError(
            "weights must be sample weights, got Scores: turn losses into weights first, for "
            "example with the weigh() method of an objective"
        )
    if not isinstance(weights, Tensor) and not any(isinstance(w, Tensor) for w in weights):
        weights = torch.tensor(weights)
    if len(weights) != len(dataset):
        raise ValueError(
            f"got {len(weights)} weights for {len(dataset)} samples: score this dataset as it is "
            "now, and add the weights before you add or remove samples. Split token weights by "
            "sample first: scores.split(weights)"
        )
    if isinstance(weights, Tensor):
        return with_column(dataset, weights.double().tolist(), column)
    values = [
        along_labels(i, torch.as_tensor(w).double(), dataset[i], task).tolist()
        for i, w in enumerate(weights)
    ]
    return with_column(dataset, values, column)


def keeping(collate: Collate, *columns: str, optional: bool = False) -> Collate:
    """Wrap a collate function that does not know some columns, so that batches carry them.

    The values are taken out of the samples, the rest is collated, and the batch gets a tensor of
    the values: an entry of a mapping, or the last element of a tuple. Token values are padded with
    0 to the labels' length, on the side where ``attention_mask`` is padded.

    Args:
        collate: builds a batch from samples.
        columns: names of columns, in the order in which they were added to the dataset. Without
            any, ``collate`` itself is returned.
        optional: accept samples without the columns, for a collator that evaluation shares.

    Example:
        >>> from torch.utils.data import default_collate
        >>> collate = keeping(default_collate, "weight")
        >>> collate([{"x": 1, "weight": 0.5}, {"x": 2, "weight": 0.25}])
        {'x': tensor([1, 2]), 'weight': tensor([0.5000, 0.2500])}
    """
    for column in columns:
        collate = _Keeping(collate, column, optional)
    return collate


def take_columns(batch: Any, columns: Sequence[str]) -> tuple[Any, dict[str, Tensor]]:
    """Split a batch into the batch without some columns, and the columns by name."""
    values: dict[str, Tensor] = {}
    for column in reversed(columns):  # a tuple ends with the last one
        batch, values[column] = take_column(batch, column)
    return batch, values


def take_column(batch: Any, column: str) -> tuple[Any, Tensor]:
    """Split a batch into the batch without a column, and the column.

    Example:
        >>> import torch
        >>> take_column({"x": 1, "weight": torch.ones(2)}, "weight")
        ({'x': 1}, tensor([1., 1.]))
    """
    rest, values = _split(batch, column)
    if isinstance(values, Tensor):
        return rest, values
    raise ValueError(
        f"the batch{_names(batch)} has no {column!r}: train on criterion.data, and collate it with "
        f"holdfast.columns.keeping(collate, {column!r})"
    )


def _split(item: Any, column: str) -> tuple[Any, Any]:
    """A sample or batch without the column, and the column; None if there is none."""
    if isinstance(item, Mapping):
        return {name: x for name, x in item.items() if name != column}, item.get(column)
    if isinstance(item, tuple | list) and len(item) > 2:  # inputs, labels, value
        return tuple(item[:-1]), item[-1]
    return item, None


def _names(item: Any) -> str:
    return f" of {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""


class _WithColumn(Dataset[Any]):
    def __init__(self, dataset: Any, values: Any, column: str) -> None:
        self.dataset, self.values, self.column = dataset, values, column

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> Any:
        sample = self.dataset[i]
        if isinstance(sample, tuple | list):
            return (*sample, self.values[i])
        if not isinstance(sample, Mapping):
            raise TypeError(
                f"a sample must be a mapping or a tuple to carry {self.column!r}, got "
                f"{type(sample).__name__}"
            )
        if self.column in sample:
            raise ValueError(f"the samples already have an entry {self.column!r}")
        return {**sample, self.column: self.values[i]}


class _Keeping:
    """A class instead of a closure, so that DataLoader workers can pickle it."""

    def __init__(self, collate: Collate, column: str, optional: bool) -> None:
        self.collate, self.column, self.optional = collate, column, optional

    def __call__(self, samples: Sequence[Any]) -> Any:
        if self.optional and not any(self.column in sample for sample in samples):
            return self.collate(list(samples))
        rests, given = zip(*(_split(sample, self.column) for sample in samples), strict=True)
        for sample, value in zip(samples, given, strict=True):
            if value is None:
                raise ValueError(
                    f"the sample{_names(sample)} has no {self.column!r}, which the recipe "
                    "needs. If a trainer dropped the column, set remove_unused_columns=False; a "
                    "map() or transform of the dataset must return it"
                )
        batch = self.collate(list(rests))
        values = _batched(given, batch, self.column)
        if isinstance(batch, MutableMapping):
            batch[self.column] = values
            return batch
        if isinstance(batch, tuple | list):
            return (*batch, values)
        raise TypeError(
            f"batches must be mappings or tuples to carry {self.column!r}, got "
            f"{type(batch).__name__}"
        )


def _batched(given: Sequence[Any], batch: Any, column: str) -> Tensor:
    """One tensor: numbers and vectors are stacked, token values are padded like the labels."""
    values = [torch.as_tensor(value) for value in given]
    labels = batch.get("labels") if isinstance(batch, Mapping) else batch[1]
    if values[0].dim() == 0 or not isinstance(labels, Tensor) or labels.dim() != 2:
        return torch.stack(values)
    width = labels.shape[1]
    if len(labels) == 1 and len(values) > 1:  # concatenated samples, without padding
        values = [torch.cat(values)]
    if len(labels) != len(values) or any(len(value) > width for value in values):
        raise ValueError(
            f"{column!r} has {[len(value) for value in values]} values for labels of shape "
            f"{tuple(labels.shape)}: truncate or pack samples before you add the column"
        )
    gaps = [width - len(value) for value in values]
    left = _padded_on_the_left(batch, gaps)
    padding = [(gap, 0) if left else (0, gap) for gap in gaps]
    return torch.stack([F.pad(value, pad) for value, pad in zip(values, padding, strict=True)])


def _padded_on_the_left(batch: Any, gaps: list[int]) -> bool:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    return any(gap and row[0] == 0 for gap, row in zip(gaps, mask, strict=True))


def labels_of(sample: Any) -> Tensor | None:
    """The labels of a sample, as a tensor; None if it has none."""
    labels = sample.get("labels") if isinstance(sample, Mapping) else sample[1]
    return None if labels is None else torch.as_tensor(labels)


def along_labels(index: int, values: Tensor, sample: Any, task: Task) -> Tensor:
    """Values of the targets of sample ``index`` at the positions of their labels, 0 elsewhere."""
    labels = labels_of(sample)
    if labels is None:
        raise ValueError(
            f"sample {index} has no labels, so token weights cannot be aligned: add labels to the "
            "samples instead of leaving them to the collator"
        )
    where = target_mask(labels[None], task)[0]
    if int(where.sum()) != len(values):
        raise ValueError(
            f"got {len(values)} token weights for the {int(where.sum())} targets of sample "
            f"{index}: the order of the dataset may have changed since it was scored"
        )
    return values.new_zeros(len(labels)).masked_scatter(where, values)
