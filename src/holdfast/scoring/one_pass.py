"""Score a dataset once at the pretrained weights: one pass, no gradients, restartable.

    scores = holdfast.score(model, dataset)         # one loss a sample, in the data's order
    weights = holdfast.Flow().weigh(scores)

Results are kept under a key of model × data × options: a second call reads them, a killed one goes
on where it was. On several ranks each scores a share and all get everything.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import distributed, nn

from holdfast._torch.adapters import unwrapped
from holdfast._torch.batch import evaluating, pad_id_of
from holdfast._torch.content import content_fingerprint
from holdfast._torch.names import shorten
from holdfast._torch.progress import progress_bar
from holdfast.data import Batches, Collate, Samples, as_source
from holdfast.losses import TOKEN_TASKS, LossFunction, Task, infer_task
from holdfast.scoring.batch_scores import Scorer
from holdfast.scoring.cache import Rows, Store
from holdfast.scoring.scores import Scores

__all__ = ["score"]

Found = TypeVar("Found")
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
        model: holding its pretrained weights, not tuned ones; a new head fitted first, by
            :func:`~holdfast.linear_probe`. Put into eval mode for the pass, then back.
        data: a DataLoader (its dataset is read in the dataset's order), a ``datasets.Dataset`` or
            other dataset with ``collate``, or any iterable of batches. Batches are mappings with
            ``labels``, or pairs (inputs, labels). On several ranks all see the same data.
            Sequences padded on the left need ``position_ids`` in models with absolute positions.
        task: ``"causal_lm"``, ``"classification"``, ``"regression"``, ``"multi_label"`` or
            ``"token_classification"``, see :func:`~holdfast.per_sample_loss`; None asks a
            transformers model; or a function (model, batch) → one loss a sample.
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
    inner = unwrapped(model)
    task = infer_task(inner) if task is None else task
    if tokens and task not in TOKEN_TASKS:
        raise ValueError(f"tokens=True needs a task with tokens, not {task!r}")
    source = as_source(data, collate, batch_size, pad_id_of(model))
    scorer = Scorer(model, task, tokens, autocast)
    options = {
        "task": task if isinstance(task, str) else content_fingerprint([task]),
        "tokens": tokens,
        "autocast": str(autocast),
        "collate": content_fingerprint([source.collate]),
    }
    store = Store.open(cache, model, source, options, data_key)
    rank, world = _rank_and_world()

    # Rank 0 looks into the cache for all: ranks that decided for themselves could wait for ever.
    scores, rows = _from_rank_0(lambda: _look_up(store, source), rank, world)
    if scores is None:
        rows = _score_rest(scorer, source, rows, store, progress=progress)
        scores = rows.scores(tokens, store.about if store else options)
        if store and rank == 0:
            store.finish(scores)
        if world > 1:
            distributed.barrier()
    if n := len(scores.excluded):
        if n == len(scores):
            raise ValueError("no sample has a target: are all labels −100?")
        warnings.warn(
            f"{n} of {len(scores)} samples have no targets and get the weight 0, at index "
            f"{shorten([str(i) for i in scores.excluded])}",
            stacklevel=2,
        )
    return scores


def _score_rest(
    scorer: Scorer, source: Samples | Batches, rows: Rows, store: Store | None, *, progress: bool
) -> Rows:
    """Every sample's row: those known already, this rank's share of the rest, and the others'."""
    rank, world = _rank_and_world()
    fresh, unkept, kept_at = Rows(), Rows(), time.monotonic()
    bar = progress_bar(source.total, "scoring", shown=progress and rank == 0)
    bar.update(len(rows))
    if rows and progress and rank == 0:
        print(f"scoring goes on: {len(rows)} samples are done already", file=sys.stderr)
    try:
        with evaluating(scorer.model), torch.no_grad():
            left = (batch for batch in source if not all(i in rows for i in batch[0]))
            for number, (indices, read) in enumerate(left):
                if number % world == rank:
                    unkept.update(zip(indices, scorer(read(), indices), strict=True))
                bar.update(len(indices))
                if store and time.monotonic() - kept_at > _KEEP_SECONDS:
                    store.keep(unkept)
                    fresh.update(unkept)
                    unkept, kept_at = Rows(), time.monotonic()
    except BaseException:
        if store:
            store.keep(unkept)  # Ctrl-C or an error in a later sample: what is done is done
        raise
    finally:
        bar.close()
    fresh.update(unkept)
    everyone = [fresh]
    if world > 1:
        everyone = [Rows() for _ in range(world)]
        distributed.all_gather_object(everyone, fresh)
    for theirs in everyone:
        rows.update(theirs)
    return rows


def _look_up(store: Store | None, source: Samples | Batches) -> tuple[Scores | None, Rows]:
    """What is kept: the finished scores, or the rows of a pass that did not finish."""
    if store is None:
        return None, Rows()
    scores = store.finished(source)
    return scores, store.begun() if scores is None else Rows()


def _from_rank_0(function: Callable[[], Found], rank: int, world: int) -> Found:
    """What rank 0 gets from a function, on all ranks; an error there is raised on all."""
    if world == 1:
        return function()
    box: list[Any] = [None]
    if rank == 0:
        try:
            box = [function()]
        except Exception as error:
            box = [error]
    distributed.broadcast_object_list(box, src=0)
    found = box[0]
    if isinstance(found, Exception):
        raise found
    return cast(Found, found)


def _rank_and_world() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
