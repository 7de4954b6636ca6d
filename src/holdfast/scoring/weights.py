"""Weights as a part of the data: each sample carries its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.columns import with_column
from holdfast.losses import Task, target_mask
from holdfast.scoring.scores import Scores

__all__ = ["with_weights"]


def with_weights(
    dataset: Any,
    weights: Tensor | Sequence[Tensor] | Sequence[float],
    *,
    column: str = "weight",
    task: Task = "causal_lm",
) -> Any:
    """The dataset with a weight in each sample, kept by shuffling, filtering and sharding.

    Args:
        dataset: a ``datasets.Dataset``, or any dataset with a length and an index; in the order in
            which it was scored. Shuffle and split it afterwards.
        weights: one a sample in the dataset's order (``Flow().weigh(scores)``), or for tokens one
            tensor a sample (``scores.split(Flow(level="token").weigh(scores))``): these are laid
            out along the sample's ``labels``, with 0 where there is no target.
        column: what to call them. Samples that are mappings get an entry, tuples one more element.
        task: for token weights, whether labels are shifted (``causal_lm``) or not.

    Returns:
        A ``datasets.Dataset`` where one was given, else a dataset that wraps the given one.

    Example:
        >>> import torch
        >>> data = with_weights([{"x": 1}, {"x": 2}], torch.tensor([0.5, 0.25]))
        >>> data[1]
        {'x': 2, 'weight': 0.25}
    """
    if isinstance(weights, Scores):
        raise TypeError(
            "weights must be sample weights, got Scores: turn losses into weights first, for "
            "example with the weigh() method of an objective"
        )
    if not isinstance(weights, Tensor) and not any(isinstance(w, Tensor) for w in weights):
        weights = torch.tensor(weights)
    if len(weights) != len(dataset):
        raise ValueError(
            f"{len(weights)} weights do not fit {len(dataset)} samples: score this dataset as it "
            "is now, and add the weights before samples are removed or added. Token weights are "
            "cut into samples first: scores.split(weights)"
        )
    values: list[Any]
    if isinstance(weights, Tensor):
        values = weights.double().tolist()
    else:
        values = [
            _along_labels(i, torch.as_tensor(w), dataset[i], task).tolist()
            for i, w in enumerate(weights)
        ]
    return with_column(dataset, values, column)


def _along_labels(index: int, weights: Tensor, sample: Any, task: Task) -> Tensor:
    """Token weights at the positions of their labels, 0 elsewhere."""
    labels = sample.get("labels") if isinstance(sample, Mapping) else sample[-1]
    if labels is None:
        raise ValueError(
            f"sample {index} has no labels to lay token weights along: put them into the samples "
            "rather than leaving them to the collator"
        )
    labels = torch.as_tensor(labels)
    where = target_mask(labels[None], task)[0]
    if int(where.sum()) != len(weights):
        raise ValueError(
            f"{len(weights)} token weights do not fit the {int(where.sum())} targets of sample "
            f"{index}: has the order of the dataset changed since it was scored?"
        )
    return torch.zeros(len(labels), dtype=torch.float64).masked_scatter(where, weights.double())
