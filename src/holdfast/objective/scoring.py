"""Score a dataset once at the pretrained weights: one pass, no gradients, restartable.

    scores = holdfast.score(model, dataset)         # one loss a sample, in the data's order
    weights = holdfast.Flow().weigh(scores)

Results are kept under a key of model × data × options: a second call reads them, a killed one goes
on where it was. On several ranks each scores a share and all get everything.
"""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import torch
from torch import distributed, nn

from holdfast._batch import evaluating
from holdfast._names import shorten
from holdfast._progress import progress_bar
from holdfast.objective._scorer import LossFunction, Scorer
from holdfast.objective._store import Rows, Store, describe
from holdfast.objective.data import Batches, Collate, Samples, as_source
from holdfast.objective.losses import Task, infer_task
from holdfast.objective.scores import Scores

__all__ = ["score"]

_KEEP_SECONDS = 10.0


def score(
    model: nn.Module,
    data: Any,
    *,
    task: Task | LossFunction | None = None,
    collate: Collate | None = None,
    tokens: bool = False,
    batch_size: int = 16,
    autocast: torch.dtype | None = None,
    cache: bool | str | os.PathLike[str] = True,
    data_key: str | None = None,
    progress: bool = True,
) -> Scores:
    """The loss of every sample under the model as it is now.

    Args:
        model: holding its pretrained weights. Put into eval mode for the pass, then back.
        data: a DataLoader (its dataset is read in the dataset's order), a ``datasets.Dataset`` or
            other dataset with ``collate``, or any iterable of batches. Batches are mappings with
            ``labels``, or pairs (inputs, labels).
        task: see :func:`~holdfast.per_sample_loss`; None asks a transformers model; or a function
            (model, batch) → one loss a sample.
        collate: makes a batch of samples; None pads token sequences on the right.
        tokens: also keep the loss of every target token.
        batch_size: samples at the greatest length; shorter ones go in larger batches. Halved
            where memory runs out.
        autocast: run the model in this dtype, such as ``torch.bfloat16``; losses are float32.
        cache: where to keep results: True is ``$HOLDFAST_CACHE`` or ``~/.cache/holdfast``; a path
            is another place; False keeps nothing (and a killed run starts over).
        data_key: stands for the data's content in the cache key, for data that is slow to read
            through or can be read only once. Change it when the data changes.
        progress: show a progress bar.

    Returns:
        :class:`~holdfast.Scores`, on the CPU, the same on all ranks.

    Example:
        >>> import torch, holdfast
        >>> model, x, y = torch.nn.Linear(3, 2), torch.eye(3), torch.tensor([0, 1, 1])
        >>> holdfast.score(model, [(x, y)], task="classification", cache=False).losses.shape
        torch.Size([3])
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    task = infer_task(model) if task is None else task
    if tokens and task not in ("causal_lm", "token_classification"):
        raise ValueError(f"tokens=True needs a task with tokens, not {task!r}")
    source = as_source(data, collate, batch_size)
    options = {
        "task": task if isinstance(task, str) else describe(task),
        "tokens": tokens,
        "autocast": str(autocast),
        "collate": describe(getattr(source, "collate", None)),
    }
    store = Store.open(cache, model, source, options, data_key)
    if store and (found := store.finished(source)):
        return found
    rows = _score_all(Scorer(model, task, tokens, autocast), source, store, progress=progress)
    scores = rows.scores(tokens, store.about if store else options)
    if store and _rank_and_world()[0] == 0:
        store.finish(scores)
    if scores.excluded:
        warnings.warn(
            f"{len(scores.excluded)} samples have no targets and get no weight: "
            f"{shorten([str(i) for i in scores.excluded])}",
            stacklevel=2,
        )
    return scores


def _score_all(
    scorer: Scorer, source: Samples | Batches, store: Store | None, *, progress: bool
) -> Rows:
    """Every sample's row: those of an earlier pass, and this rank's share of the rest."""
    rank, world = _rank_and_world()
    rows = store.begun() if store else Rows()
    if world > 1:
        distributed.barrier()  # all ranks have read the same parts before any adds to them
    fresh, kept_at = Rows(), time.monotonic()
    bar = progress_bar(source.total, "scoring", shown=progress and rank == 0)
    bar.update(len(rows))
    with evaluating(scorer.model), torch.no_grad():
        left = (batch for batch in source if not all(i in rows for i in batch[0]))
        for number, (indices, read) in enumerate(left):
            if number % world != rank:
                continue
            fresh.update(zip(indices, scorer(read(), indices), strict=True))
            bar.update(len(indices) * world)
            if store and time.monotonic() - kept_at > _KEEP_SECONDS:
                store.keep(fresh)
                rows.update(fresh)
                fresh, kept_at = Rows(), time.monotonic()
    bar.close()
    rows.update(fresh)
    if world > 1:
        everyone: list[Rows] = [Rows()] * world
        distributed.all_gather_object(everyone, rows)
        for theirs in everyone:
            rows.update(theirs)
    return rows


def _rank_and_world() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
