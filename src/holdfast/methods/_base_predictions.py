"""The pretrained model's predictions on the training data, and a model's divergence from them.

One pass at θ* keeps the probabilities of some tokens per target. A column gives each label the
number of its prediction, so that predictions reach their labels through padding, packing and every
host. Where this is not possible, the pretrained model predicts each batch of the training.
"""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from holdfast._torch.adapters import adapters_off, unwrapped
from holdfast._torch.batch import (
    evaluating,
    inputs_and_labels,
    logits_of,
    pad_id_of,
    take,
    to_device,
)
from holdfast._torch.head_loss import divergence_of, teacher_of
from holdfast._torch.layout import gathered, rank_and_world
from holdfast._torch.memory import Batches
from holdfast._torch.progress import progress_bar
from holdfast._torch.rng import generator_of
from holdfast._torch.teachers import AllTokens, KeptTokens, Teacher
from holdfast.columns import along_labels, labels_of, with_column
from holdfast.data import IndexedSource, as_source
from holdfast.losses import TOKEN_TASKS, Task, target_mask, target_outputs
from holdfast.methods._base_model import BaseModel, base_model_cost, base_model_of, precision
from holdfast.scoring.predictions import (
    Kept,
    kept_at,
    kept_bytes,
    kept_tokens,
    sampled_tokens,
)
from holdfast.stages import Cost, Planned, RecallTerm, Run

logger = logging.getLogger(__name__)

_COLUMN = "base_prediction"
_MOST_KEPT = 1 << 30  # bytes of kept predictions


class Comparison:
    """Which part of the outputs at each target is compared. This one compares all of it."""

    def part(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The logits to compare, given a row of outputs per target and the targets."""
        return outputs

    def uses(self, base: Tensor, targets: Tensor) -> Tensor:
        """Which targets are used, given the pretrained model's outputs."""
        return torch.ones_like(targets, dtype=torch.bool)


def divergence_term(
    run: Run, comparison: Comparison, strength: float, top: int | None
) -> "DivergenceTerm":
    """The divergence on the target's data: from kept predictions, or from a model if top is None.

    The criterion's data gets the column of the kept predictions.
    """
    base: KeptPredictions | BaseModel | None = None
    if top is not None:
        try:
            base = _kept(run, comparison, top)
        except _NotKeptError as reason:
            logger.info(f"the pretrained model predicts each batch of the training: {reason}")
    task = cast(Task, run.task)
    base = base or base_model_of(run, partial(predictions_of, task=task))
    return DivergenceTerm(comparison, strength, task, base)


def divergence_cost(planned: Planned, top: int | None) -> Cost:
    """What :func:`divergence_term` costs."""
    if top is not None:
        size = planned.data * planned.targets * kept_bytes(top, planned.outputs)
        if size <= _MOST_KEPT:
            return Cost(on_cpu=size, before_predicted=planned.data * planned.length)
    return base_model_cost(planned)


class _NotKeptError(Exception):
    """Why predictions cannot be kept."""


class KeptPredictions(NamedTuple):
    """Some tokens per target, as in :class:`~holdfast._torch.teachers.KeptTokens`."""

    tokens: Kept
    sampled: int

    def of(self, numbers: Tensor) -> KeptTokens:
        """The predictions with these numbers, counted from 1."""
        ids, log_probs, rest = (values[numbers - 1] for values in self.tokens)
        return KeptTokens(ids, log_probs, rest, self.sampled)


def predictions_of(model: nn.Module, batch: Mapping[str, Any], task: Task) -> AllTokens:
    """The predictions for the targets of a batch, which has ``labels`` and ``inputs``."""
    inputs, labels = batch["inputs"], batch["labels"]
    if task == "causal_lm":  # position t predicts the label at t + 1
        return teacher_of(model, inputs, target_mask(labels, task).roll(-1, dims=1))
    return AllTokens(target_outputs(logits_of(model, inputs), labels, task))


class DivergenceTerm(RecallTerm):
    """strength · Σ KL(base ‖ model) over the targets of a batch.

    Attributes:
        base: the kept predictions, or a function that computes the pretrained model's.
    """

    uses_outputs = True

    def __init__(
        self, comparison: Comparison, strength: float, task: Task, base: KeptPredictions | BaseModel
    ) -> None:
        self.comparison, self.strength, self.task, self.base = comparison, strength, task, base
        self.columns = (_COLUMN,) if isinstance(base, KeptPredictions) else ()

    def before(
        self, model: nn.Module, inputs: Any, labels: Tensor, values: Mapping[str, Tensor],
        update: int,
    ) -> AllTokens | Tensor:  # fmt: skip
        """The predictions of the pretrained model for all targets, or their numbers if kept."""
        if isinstance(self.base, KeptPredictions):
            return values[_COLUMN][target_mask(labels, self.task)].cpu()
        with torch.no_grad():
            return cast(AllTokens, self.base(model, {"labels": labels, "inputs": inputs}))

    def on_targets(
        self, before: AllTokens | Tensor, part: slice, outputs: Tensor, targets: Tensor
    ) -> Tensor:
        teacher: Teacher
        if isinstance(before, AllTokens):
            theirs = before.logits(part).to(outputs)
            used = self.comparison.uses(theirs, targets)
            teacher = AllTokens(self.comparison.part(theirs[used], targets[used]))
        else:
            numbers = before[part]
            used = numbers.nonzero().squeeze(1)
            teacher = cast(KeptPredictions, self.base).of(numbers[used])
            used = used.to(outputs.device)
        return self.strength * divergence_of(
            self.comparison.part(outputs[used], targets[used]), teacher
        )


def _kept(run: Run, comparison: Comparison, top: int) -> KeptPredictions:
    """Keep predictions for all targets, and add the column of their numbers to the data."""
    source = as_source(run.data, run.collate, 32, pad_id_of(run.model))
    if not isinstance(source, IndexedSource):
        raise _NotKeptError("the data is a stream")
    task = cast(Task, run.task)
    counts = _target_counts(source.data, task)
    keeper = _Keeper(run, comparison, top, counts)
    samples = keeper.samples(source)
    is_used = torch.cat([sample.is_used for sample in samples])
    numbers = torch.arange(1, len(is_used) + 1).masked_fill(~is_used, 0).split(counts)
    column: list[Any] = [int(row) for row in numbers] if task not in TOKEN_TASKS else [
        along_labels(i, row, source.data[i], task).tolist() for i, row in enumerate(numbers)
    ]  # fmt: skip
    # The objective may have added a column to the samples.
    data = source.data if run.criterion.data is run.data else run.criterion.data
    run.criterion.data = with_column(data, column, _COLUMN)
    tokens = zip(*(sample.tokens for sample in samples), strict=True)
    return KeptPredictions(Kept(*map(torch.cat, tokens)), keeper.sampled)


def _target_counts(data: Any, task: Task) -> list[int]:
    """The number of targets of each sample."""
    if task not in TOKEN_TASKS:
        return [1] * len(data)
    try:
        labels = (cast(Tensor, labels_of(data[i])) for i in range(len(data)))
        return [int(target_mask(row[None], task).sum()) for row in labels]
    except (IndexError, TypeError, ValueError):  # texts, for example, or no labels
        raise _NotKeptError("the samples get their labels from the collate function") from None


class _Sample(NamedTuple):
    """The predictions for the targets of a sample, and which of them are used."""

    tokens: Kept
    is_used: Tensor


class _OtherLabelsError(Exception):
    """A batch has other targets than its samples."""


class _Keeper:
    """Keeps predictions of the pretrained model.

    Attributes:
        sampled: how many of the tokens that are kept per target are sampled, after a pass.
    """

    sampled = 0

    def __init__(self, run: Run, comparison: Comparison, top: int, counts: list[int]) -> None:
        self.run, self.comparison, self.top, self.counts = run, comparison, top, counts
        self.model, self.task = unwrapped(run.model), cast(Task, run.task)

    @torch.no_grad()
    def samples(self, source: IndexedSource) -> list[_Sample]:
        """The predictions for all samples, in the order of the data.

        On several ranks, each rank runs its share and all ranks get all predictions.
        """
        run, model, (rank, world) = self.run, self.model, rank_and_world()
        mine: dict[int, _Sample] = {}
        same_labels = True
        bar = progress_bar(source.total, "base model", shown=run.progress and rank == 0)
        off = adapters_off(model) if run.recipe.trainable.keeps_base else nullcontext()
        with bar, evaluating(model), off, precision(model, run.autocast):
            for number, (indices, read) in enumerate(source):
                if number == 0 or number % world == rank:  # all ranks need the size of the first
                    try:
                        found = self._batch(read(), indices)
                    except _OtherLabelsError:
                        same_labels = False
                        break
                    if number == 0 and self._size(found[0].tokens) > _MOST_KEPT:
                        raise _NotKeptError(f"all of them need more than {_MOST_KEPT >> 20} MiB")
                    mine.update(zip(indices, found, strict=True))
                bar.update(len(indices))
        shares = gathered((same_labels, mine))
        if not all(theirs for theirs, _ in shares):
            raise _NotKeptError("the collate function changes the labels of the samples")
        all_samples = {i: sample for _, share in shares for i, sample in share.items()}
        return [all_samples[i] for i in range(len(self.counts))]

    def _size(self, kept: Kept) -> int:
        """The bytes that all predictions need, given some of them."""
        per_target = sum(values.element_size() * values.shape[1:].numel() for values in kept)
        return per_target * sum(self.counts)

    def _batch(self, batch: Any, indices: list[int]) -> list[_Sample]:
        batch, size = to_device(batch, next(self.model.parameters()).device), len(indices)
        parts = Batches(size)(size, lambda part: self._part(take(batch, part, size), indices[part]))
        return [sample for part in parts for sample in part]

    def _part(self, batch: Any, indices: list[int]) -> list[_Sample]:
        inputs, labels = inputs_and_labels(self.model, batch)
        where = target_mask(labels, self.task)
        counts = [self.counts[i] for i in indices]
        if where.reshape(len(labels), -1).sum(1).tolist() != counts:
            raise _OtherLabelsError
        targets, noise = labels[where], torch.cat([self._noise(i) for i in indices])
        used: dict[int, Tensor] = {}

        def compared(outputs: Tensor, part: slice) -> Tensor:
            some = targets[part].to(outputs.device)  # parts of a model may be on several devices
            used[part.start] = self.comparison.uses(outputs, some).cpu()
            return self.comparison.part(outputs, some)

        if self.task in TOKEN_TASKS and isinstance(inputs, Mapping):
            # Position t of a causal model predicts the label at t + 1.
            at = where.roll(-1, dims=1) if self.task == "causal_lm" else where
            tokens, self.sampled = kept_at(self.model, inputs, at, self.top, noise, compared)
        else:
            outputs = target_outputs(logits_of(self.model, inputs), labels, self.task)
            outputs = compared(outputs, slice(0, len(outputs)))
            tokens = kept_tokens(outputs, self.top, noise)
            self.sampled = sampled_tokens(self.top, outputs.shape[1])
        rows = (*tokens, torch.cat([*used.values()]))
        # Copies: pickling a view would pickle the whole tensor.
        pieces = ([x.clone() for x in values.cpu().split(counts)] for values in rows)
        return [_Sample(Kept(*kept), is_used) for *kept, is_used in zip(*pieces, strict=True)]

    def _noise(self, index: int) -> Tensor:
        """The noise of a sample, which does not depend on its batch."""
        generator = generator_of("base predictions", self.run.seed, index)
        return torch.rand(self.counts[index], generator=generator, dtype=torch.float64)
