"""Objectives that weigh samples or tokens by their losses at θ*: one pass before training."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from holdfast.columns import with_weights
from holdfast.scoring.scorer import score
from holdfast.scoring.scores import Scores
from holdfast.stages import Criterion, Objective, Run, samples_of


def scored(objective: Objective, run: Run, *, tokens: bool) -> tuple[Any, Scores]:
    """The samples of a run, and their losses at θ*; with ``tokens``, also those of all tokens."""
    data = samples_of(objective, run, run.data).data
    scores = score(
        run.model,
        run.data,
        task=run.task,
        collate=run.collate,
        tokens=tokens,
        autocast=run.autocast,
        cache=run.cache,
        progress=run.progress,
    )
    return data, scores


class CarriedWeights(Criterion):
    """The loss with weights that samples carry: one per sample, or one per target token."""

    column = "holdfast_weight"  # unlikely to be a column of the user

    def __init__(self, run: Run, data: Any, values: Tensor | Sequence[Tensor]) -> None:
        task = run.task if isinstance(run.task, str) else "causal_lm"  # used for tokens only
        super().__init__(run, with_weights(data, values, column=self.column, task=task))

    def weights(self, batch: Any, values: Tensor | None, update: int) -> Tensor | None:
        return values
