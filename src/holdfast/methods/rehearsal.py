r"""Rehearsal: train on data of the old task as well.

The multi-task objective that RecAdam simulates without data, Chen et al., *Recall and Learn*,
EMNLP 2020, https://arxiv.org/abs/2004.12651, equation 1 with the annealing of equation 8:

    λ(t)·Loss_T + (1 − λ(t))·Loss_S

with Loss_T the mean loss over all targets of the new task and Loss_S that of the old task. Both are
mixed into one dataset, in which a share s of the targets belongs to the old task. A sample of the
new task has weight λ/(1−s), and one of the old task (1−λ)/s. The weighted mean over the dataset is
the objective, and random batches give it in expectation.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset

from holdfast._torch.adapters import without_peft
from holdfast._torch.batch import inputs_and_labels
from holdfast._torch.checks import at_least_zero
from holdfast.anneal import Anneal, Constant, check_anneal
from holdfast.columns import keeping, take_columns, with_column
from holdfast.data import IndexedSource, is_table
from holdfast.losses import TOKEN_TASKS, count_targets
from holdfast.stages import Checks, Recall, RecallTerm, Run, samples_of

_COLUMN = "rehearsal"  # 1 for samples of the old task, 0 for those of the new one
_LABELS = ("labels", "label", "label_ids")


@dataclass(frozen=True)
class Rehearsal(Recall):
    """A mix of the losses on the new data and on data of the old task.

    Pass the old task's data to the host as ``old_data=``, in the same format as the new data: both
    use the same model and the same ``collate``. Train on the mix in random order.

    Args:
        ratio: the number of old samples per new sample in the mix, drawn once with the run's seed,
            repeatedly if there are too few. 0 turns rehearsal off. The ratio changes how often old
            samples are seen, not their total weight.
        anneal: λ(t), the weight of the new task at update t. If None, it is always ½. With an
            annealing to 1, such as :class:`~holdfast.anneal.Sigmoid`, only the new task remains.

    Example:
        >>> from holdfast import Recipe, Rehearsal
        >>> from holdfast.anneal import Constant
        >>> Recipe(recall=Rehearsal(ratio=0.1, anneal=Constant(0.8))).name
        'rehearsal'
    """

    checks: ClassVar[Checks] = {"ratio": at_least_zero, "anneal": check_anneal}
    neutral: ClassVar[dict[str, Any] | None] = {"ratio": 0.0}

    ratio: float = 0.25
    anneal: Anneal | None = None

    @property
    def changes_loss(self) -> bool:
        return self.ratio != 0

    def unfit(self, model: nn.Module, has_old_data: bool) -> str | None:
        if has_old_data or self.ratio == 0:
            return None
        return (
            "Rehearsal needs data of the old task: pass it as old_data= (--old-data on the command "
            "line), or use a method that needs none"
        )

    def prepare(self, run: Run) -> RecallTerm:
        if self.ratio == 0:
            return RecallTerm()
        if reason := self.unfit(run.model, run.old_data is not None):
            raise ValueError(reason)
        criterion, column = run.criterion, run.criterion.column
        new = samples_of(self, run, run.data)
        old = samples_of(self, run, run.old_data, "old_data")
        for name, source in (("data", new), ("old_data", old)):
            if len(source.data) == 0:
                raise ValueError(f"the {name} is empty: there is nothing to train on")
        ours, theirs = new.data, old.data
        if column is not None:  # the objective has added it; samples of the old task do not use it
            ours = criterion.data
            theirs = with_column(theirs, [_like(ours[0], x, column) for x in theirs], column)
        count = max(1, round(self.ratio * len(ours)))
        mix = mixed(ours, theirs, draw(len(theirs), count, run.seed), run.model)
        is_old = [0] * len(ours) + [1] * count
        collate = keeping(new.collate, *criterion.columns)
        share = _share_of_old(run, IndexedSource(mix, collate, new.batch_size), len(ours))
        criterion.data = with_column(mix, is_old, _COLUMN)
        return RehearsalTerm(self.anneal or Constant(0.5), share)


class RehearsalTerm(RecallTerm):
    """The weights of a mix in which ``share`` of the targets belong to the old task."""

    columns = (_COLUMN,)

    def __init__(self, anneal: Anneal, share: float) -> None:
        self.anneal, self.share = anneal, share

    def weights(
        self, weights: Tensor | None, values: Mapping[str, Tensor], update: int
    ) -> Tensor | None:
        is_old = values[_COLUMN]
        mixing = mixing_weights(is_old, self.anneal(update), self.share)
        if weights is None:
            return mixing
        if weights.dim() > is_old.dim():  # one per token
            mixing, is_old = mixing[:, None], is_old[:, None]
        return torch.where(is_old != 0, mixing, mixing * weights)


def mixing_weights(is_old: Tensor, lam: float, share: float) -> Tensor:
    """λ/(1−s) for samples of the new task, (1−λ)/s for those of the old one.

    Example:
        >>> import torch
        >>> mixing_weights(torch.tensor([0, 0, 0, 1]), lam=0.5, share=0.25)
        tensor([0.6667, 0.6667, 0.6667, 2.0000], dtype=torch.float64)
    """
    dtype = torch.float32 if is_old.device.type == "mps" else torch.float64
    new = torch.full_like(is_old, lam / (1 - share), dtype=dtype)
    return new.masked_fill(is_old != 0, (1 - lam) / share)


def draw(available: int, count: int, seed: int) -> list[int]:
    """Draw samples of the old task: each once before any is drawn again.

    Example:
        >>> sorted(draw(3, 6, seed=0))
        [0, 0, 1, 1, 2, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = []
    while len(drawn) < count:
        drawn += torch.randperm(available, generator=generator).tolist()
    return drawn[:count]


def mixed(new: Any, old: Any, chosen: Sequence[int], model: nn.Module) -> Any:
    """All samples of ``new``, then the chosen ones of ``old``, with their common columns.

    Two ``datasets.Dataset`` give another one. The inputs of the model, and the labels, must be
    columns of both datasets or of none.
    """
    if is_table(new) and is_table(old):
        import datasets

        old = old.select(chosen)
        needed = _check_columns(new.column_names, old.column_names, model)
        same = {name for name in new.column_names if new.features[name] == old.features.get(name)}
        common = [name for name in new.column_names if name in needed | same]
        new, old = new.select_columns(common), old.select_columns(common)
        try:
            old = old if old.features == new.features else old.cast(new.features)
            return datasets.concatenate_datasets([new, old])
        except (TypeError, ValueError, NotImplementedError) as error:
            differing = [n for n in common if n not in same]
            types = [f"{n} is {new.features[n]} and {old.features[n]}" for n in differing]
            raise ValueError(
                f"the columns of data and old_data have different types: {'; '.join(types)}"
            ) from error
    return _Mixed(new, old, chosen, model)


class _Mixed(ConcatDataset[Any]):
    def __init__(self, new: Any, old: Any, chosen: Sequence[int], model: nn.Module) -> None:
        super().__init__([new, Subset(old, chosen)])
        self.columns: list[str] | None = None
        first, other = new[0], old[chosen[0]]
        if isinstance(first, Mapping) and isinstance(other, Mapping):
            _check_columns(first, other, model)
            self.columns = [name for name in first if name in other]
        elif type(first) is not type(other) or len(first) != len(other):
            raise ValueError(
                "the samples of data and old_data must have the same type and length, got "
                f"{type(first).__name__} of length {len(first)} and {type(other).__name__} of "
                f"length {len(other)}"
            )

    def __getitem__(self, i: int) -> Any:
        sample = super().__getitem__(i)  # type: ignore[no-untyped-call]
        return sample if self.columns is None else {name: sample[name] for name in self.columns}


def _like(sample: Any, old: Any, column: str) -> Any:
    """NaN, "no value", for an old sample's column: one, or one per label as in a new sample."""
    tuples = not isinstance(sample, Mapping)
    value = sample[-1] if tuples else sample[column]
    if isinstance(value, int | float):
        return math.nan
    return [math.nan] * len(old[1] if tuples else old["labels"])


def _check_columns(new: Iterable[str], old: Iterable[str], model: nn.Module) -> set[str]:
    """The columns to train on, which must be equal in both datasets."""
    # PEFT's own forward names no inputs.
    inputs = {*inspect.signature(without_peft(model).forward).parameters, *_LABELS}
    of_new, of_old = inputs & set(new), inputs & set(old)
    if of_new != of_old:
        raise ValueError(
            f"data and old_data must have the same inputs and labels: {sorted(of_new - of_old)} "
            f"is only in data, {sorted(of_old - of_new)} only in old_data"
        )
    return of_new


def _share_of_old(run: Run, mix: IndexedSource, new: int) -> float:
    """The share of a mix's targets that come after its first ``new`` samples."""
    total = len(mix.data)
    targets = [float(new), float(total - new)]  # one per sample, unless they are tokens
    if run.task in TOKEN_TASKS and isinstance(run.task, str):
        targets = [0.0, 0.0]
        for indices, read in mix:
            batch, _ = take_columns(read(), run.criterion.columns)
            labels = inputs_and_labels(run.model, batch)[1]
            for i, count in zip(indices, count_targets(labels, run.task).tolist(), strict=True):
                targets[i >= new] += count
    if min(targets) == 0:
        which = "data" if targets[0] == 0 else "old_data"
        raise ValueError(f"no sample of the {which} has a target: all labels are −100")
    return targets[1] / sum(targets)
