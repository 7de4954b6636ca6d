"""Objectives that weigh each target by what the model itself predicts, in every forward pass."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from holdfast.losses import CLASS_TASKS, Predicted
from holdfast.stages import Criterion, Objective, Recall, Run


@dataclass(frozen=True)
class WeighsPredictions(Objective, ABC):
    """A weight per target from the predictions of the model in training, without gradient."""

    #: Whether the weights depend on the logits, and not only on the losses.
    needs_outputs: ClassVar[bool] = False

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
        """Return the weight of every target."""

    def prepare(self, run: Run) -> Criterion:
        if not self.changes_loss:
            return Criterion(run)
        check_classes(self, run)
        return PredictionCriterion(run, self)


class PredictionCriterion(Criterion):
    """The loss with the weights of an objective."""

    def __init__(self, run: Run, objective: WeighsPredictions) -> None:
        super().__init__(run)
        self.objective, self.needs_outputs = objective, objective.needs_outputs

    def output_weights(self, batch: Any, predicted: Predicted) -> Tensor:
        return self.objective.weights_of(batch, predicted)


def check_classes(method: Objective | Recall, run: Run) -> None:
    """Raise ValueError unless each target of the run's task is a class with a probability."""
    task = run.task
    if not isinstance(task, str) or task not in CLASS_TASKS:
        given = repr(task) if isinstance(task, str) else "a loss function"
        raise ValueError(
            f"{type(method).__name__} needs the probability of each target, which only the tasks "
            f"{', '.join(CLASS_TASKS)} have, not {given}: use another "
            f"{'recall' if isinstance(method, Recall) else 'objective'}"
        )
