"""The updates of a run: the samples of each depend only on the seed and its number."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from holdfast._torch.batch import batch_length, normalized, pad_id_of
from holdfast._torch.checks import above_zero, whole_number
from holdfast.columns import keeping
from holdfast.data import Collate, IndexedSource, as_source
from holdfast.losses import LossFunction, Task
from holdfast.run import Run

#: A function (update, total updates) -> factor of the learning rate; updates count from 0.
Schedule = Callable[[int, int], float]


#: The fraction of the updates with a warm-up, and the maximum norm of the gradient, of runs that
#: need both and whose user sets none.
WARM_UP, CLIP_NORM = 0.05, 1.0


MOST_UPDATES = 10**8


class Updates:
    """The samples and the learning rate of each update.

    Each epoch visits all samples in its own order. An update has ``batch_size`` samples in each of
    its ``parts``, the micro-batches of all ranks; the last update of an epoch may have fewer.
    """

    def __init__(
        self, source: IndexedSource, parts: int, seed: int, *, epochs: float = 1.0,
        max_updates: int | None = None, schedule: Schedule | None = None,
    ) -> None:  # fmt: skip
        self.data, self.collate, self.batch_size = source.data, source.collate, source.batch_size
        self.size, self.seed = self.batch_size * parts, seed
        self.per_epoch = math.ceil(len(self.data) / self.size)
        self.total = number_of_updates(len(self.data), self.size, epochs, max_updates)
        self.factors = [schedule(t, self.total) for t in range(self.total)] if schedule else []
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def rows(self, update: int) -> Tensor:
        """The indices of the samples of an update, counted from 1."""
        epoch, number = divmod(update - 1, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, order_of(epoch, len(self.data), self.seed)
        return self._order[number * self.size : (number + 1) * self.size]

    def batches(self, update: int) -> Iterator[Any]:
        for rows in self.rows(update).split(self.batch_size):
            yield normalized(self.collate([self.data[i] for i in rows.tolist()]))

    def settings(self, run: Run) -> dict[str, Any]:
        """The settings that a resumed run must share."""
        return {
            "updates": self.total, "lr": run.lr, "weight_decay": run.weight_decay,
            "batch": self.size, "samples": len(self.data), "seed": self.seed,
            "schedule": self.factors,
        }  # fmt: skip


def number_of_updates(samples: int, size: int, epochs: float, max_updates: int | None) -> int:
    """The length of a run with ``size`` samples per update, rounded up like transformers."""
    if max_updates is not None:
        return whole_number("max_updates", max_updates, 1, MOST_UPDATES)
    updates = math.ceil(above_zero("epochs", epochs) * math.ceil(samples / size))
    return whole_number("the number of updates", updates, 1, MOST_UPDATES)


def number_of_epochs(samples: int, size: int, epochs: float, max_updates: int | None) -> float:
    """How often such a run visits each sample; the last update of an epoch may be a short one."""
    return epochs if max_updates is None else max_updates / math.ceil(samples / size)


def warm_up_and_decay(update: int, total: int, *, warm_up: float = WARM_UP) -> float:
    """A schedule: linear warm-up over a fraction of the updates, then linear decay to 0."""
    rising = max(1.0, warm_up * total)
    falling = (total - update) / max(1.0, total - rising)
    return min(1.0, (update + 1) / rising, falling)


def schedule_for(run: Run, schedule: Schedule | None) -> Schedule | None:
    """The schedule of a run: the given one, or a warm-up if there is none and the run needs it."""
    needed = schedule is None and run.needs_warm_up
    return warm_up_and_decay if needed else schedule


def order_of(epoch: int, size: int, seed: int) -> Tensor:
    """The order of the samples in an epoch, counted from 0."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(size, generator=generator)


def labels_of(batch: Any, task: Task | LossFunction) -> Tensor:
    """The labels of a batch: its entry ``labels``, or its second element.

    With a loss function, each sample is one target: the tensor has only its length.
    """
    if not isinstance(task, str):
        return torch.empty(batch_length(batch))
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
    else:
        labels = batch[1] if len(batch) > 1 else None
    if not isinstance(labels, Tensor):
        columns = f" (columns: {', '.join(batch)})" if isinstance(batch, Mapping) else ""
        raise ValueError(
            f"the batch{columns} has no tensor of labels: name the column labels (or label) and "
            "make it numeric, or pass task= a function (model, batch) -> one loss per sample"
        )
    return labels


def source_of(run: Run, batch_size: int) -> IndexedSource:
    """The data of a run's criterion, with a collate function that keeps the criterion's columns."""
    if run.data is None:
        raise ValueError("the run has no data: pass it to Run, or call run.prepare_data")
    source, criterion = as_samples(run.data, run.collate, batch_size, run.model), run.criterion
    data = source.data if criterion.data is run.data else criterion.data
    size = whole_number("batch_size", source.batch_size, 1)
    return IndexedSource(data, keeping(source.collate, *criterion.columns), size)


def as_samples(
    data: Any, collate: Collate | None, batch_size: int, model: nn.Module
) -> IndexedSource:
    """Data that can be read in any order, with its collate function and batch size."""
    if isinstance(data, DataLoader) and not isinstance(
        data.sampler, SequentialSampler | RandomSampler
    ):
        warnings.warn(
            f"the loop shuffles the loader's dataset by itself and ignores {data.sampler}",
            stacklevel=3,
        )
    samples = data.dataset if isinstance(data, DataLoader) else data
    if hasattr(samples, "__len__") and not len(samples):
        raise ValueError("the data is empty: there is nothing to train on")
    source = as_source(data, collate, batch_size, pad_id_of(model))
    if not isinstance(source, IndexedSource):
        if _are_words(samples):
            raise TypeError(
                "the samples are texts, but the loop needs tokens: pass samples with input_ids and "
                "labels, made by a tokenizer, or train with `holdfast finetune`, which reads texts"
            )
        raise TypeError(
            "the loop shuffles the samples by itself: pass a dataset with a length and an index, "
            f"not {type(data).__name__}. Wrap a list of samples in a DataLoader, such as "
            "DataLoader(samples, batch_size=16, collate_fn=default_collate)"
        )
    return source


def _are_words(samples: Any) -> bool:
    first = samples[0] if isinstance(samples, list | tuple) and samples else None
    values = first.values() if isinstance(first, Mapping) else [first]
    return any(isinstance(value, str) for value in values)
