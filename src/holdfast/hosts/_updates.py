"""Which samples make which update: a function of the seed and the update alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from holdfast._torch.batch import batch_length, normalized, pad_id_of
from holdfast.columns import keeping
from holdfast.data import Collate, Samples, as_source
from holdfast.losses import global_targets
from holdfast.run import Run


class Updates:
    """The micro-batches of each update, and what their losses are divided by.

    Every epoch goes through all samples in an order of its own. An update is cut into
    ``accumulate`` micro-batches of at most ``batch_size`` samples; the last one of an epoch may be
    smaller.
    """

    def __init__(
        self, run: Run, collate: Collate, batch_size: int, accumulate: int, seed: int
    ) -> None:
        if batch_size < 1 or accumulate < 1:
            raise ValueError(
                f"batch_size and accumulate must be at least 1, got {batch_size}, {accumulate}"
            )
        self.data, self.task, self.seed = run.criterion.data, run.task, seed
        column = run.criterion.column
        self.collate = collate if column is None else keeping(collate, column)
        self.batch_size, self.accumulate = batch_size, accumulate
        self.per_epoch = math.ceil(len(self.data) / (batch_size * accumulate))
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def batches(self, update: int) -> Iterator[Any]:
        """The micro-batches of an update, counted from 1."""
        epoch, number = divmod(update - 1, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, order_of(epoch, len(self.data), self.seed)
        size = self.batch_size * self.accumulate
        for indices in self._order[number * size : (number + 1) * size].split(self.batch_size):
            yield normalized(self.collate([self.data[i] for i in indices.tolist()]))

    def targets(self, batches: list[Any]) -> Tensor | float:
        """The targets of all micro-batches of an update."""
        if not isinstance(self.task, str):
            return float(sum(map(batch_length, batches)))
        return global_targets([labels_of(batch) for batch in batches], self.task)


def order_of(epoch: int, size: int, seed: int) -> Tensor:
    """In which order an epoch, counted from 0, goes through the samples."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(size, generator=generator)


def labels_of(batch: Any) -> Tensor:
    labels = (
        batch.get("labels") if isinstance(batch, dict) else batch[1] if len(batch) > 1 else None
    )
    if not isinstance(labels, Tensor):
        what = f"with {', '.join(batch)}" if isinstance(batch, dict) else "that came"
        raise ValueError(
            f"the batch {what} has no tensor of labels: call the column labels (or label), as "
            "numbers, or pass task= a function (model, batch) -> one loss a sample"
        )
    return labels


def as_samples(data: Any, collate: Collate | None, batch_size: int, model: nn.Module) -> Samples:
    """Data that can be read in any order, how to make batches of it, and of what size."""
    if isinstance(data, list | tuple) and not data:
        raise ValueError("the data is empty: there is nothing to train on")
    if isinstance(data, DataLoader) and not isinstance(
        data.sampler, SequentialSampler | RandomSampler
    ):
        warnings.warn(
            f"the loop reads the loader's dataset in an order of its own: {data.sampler} is not "
            "used",
            stacklevel=3,
        )
    source = as_source(data, collate, batch_size, pad_id_of(model))
    if not isinstance(source, Samples):
        raise TypeError(
            "the loop reads samples in an order of its own: pass a dataset with a length and an "
            f"index, not {type(data).__name__}; for a list of samples, with collate= what makes "
            "batches of them, such as torch.utils.data.default_collate"
        )
    if not len(source.data):
        raise ValueError("the data is empty: there is nothing to train on")
    return source
