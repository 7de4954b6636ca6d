"""The architecture on one page: four stages, and what each asks of a method.

=========== ==================================== ==============================================
stage        question                             methods
=========== ==================================== ==============================================
1 trainable  what may change, and from where?     :class:`Trainable`, :class:`Start`
2 objective  what is minimised?                   :class:`Objective` → :class:`Criterion`
3 update     how do the weights move?             :class:`Update`, :class:`~holdfast.optim.Penalty`
4 merging    what is kept?                        :class:`Merging`
=========== ==================================== ==============================================

A method is a frozen dataclass: its fields are its settings, and all that a recipe file holds. It
extends the class of its stage, whose own behaviour is the stage's identity, and overrides what it
changes. A :class:`~holdfast.Recipe` has a slot for each stage; a :class:`~holdfast.run.Run` is a
recipe at work on a model and data, and what every method is given. Data flows one way:

    pretrained model + data → θ* captured → 1 prepares the model → 2 scores the data at θ*
    → 3 builds the optimizer → the host's own loop trains → 4 merges

Stages 1, 2 and 4 are recomputed from settings and data when a run goes on after a stop. What must
survive the stop is in ``optimizer.state_dict()``, or, where 2 has a state, in the criterion's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from holdfast._torch.batch import batch_length, inputs_and_labels, logits_and_auxiliary
from holdfast._torch.checks import above_zero, at_least_zero
from holdfast.columns import take_column
from holdfast.data import Collate
from holdfast.losses import LossFunction, Task, count_targets, weighted_loss
from holdfast.reference import Reference

if TYPE_CHECKING:
    from holdfast.recipe import Recipe
    from holdfast.run import Run

__all__ = ["Criterion", "Merging", "Method", "Objective", "Start", "Trainable", "Update"]


@dataclass(frozen=True)
class Method:
    """What all methods have in common."""

    #: The settings that make the method its stage's identity; None if there are none.
    neutral: ClassVar[dict[str, Any] | None] = {}
    #: Whether the method looks at the pretrained weights after training has begun.
    needs_reference: ClassVar[bool] = False
    #: Whether it takes something at the pretrained weights once, or keeps them in the model.
    uses_base: ClassVar[bool] = False

    def conflict(self, recipe: Recipe) -> str | None:
        """Why this method makes no sense in a recipe, if it does not."""
        return None


@dataclass(frozen=True)
class Trainable(Method):
    """Stage 1: what may change? As it is: everything."""

    #: Whether the pretrained weights stay in the model (beside adapters): then no copy is taken.
    keeps_base: ClassVar[bool] = False

    def prepare(self, run: Run) -> nn.Module:
        """The model to train. What may ever change requires gradients, the rest does not."""
        model: nn.Module = run.model
        return model

    def fit(self, run: Run) -> None:
        """What must be fitted to the data before anything is scored on it at θ*."""

    def anchors(self, run: Run) -> Reference | None:
        """θ* of what is trained: where pulls and merging lead. None without a reference.

        A model that came with adapters has its pretrained weights where they are nothing.
        """
        from holdfast.methods.lora import adapter_anchors, has_adapters

        if run.reference is None and run.recipe.needs_reference and has_adapters(run.model):
            return adapter_anchors(run.model)
        return run.reference

    def advance(self, model: nn.Module, update: int, total_updates: int) -> None:
        """Called before each update, counted from 1: what may change now."""

    def finish(self, model: nn.Module) -> nn.Module:
        """The trained model, with what :meth:`prepare` did to it undone where it is in the way."""
        return model


@dataclass(frozen=True)
class Start(Method):
    """Stage 1: from where do the weights start? As it is: from the pretrained ones."""

    def apply(self, run: Run) -> None:
        """Put the model at its start, when all that is taken at θ* has been taken."""


@dataclass(frozen=True)
class Objective(Method):
    """Stage 2: what is minimised? As it is: the mean loss over all targets."""

    def prepare(self, run: Run) -> Criterion:
        """Look at the data at θ*, once, before training."""
        return Criterion(run)


class Criterion:
    """An objective that has seen its data: the data to train on, and the loss of a batch of it.

    Attributes:
        data: the training data; perhaps with a ``column`` that the loss needs.
        column: its name; batches must carry it (:func:`holdfast.columns.keeping`).
        auxiliary: how much of a model's own auxiliary loss (of a mixture of experts) a micro-batch
            counts; None is its share of the targets, so that an update has their mean.
    """

    column: str | None = None
    auxiliary: float | None = None

    def __init__(self, run: Run, data: Any = None) -> None:
        self.data = run.data if data is None else data
        self._run = run

    @property
    def task(self) -> Task | LossFunction:
        """What the labels mean."""
        return self._run.task

    def loss(
        self, model: nn.Module, batch: Any, num_targets: Tensor | float, update: int
    ) -> Tensor:
        """The part of update ``update``'s loss that falls to one micro-batch.

        Args:
            model: in training mode.
            batch: a mapping with labels or (inputs, labels), on the model's device.
            num_targets: those of all micro-batches of the update, to divide by.
            update: counted from 1.
        """
        values = None
        if self.column is not None:
            batch, values = take_column(batch, self.column)
        weights = self.weights(model, batch, values, update)
        return self.weighted(model, batch, weights, num_targets)

    def weights(
        self, model: nn.Module, batch: Any, values: Tensor | None, update: int
    ) -> Tensor | None:
        """The weights of a batch's samples or tokens, by what its column holds; None is 1."""
        return None

    def weighted(
        self, model: nn.Module, batch: Any, weights: Tensor | None, num_targets: Tensor | float
    ) -> Tensor:
        """Σ weight · loss over the targets of a batch, divided by ``num_targets``."""
        if not isinstance(self.task, str):  # a function of the user's: a loss for each sample
            losses = self.task(model, batch)
            if losses.shape != (batch_length(batch),):
                raise ValueError(
                    "the task's function must return one loss a sample (reduction='none'), "
                    f"{(batch_length(batch),)}, got {tuple(losses.shape)}"
                )
            return (losses if weights is None else weights.to(losses) * losses).sum() / num_targets
        inputs, labels = inputs_and_labels(model, batch)
        logits, auxiliary = self.forward(model, inputs, labels, num_targets)
        return weighted_loss(logits, labels, weights, self.task, num_targets) + auxiliary

    def forward(
        self, model: nn.Module, inputs: Any, labels: Tensor, num_targets: Tensor | float
    ) -> tuple[Tensor, Tensor | float]:
        """The model's logits, and what falls to a micro-batch of its own auxiliary loss."""
        logits, auxiliary = logits_and_auxiliary(model, inputs)
        if auxiliary is None:
            return logits, 0.0
        share: Any = self.auxiliary
        if share is None:
            share = count_targets(labels, cast(Task, self.task)).sum() / num_targets
        return logits, auxiliary * share

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""


@dataclass(frozen=True)
class Update(Method, ABC):
    """Stage 3: how do the weights move? The description of an optimizer.

    Args:
        lr: the learning rate; None is the host's. Both set and different is an error.
        weight_decay: decoupled, on matrices only; None is the host's.
        layer_decay: discriminative learning rates: each layer's is the one above it divided by
            this number (ULMFiT: 2.6). 1 is the same for all.
    """

    lr: float | None = None
    weight_decay: float | None = None
    layer_decay: float = 1.0

    @property
    def pulls(self) -> bool:
        """Whether it draws the weights to θ*."""
        return False

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, at_least_zero(name, getattr(self, name)))
        object.__setattr__(self, "layer_decay", above_zero("layer_decay", self.layer_decay))

    def measure_importance(self, run: Run) -> Reference | None:
        """How much each coordinate matters, taken at θ*, where the method weighs them."""
        return None

    @abstractmethod
    def optimizer(self, groups: list[dict[str, Any]], run: Run, total_updates: int) -> Optimizer:
        """The optimizer, given groups of named parameters with their ``lr`` and weight decay."""


@dataclass(frozen=True)
class Merging(Method):
    """Stage 4: what is kept? As it is: the tuned model."""

    def merge(
        self,
        model: nn.Module,
        reference: Reference | None,
        *,
        data: Any = None,
        collate: Collate | None = None,
    ) -> nn.Module:
        """What is kept of a tuned model, in place.

        Args:
            model: the tuned model.
            reference: θ* of what was trained.
            data, collate: the training data, for what must be re-estimated on it.
        """
        return model
