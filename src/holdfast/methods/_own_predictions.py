"""Objectives that weigh each target by what the model itself predicts, in every forward pass."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from holdfast.losses import CLASS_TASKS, LossFunction, Predicted, Task
from holdfast.stages import Criterion, Objective, Recall, Run


@dataclass(frozen=True)
class WeighsPredictions(Objective, ABC):
    """A weight per target from the predictions of the model in training, without gradient."""

    #: Whether the weights depend on the logits, and not only on the losses.
    needs_outputs: ClassVar[bool] = False

    @property
    def needs_batch(self) -> bool:
        """Whether the weight of a target depends on the losses of the other targets."""
        return False

    @property
    def reads_data(self) -> bool:
        """False: the weights come with the forward passes of the training."""
        return False

    @property
    @abstractmethod
    def changes_loss(self) -> bool:
        """False if the settings make all weights 1."""

    @abstractmethod
    def weights_of(self, batch: Any, predicted: Predicted) -> Tensor:
        """Return the weight of every target that is predicted."""

    def unfit_task(self, task: Task | LossFunction) -> str | None:
        return without_classes(self, task) if self.changes_loss else None

    def prepare(self, run: Run) -> Criterion:
        if not self.changes_loss:
            return Criterion(run)
        if reason := self.unfit_task(run.task):
            raise ValueError(reason)
        return PredictionCriterion(run, self)


class PredictionCriterion(Criterion):
    """The loss with the weights of an objective."""

    def __init__(self, run: Run, objective: WeighsPredictions) -> None:
        super().__init__(run)
        self.objective = objective
        self.needs_outputs, self.needs_batch = objective.needs_outputs, objective.needs_batch

    def output_weights(self, batch: Any, predicted: Predicted) -> Tensor:
        return self.objective.weights_of(batch, predicted)


def without_classes(method: Objective | Recall, task: Task | LossFunction) -> str | None:
    """Return why a task does not fit: its targets are no classes, which have a probability."""
    if isinstance(task, str) and task in CLASS_TASKS:
        return None
    given = repr(task) if isinstance(task, str) else "a loss function"
    other = "recall" if isinstance(method, Recall) else "objective"
    return (
        f"{type(method).__name__} needs the probability of each target, which only the tasks "
        f"{', '.join(CLASS_TASKS)} have, not {given}: use another {other}"
    )
