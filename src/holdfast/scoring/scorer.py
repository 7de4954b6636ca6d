"""Score a dataset at the pretrained weights: one pass, without gradients, resumable.

    scores = holdfast.score(model, dataset)         # one loss per sample, in the order of the data
    weights = holdfast.Flow().weigh(scores)

Results are cached by model, data and options. A second call reads them, and a killed call continues
where it stopped. On several ranks, each rank scores its share and all ranks get all scores.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_leaves

from holdfast._torch.adapters import unwrapped
from holdfast._torch.batch import (
    evaluating,
    inputs_and_labels,
    logits_of,
    pad_id_of,
    take,
    to_device,
)
from holdfast._torch.checks import named_settings
from holdfast._torch.fingerprint import content_fingerprint
from holdfast._torch.layout import gathered, rank_and_world
from holdfast._torch.lm_head import Split, is_out_of_memory, predict
from holdfast._torch.names import shorten
from holdfast._torch.progress import progress_bar
from holdfast.data import Collate, IndexedSource, Source, as_source
from holdfast.losses import (
    TOKEN_TASKS,
    LossFunction,
    Task,
    TokenLosses,
    count_targets,
    infer_task,
    target_mask,
    token_losses,
)
from holdfast.report.printing import tell_line
from holdfast.scoring.cache import PartialScores, SampleScore, ScoreCache
from holdfast.scoring.scores import Scores

Found = TypeVar("Found")
_SAVE_SECONDS = 10.0
TOKENS = 1 << 15  # per batch on a GPU


@named_settings
def score(
    model: nn.Module,
    data: Any,
    *,
    task: Task | LossFunction | None = None,
    collate: Collate | None = None,
    tokens: bool = False,
    batch_size: int | None = None,
    autocast: torch.dtype | None = None,
    cache: bool | str | os.PathLike[str] = True,
    data_key: str | None = None,
    progress: bool = True,
) -> Scores:
    """Compute the loss of every sample under the model's current weights.

    Args:
        model: the pretrained model. Fit a new head first, with :func:`~holdfast.linear_probe`.
            The pass runs in eval mode.
        data: a DataLoader (its dataset is read in the dataset's own order), a ``datasets.Dataset``
            or other dataset with ``collate``, or any iterable of batches. A batch is a mapping
            with ``labels`` or a pair (inputs, labels). All ranks must pass the same data.
            Sequences padded on the left need ``position_ids`` in models with absolute positions.
        task: ``"causal_lm"``, ``"classification"``, ``"regression"``, ``"multi_label"`` or
            ``"token_classification"``, see :func:`~holdfast.per_sample_loss`; or a function
            (model, batch) → one loss per sample. If None, inferred from a transformers model.
        collate: builds a batch from samples. If None, token sequences are padded on the right.
        tokens: also return the loss of every target token.
        batch_size: the batch size at the greatest length; shorter samples come in larger batches.
            If None, 16, and at least 32,768 tokens per batch on a GPU. Halved if memory runs out.
        autocast: run the model in this dtype, such as ``torch.bfloat16``; losses are float32.
        cache: the cache directory. True is ``$HOLDFAST_CACHE`` or ``~/.cache/holdfast``; False
            turns the cache off.
        data_key: replaces the data's fingerprint in the cache key, for data that is slow to read
            or can be read only once. Change it when the data changes.
        progress: show a progress bar.

    Returns:
        :class:`~holdfast.Scores`, on the CPU, the same on all ranks.

    Example:
        >>> import torch, holdfast
        >>> model, x, y = torch.nn.Linear(3, 2), torch.eye(3), torch.tensor([0, 1, 1])
        >>> holdfast.score(model, [(x, y)], task="classification", cache=False).losses.shape
        torch.Size([3])
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    inner = unwrapped(model)
    task = infer_task(inner) if task is None else task
    if tokens and task not in TOKEN_TASKS:
        raise ValueError(f"tokens=True needs one of {', '.join(TOKEN_TASKS)}, got task={task!r}")
    scorer = Scorer(model, task, tokens, autocast)
    source = as_source(data, collate, batch_size or 16, pad_id_of(model))
    if batch_size is None and scorer.device.type != "cpu" and isinstance(source, IndexedSource):
        source.tokens = TOKENS  # small batches of a small model keep a GPU waiting
    options = {
        "task": task if isinstance(task, str) else content_fingerprint([task]),
        "tokens": tokens,
        "autocast": str(autocast),
        "collate": content_fingerprint([source.collate]),
    }
    store = ScoreCache.open(cache, model, source, options, data_key)
    rank, world = rank_and_world()

    # Rank 0 reads the cache for all: ranks that decide for themselves could deadlock.
    scores, known = _from_rank_0(lambda: _look_up(store, source), rank, world)
    if scores is None:
        known = _score_rest(scorer, source, known, store, progress)
        scores = known.complete(store.about if store else options)
        if store and rank == 0:
            store.finish(scores)
        if world > 1:
            distributed.barrier()
    if n := len(scores.excluded):
        if n == len(scores):
            raise ValueError("no sample has a target: all labels are −100")
        warnings.warn(
            f"{n} of {len(scores)} samples have no targets and get weight 0, at indices "
            f"{shorten([str(i) for i in scores.excluded])}",
            stacklevel=3,
        )
    return scores


class Scorer:
    """Computes the losses of one batch, and halves the batch until it fits into memory."""

    def __init__(
        self, model: nn.Module, task: Task | LossFunction, tokens: bool, autocast: Any
    ) -> None:
        self.model, self.task, self.tokens = model, task, tokens
        self.device = next(model.parameters()).device
        self.precision = torch.autocast(self.device.type, autocast, enabled=autocast is not None)
        self.too_much = float("inf")  # elements of the smallest batch that did not fit
        self.split = Split(model)
        config = getattr(unwrapped(model), "config", None)
        if getattr(config, "is_encoder_decoder", False) and task in TOKEN_TASKS:
            raise ValueError(
                "an encoder-decoder model derives its decoder inputs from the labels: pass a "
                "function (model, batch) -> one loss per sample as task="
            )

    def __call__(self, batch: Any, indices: list[int]) -> list[SampleScore]:
        size = len(indices)
        try:
            if size > 1 and _numel(batch) >= self.too_much:
                raise torch.OutOfMemoryError
            with self.precision:
                return self._rows(batch, size)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if size == 1:
                raise RuntimeError(
                    f"sample {indices[0]} alone does not fit into memory; use autocast, another "
                    "device, or a shorter maximum length"
                ) from error
            self.too_much = min(self.too_much, _numel(batch))
        # Outside the except clause, so that the tensors of the failed attempt are freed.
        half = size // 2
        return self(take(batch, slice(0, half), size), indices[:half]) + self(
            take(batch, slice(half, None), size), indices[half:]
        )

    def _rows(self, batch: Any, size: int) -> list[SampleScore]:
        batch = to_device(batch, self.device)
        if not isinstance(self.task, str):
            losses = self.task(self.model, batch)
            if losses.shape != (size,):
                raise ValueError(
                    f"the loss function must return one loss per sample, {(size,)}, got "
                    f"{tuple(losses.shape)}"
                )
            return [SampleScore(loss, 1, None) for loss in losses.tolist()]
        inputs, labels = inputs_and_labels(self.model, batch)
        found = self._token_losses(inputs, labels)
        values, sample = found.values.float().cpu(), found.sample.cpu()
        counts = count_targets(labels, self.task).cpu()
        means = TokenLosses(values.double(), sample).sums(size) / counts
        pieces: list[Tensor | None] = [None] * size
        if self.tokens:
            # Copies: pickling a view would pickle the whole tensor.
            pieces = [piece.clone() for piece in values.split(counts.tolist())]
        rows = zip(means.tolist(), counts.tolist(), pieces, strict=True)
        return [SampleScore(*row) for row in rows]

    def _token_losses(self, inputs: Any, labels: Tensor) -> TokenLosses:
        if self.task not in TOKEN_TASKS:
            return token_losses(logits_of(self.model, inputs), labels, cast(Task, self.task))
        where = target_mask(labels, self.task)
        if self.task == "causal_lm":  # position t predicts the label at t + 1
            predictions, predicts = self.split(inputs), where.roll(-1, dims=1)
        else:
            predictions, predicts = predict(self.model, inputs), where
        sample = torch.arange(len(labels), device=labels.device)[:, None].expand_as(where)
        return TokenLosses(predictions.nll(predicts, labels[where].long()), sample[where])


def _score_rest(
    scorer: Scorer, source: Source, known: PartialScores, store: ScoreCache | None, progress: bool
) -> PartialScores:
    """Score this rank's share of the samples that are not known yet, and gather all ranks'."""
    rank, world = rank_and_world()
    fresh, unsaved, saved_at = PartialScores(), PartialScores(), time.monotonic()
    bar = progress_bar(source.total, "scoring", shown=progress and rank == 0)
    bar.update(len(known))
    if known and progress and rank == 0:
        tell_line(f"resuming: {len(known)} samples are already scored", file=sys.stderr)
    try:
        with bar, evaluating(scorer.model), torch.no_grad():
            left = (batch for batch in source if not all(i in known for i in batch[0]))
            for number, (indices, read) in enumerate(left):
                if number % world == rank:
                    unsaved.update(zip(indices, scorer(read(), indices), strict=True))
                bar.update(len(indices))
                if store and time.monotonic() - saved_at > _SAVE_SECONDS:
                    store.save_part(unsaved)
                    fresh.update(unsaved)
                    unsaved, saved_at = PartialScores(), time.monotonic()
    except BaseException:
        if store:
            store.save_part(unsaved)  # Ctrl-C or an error in a later sample
        raise
    fresh.update(unsaved)
    for theirs in gathered(fresh):
        known.update(theirs)
    return known


def _look_up(store: ScoreCache | None, source: Source) -> tuple[Scores | None, PartialScores]:
    if store is None:
        return None, PartialScores()
    scores = store.finished(source)
    return scores, store.unfinished() if scores is None else PartialScores()


def _from_rank_0(function: Callable[[], Found], rank: int, world: int) -> Found:
    """Call a function on rank 0 and return its result, or raise its error, on all ranks."""
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


def _numel(batch: Any) -> int:
    """The size of a batch's largest tensor, to compare what fits into memory."""
    return max((x.numel() for x in tree_leaves(batch) if isinstance(x, Tensor)), default=0)
