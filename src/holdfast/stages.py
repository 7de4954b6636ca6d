"""The architecture on one page: four stages, and the hooks of each.

=========== ================================= ===================================
stage       question                          classes
=========== ================================= ===================================
1 trainable what may change, and from where?  :class:`Trainable`, :class:`Start`
2 objective how do the new samples count?     :class:`Objective`, :class:`Criterion`
2 recall    which old knowledge is preserved? :class:`Recall`, :class:`RecallTerm`
3 update    how do the weights move?          :class:`Update`, :class:`Penalty`
4 merging   which weights are kept?           :class:`Merging`
=========== ================================= ===================================

A method is a frozen dataclass that extends the class of its stage. Its fields are its settings, and
a recipe file holds nothing else. A stage class without overrides is plain fine-tuning; a method
overrides the hooks that it needs. All code specific to a method is in its hooks. Other modules
never refer to a particular method.

A :class:`~holdfast.Recipe` has one slot per stage. A :class:`~holdfast.Run` applies a recipe to a
model and data, and most hooks receive it. θ* denotes the pretrained weights. The order of a run:

    pretrained model + data → capture θ* → 1 prepare the model → 2 score the data and prepare the
    recall at θ* → 3 build the optimizer → the host's own loop trains → 4 merge

A resumed run computes stages 1, 2 and 4 again from settings and data. State that must survive a
restart is in ``optimizer.state_dict()`` or in the state of the criterion and of the recall.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from holdfast._torch.adapters import adapter_origin, has_adapters
from holdfast._torch.batch import batch_length, inputs_and_labels, pad_id_of
from holdfast._torch.checks import NamedSettings, above_zero, at_least_zero
from holdfast._torch.merging import Slice, Slices, SlicesInMemory, Where, between
from holdfast.columns import take_columns
from holdfast.data import Collate, IndexedSource, as_source
from holdfast.losses import (
    Count,
    LossFunction,
    Predicted,
    Task,
    count_targets,
    infer_task,
    per_target,
    summed_loss,
)
from holdfast.reference import Reference

if TYPE_CHECKING:
    from holdfast.recipe import Recipe as Recipe
    from holdfast.run import Run as Run
else:  # both are built on top of the stages; methods import the types from here
    Recipe = Run = Any

Result = TypeVar("Result")
Checks = dict[str, Callable[[str, Any], Any]]  # setting → (name, value) → the validated value


@dataclass(frozen=True)
class SearchRange:
    """The values of a setting that ``tune`` searches.

    Attributes:
        low, high: the smallest and the largest value.
        default: the value without a search. If it is an int, only integers are tried.
        log: search on a logarithmic scale.
    """

    low: float
    high: float
    default: float
    log: bool = True

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(
                f"a search range needs low < high, and low > 0 on a logarithmic scale: got "
                f"{self.low:g} to {self.high:g}"
            )


SearchSpace = dict[str, SearchRange]
#: Bytes of the importance of a weight, which is measured in float32.
IMPORTANCE_BYTES = 4.0
#: Updates of a run at which penalties are asked whether they act; a longer run is like this one.
_COUNTED = 10_000
MedianLoss = Callable[[], float | None]


@dataclass(frozen=True)
class Planned:
    """A training before it starts, as far as the costs of methods depend on it.

    Attributes:
        value: bytes of a trained weight.
        anchor: bytes of θ* per weight.
        data: samples of the training data.
        samples: samples per update, over all ranks.
        updates: updates of the run.
        length: tokens per sample; 1 for an image.
        targets: targets per sample: one per token of a language model, else 1.
        outputs: the values that the model predicts per target, such as its vocabulary.
        keeps_base: whether the trained model contains θ*, so that no frozen copy is needed.
    """

    value: float
    anchor: float
    data: int
    samples: int
    updates: int
    length: int
    targets: int
    outputs: int
    keeps_base: bool = False


@dataclass(frozen=True)
class Cost:
    """What a method costs: the memory that it keeps, and the work that it does.

    θ* is not part of it: a copy is kept once if any method of a recipe needs it.

    Attributes:
        state: bytes per trained weight in the memory of the GPU, by name. They are sharded like the
            weights.
        moved: bytes per trained weight that the step reads and writes.
        kernel: the measured implementation that has the speed of the step; empty for a pull.
        copies: copies of the model's weights, or as much memory. They are not sharded.
        on_cpu: bytes in CPU memory, in every process.
        trained: tokens per update that the model is trained on, besides those of the target.
        predicted: tokens per update that the model or a copy of it predicts, without gradients.
        before_predicted: tokens that the model predicts once, before training.
        before_trained: tokens whose gradients are computed once, before training.
        before_drawn: tokens that are sampled from the model once, before training.
    """

    state: Mapping[str, float] = field(default_factory=dict)
    moved: float = 0.0
    kernel: str = ""
    copies: float = 0.0
    on_cpu: float = 0.0
    trained: float = 0.0
    predicted: float = 0.0
    before_predicted: float = 0.0
    before_trained: float = 0.0
    before_drawn: float = 0.0


@dataclass(frozen=True)
class Method(NamedSettings):
    """Base class of all methods: the hooks that every stage has."""

    #: The check of each setting that has one. None is also valid if it is the default.
    checks: ClassVar[Checks] = {}
    #: Settings with which the method is plain fine-tuning; None if there are none.
    neutral: ClassVar[dict[str, Any] | None] = {}
    #: Whether the result depends on θ* in another way, such as on its predictions before training.
    uses_base: ClassVar[bool] = False
    #: Whether the method can be tried by itself; False if its default settings are an example.
    stands_alone: ClassVar[bool] = True
    #: The values of :meth:`log` that a report plots over the training.
    plotted: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for cls in type(self).__mro__:
            for name, check in vars(cls).get("checks", {}).items():
                value = getattr(self, name)
                if value is not None or getattr(type(self), name, ...) is not None:
                    object.__setattr__(self, name, check(name, value))

    def __str__(self) -> str:
        """The method and its settings, rounded for people."""
        given = ((f.name, getattr(self, f.name)) for f in fields(self) if f.init)
        shown = (f"{n}={float(f'{x:.4g}') if isinstance(x, float) else x!r}" for n, x in given)
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def needs_reference(self) -> bool:
        """Whether the method uses θ* after training has started, so that a copy of θ* is kept."""
        return False

    @property
    def reads_data(self) -> bool:
        """Whether the method reads the training data before training."""
        return False

    @property
    def changes_loss(self) -> bool:
        """Whether the method changes the loss of the training samples.

        It weighs them, or compares the outputs of the model on them. A trainer that computes
        another loss than that of labeled samples, such as a loss of preferences, refuses it.
        """
        return False

    @property
    def needs_fitted_head(self) -> bool:
        """Whether the method uses the pretrained model's predictions on the training data.

        A new head predicts at random, so it must be fitted first.
        """
        return False

    @property
    def elementwise(self) -> bool:
        """Whether the method treats each weight by itself, so that ZeRO may shard the weights."""
        return True

    def conflict(self, recipe: Recipe) -> str | None:
        """Return why the method cannot be used in a recipe, or None if it can."""
        return None

    def unfit(self, model: nn.Module, has_old_data: bool) -> str | None:
        """Return why the method cannot be used with a model, or None if it can.

        Hosts call it before they load weights, if they can: the parameters may have no values.
        """
        return None

    def unfit_task(self, task: Task | LossFunction) -> str | None:
        """Return why the method cannot be used for a task, or None if it can."""
        return None

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        """Return the settings that ``tune`` searches, by name.

        Args:
            lr: the learning rate of the recipe.
            median_loss: computes the median loss of the training samples under the pretrained
                model, or None if the model has a new head.
        """
        return {}

    def log(self, run: Run) -> dict[str, float]:
        """Return values that hosts log during training, by name."""
        return {}

    def cost(self, planned: Planned) -> Cost:
        """Return what the method costs in a training. ``holdfast plan`` adds the costs up.

        The parameters that stage 1 trains, adds and freezes are counted on the model itself.
        """
        return Cost()


@dataclass(frozen=True)
class Trainable(Method):
    """Stage 1: what may change? Without overrides: everything."""

    #: Whether the trained model contains θ* (LoRA freezes it), so that no copy is needed.
    keeps_base: ClassVar[bool] = False
    #: Whether :meth:`fit` fits a new head, so that other methods can use its predictions.
    fits_head: ClassVar[bool] = False
    #: Whether the method trains nothing but heads.
    trains_only_head: ClassVar[bool] = False
    #: Why training must start at θ*, as a predicate ("freezes the body"); empty if it need not.
    needs_pretrained_start: ClassVar[str] = ""

    @property
    def reads_data(self) -> bool:
        """True if the method overrides :meth:`fit`."""
        return type(self).fit is not Trainable.fit

    @property
    def needs_warm_up(self) -> bool:
        """Whether training may diverge without a warm-up and clipped gradients.

        Hosts then add both, unless the user has set them.
        """
        return False

    def prepare(self, run: Run) -> nn.Module:
        """Return the model to train. Every parameter that may change later requires a gradient."""
        return run.model

    def fit(self, run: Run) -> None:
        """Fit a part of the model to the data. Called before methods use predictions at θ*."""

    def anchors(self, run: Run) -> Reference | None:
        """Return the pretrained values θ* of the trained parameters; None if no method needs them.

        Pulls and merging use them. For a model that already has adapters, θ* is the model without
        their effect: B = 0 for LoRA, the values of now for others, which must be new.
        """
        if run.reference is None and run.recipe.needs_reference and has_adapters(run.model):
            return Reference(adapter_origin(run.model)).bind(run.model)
        return run.reference

    def attach(self, run: Run) -> None:
        """Called once ``run.optimizer`` exists: hooks of its step act after the penalties."""

    def advance(self, model: nn.Module, update: int, total_updates: int) -> None:
        """Freeze and unfreeze parameters. Called before each update, counted from 1."""

    def finish(self, model: nn.Module) -> nn.Module:
        """Return the trained model without the temporary changes of :meth:`prepare`."""
        return model


@dataclass(frozen=True)
class Start(Method):
    """Stage 1: from where do the weights start? Without overrides: from θ*."""

    def apply(self, run: Run) -> None:
        """Set the initial weights. Called after everything that needs the model at θ*."""


@dataclass(frozen=True)
class Objective(Method):
    """Stage 2: how do the new samples count? Without overrides: the mean loss over all targets."""

    #: Whether ``weigh(scores)`` returns sample weights for the task's own loss. Such a method also
    #: has ``temperature(scores)``, the scale of the losses.
    weighs_samples: ClassVar[bool] = False

    @property
    def reads_data(self) -> bool:
        """True if the method overrides :meth:`prepare`."""
        return type(self).prepare is not Objective.prepare

    @property
    def changes_loss(self) -> bool:
        """True if the method overrides :meth:`prepare`."""
        return type(self).prepare is not Objective.prepare

    def cost(self, planned: Planned) -> Cost:
        """A forward pass over the data before training, if the method reads it."""
        read = planned.data * planned.length if self.reads_data else 0
        return Cost(before_predicted=read)

    def prepare(self, run: Run) -> Criterion:
        """Return the criterion. The model is still at θ*."""
        return Criterion(run)

    def packing_conflict(self) -> str | None:
        """Return why the objective cannot be used where a host packs samples, or None if it can.

        After packing, each token carries its own value, and samples can no longer be told apart.
        """
        return None


def samples_of(method: Method, run: Run, data: Any, name: str = "data") -> IndexedSource:
    """Return the source that reads data by index; raise ValueError for a stream."""
    source = as_source(data, run.collate, 32, pad_id_of(run.model))
    if isinstance(source, IndexedSource):
        return source
    raise ValueError(
        f"{type(method).__name__} adds a value to each sample, so {name} must be indexed samples, "
        f"not a stream or batches: pass a dataset as {name}= and its collate function as collate="
    )


class Criterion:
    """The training data and the loss of a batch. An objective's ``prepare`` returns it.

    Attributes:
        data: the training data, with all ``columns``.
        column: the column that :meth:`weights` needs, if any.
        recall: the recall of the recipe, which may add columns and change the loss.
        auxiliary: the weight of the model's auxiliary loss (for mixture-of-experts models) in each
            micro-batch. If None, the number of its targets divided by that of the whole update.
        needs_outputs: whether :meth:`output_weights` needs the logits, and not only the losses. A
            host with a loss of its own may know only the losses.
        needs_batch: whether :meth:`output_weights` needs the losses of all targets of a batch at
            once.
    """

    column: str | None = None
    auxiliary: float | None = None
    needs_outputs: bool = False
    needs_batch: bool = False

    def __init__(self, run: Run, data: Any = None) -> None:
        self.data = run.data if data is None else data
        self.recall = RecallTerm()
        # Not the run: a cycle would keep its memory until the next garbage collection.
        self.model, self._task = run.model, run.given_task

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that batches must carry (:func:`holdfast.columns.keeping`), in order."""
        return (*(() if self.column is None else (self.column,)), *self.recall.columns)

    @property
    def task(self) -> Task | LossFunction:
        """The run's task."""
        if self._task is None:
            self._task = infer_task(self.model)
        return self._task

    def loss(self, model: nn.Module, batch: Any, num_targets: Count, update: int) -> Tensor:
        """Return one micro-batch's contribution to the loss of an update.

        Args:
            model: the model, in training mode.
            batch: a mapping with labels or a pair (inputs, labels), on the model's device.
            num_targets: the number of targets in all micro-batches of the update.
            update: the number of the update, counted from 1.
        """
        batch, values = take_columns(batch, self.columns)
        if not isinstance(self.task, str):  # the user's function: one loss per sample
            weights = self.weigh(batch, values, update)
            losses = self.task(model, batch)
            if losses.shape != (batch_length(batch),):
                raise ValueError(
                    "the task's function must return one loss per sample (reduction='none'), "
                    f"{(batch_length(batch),)}, got {tuple(losses.shape)}"
                )
            return (losses if weights is None else weights.to(losses) * losses).sum() / num_targets
        inputs, labels = inputs_and_labels(model, batch)
        before = self.recall.before(model, inputs, labels, values, update)
        weigh = partial(self.weigh, batch, values, update)
        total, auxiliary = summed_loss(
            model, inputs, labels, weigh if self.weighs_outputs else weigh(), self.task,
            needs_batch=self.needs_batch,
            on_targets=partial(self.recall.on_targets, before) if self.recall.compares else None,
        )  # fmt: skip
        apart = self.recall.after(before, labels)
        total = total if apart is None else total + apart
        loss = per_target(total, labels, self.task, num_targets)
        if auxiliary is None:
            return loss
        return loss + auxiliary * self._share_of_auxiliary(labels, num_targets)

    def weigh(
        self,
        batch: Any,
        values: Mapping[str, Tensor],
        update: int,
        predicted: Predicted | None = None,
    ) -> Tensor | None:
        """Return the weights of a batch's samples or tokens; None if all 1.

        Args:
            batch: the batch without its columns.
            values: its columns, by name.
            update: the number of the update, counted from 1.
            predicted: what the model predicts, if :attr:`weighs_outputs`.
        """
        if predicted is None:
            column = None if self.column is None else values[self.column]
            weights = self.weights(batch, column, update)
        else:
            weights = predicted.along_labels(self.output_weights(batch, predicted))
        return self.recall.weights(weights, values, update)

    def weights(self, batch: Any, values: Tensor | None, update: int) -> Tensor | None:
        """Return the objective's weights, given the values of its column; None if all 1."""
        return None

    @property
    def weighs_outputs(self) -> bool:
        """True if the criterion overrides :meth:`output_weights`."""
        return type(self).output_weights is not Criterion.output_weights

    def output_weights(self, batch: Any, predicted: Predicted) -> Tensor:
        """Return a weight per target, given what the model predicts.

        :meth:`weights` is then not called. The weights carry no gradient. ``predicted`` has a part
        of the batch's targets at a time, unless ``needs_batch``. ``predicted.outputs`` may be None
        unless ``needs_outputs``, and with ``needs_batch``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not weigh by outputs")

    def _share_of_auxiliary(self, labels: Tensor, num_targets: Count) -> Tensor | float:
        if self.auxiliary is not None:
            return self.auxiliary
        return count_targets(labels, cast(Task, self.task)).sum() / num_targets

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""


class TrainingSize(NamedTuple):
    """How much a run trains on: its samples, None if they are not counted, and its epochs."""

    samples: int | None = None
    epochs: float = 1.0

    @classmethod
    def of(cls, samples: int | None, visits: float | None) -> TrainingSize:
        """The size of a run by its visits, each epoch counted; all samples of a stream differ."""
        if samples and visits:
            return cls(samples, visits / samples)
        return cls(samples if visits is None else round(visits))

    @property
    def seen(self) -> float | None:
        """The number of samples that are visited at least once; None if it is not known."""
        return None if self.samples is None else self.samples * min(1.0, self.epochs)


@dataclass(frozen=True)
class Recall(Method):
    """Stage 2: which old knowledge does the loss preserve? Without overrides: none."""

    @property
    def reads_data(self) -> bool:
        """True if the method overrides :meth:`prepare`."""
        return type(self).prepare is not Recall.prepare

    @property
    def changes_loss(self) -> bool:
        """True if the method overrides :meth:`prepare`; False for one with data of its own only."""
        return type(self).prepare is not Recall.prepare

    @property
    def interpolates(self) -> bool:
        """Whether it may move the merged weights toward θ*; with LoRA adapters, by scaling B."""
        return False

    @property
    def trains_on_drawn_texts(self) -> bool:
        """Whether training preserves the predictions on texts sampled from the base model.

        The divergence on such texts is then a training signal, and no evidence of retention.
        """
        return False

    @property
    def depends_on_model(self) -> bool:
        """True if the method overrides :meth:`resolve`."""
        return type(self).resolve is not Recall.resolve

    def resolve(
        self,
        recipe: Recipe,
        model: nn.Module,
        new: Sequence[str],
        task: Task | LossFunction | None,
        size: TrainingSize,
    ) -> Recipe:
        """Return the recipe for a model; the default is the recipe itself.

        If the recipe has no learning rate, it may set one, which is used if the host has none
        either.

        Args:
            model, new, task, size: see :class:`~holdfast.run.Run`.
        """
        return recipe

    def prepare(self, run: Run) -> RecallTerm:
        """Return the term. The model is still at θ*, and ``run.criterion`` is prepared.

        A term that needs columns or other samples replaces ``run.criterion.data``.
        """
        return RecallTerm()


class RecallTerm:
    """What a recall adds to the loss. A recall's ``prepare`` returns it; this one adds nothing.

    A term acts on the target's batches (:meth:`weights`, :meth:`before`, :meth:`on_targets`,
    :meth:`after`), or on data of its own (:meth:`plan`, :meth:`beside`).

    Attributes:
        columns: names of columns that it has added to the data of the criterion.
        uses_outputs: whether the term uses the outputs of the model on the target's batches.
    """

    columns: tuple[str, ...] = ()
    uses_outputs: bool = False

    @property
    def penalties(self) -> tuple[Penalty, ...]:
        """Penalties that act in the optimizer's step, besides those of the recipe."""
        return ()

    def weights(
        self, weights: Tensor | None, values: Mapping[str, Tensor], update: int
    ) -> Tensor | None:
        """Return the weights of samples or tokens, given those of the objective and all columns."""
        return weights

    def before(
        self, model: nn.Module, inputs: Any, labels: Tensor, values: Mapping[str, Tensor],
        update: int,
    ) -> Any:  # fmt: skip
        """Compute something before the model runs on a batch; the next two methods receive it."""
        return None

    @property
    def compares(self) -> bool:
        """True if the term overrides :meth:`on_targets`."""
        return type(self).on_targets is not RecallTerm.on_targets

    def on_targets(self, before: Any, part: slice, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a sum over some targets of a batch to add to the loss.

        Called while the model runs, until it had all targets: the outputs of a language model for
        all of them would need much memory.

        Args:
            before: the result of :meth:`before`.
            part: which targets of the batch these are, in their order.
            outputs: the outputs of the model, one row per target, in at least float32.
            targets: their labels.
        """
        raise NotImplementedError(f"{type(self).__name__} does not compare outputs")

    def after(self, before: Any, labels: Tensor) -> Tensor | None:
        """Return a sum over the targets to add to the loss, after the model has run; or None."""
        return None

    @property
    def has_data(self) -> bool:
        """True if the term overrides :meth:`plan`: it runs the model on data of its own."""
        return type(self).plan is not RecallTerm.plan

    def plan(self, model: nn.Module, update: int, samples: int, micro_batches: int) -> None:
        """Distribute the term's own data over the micro-batches of an update on this rank.

        Called before each update. All ranks have equally much data in each micro-batch.

        Args:
            model: the model as the host has wrapped it, in training mode.
            update: the number of the update, counted from 1.
            samples: the target's samples per update, over all ranks.
            micro_batches: the micro-batches of this update on this rank.
        """

    @contextlib.contextmanager
    def beside(self, model: nn.Module) -> Iterator[Callable[[], Tensor | float]]:
        """Run the data of one micro-batch beside the target's, in the same call if possible.

        A host computes the target's loss within the context, adds the result of the function that
        the context yields, and calls ``backward`` once:

            with recall.beside(model) as recalled:
                loss = ...  # calls the model
                loss = loss + recalled()

        The sum over the micro-batches of an update is the term's loss. Gradients are averaged over
        ranks, so each rank's part is multiplied by their number.
        """
        yield lambda: 0.0

    def attach(self, run: Run) -> None:
        """Called once the optimizer of the run exists."""

    def on_merged(self, model: nn.Module, reference: Reference | None) -> None:
        """Change the model that stage 4 has merged, in place, before it is returned or measured.

        ``reference`` is θ* of the trained parameters.
        """

    def identity(self) -> dict[str, Any]:
        """Return plain values that must be equal for a run to resume a checkpoint."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""


@dataclass(frozen=True)
class _Step(Method):
    """What updates and penalties have in common."""

    @property
    def reads_data(self) -> bool:
        """True if the method measures importance."""
        return type(self).measure_importance is not _Step.measure_importance

    def measure_importance(self, run: Run) -> Reference | None:
        """Return the importance of each coordinate, measured at θ*; None if all are equal."""
        return None


@dataclass(frozen=True)
class Update(_Step, ABC):
    """Stage 3: how do the weights move? The settings of an optimizer.

    Args:
        lr: the learning rate. If None, the value passed to the trainer or loop is used. If both are
            set and differ, an error is raised.
        weight_decay: decoupled, on matrices only. If None, that of the trainer or loop is used.
        layer_decay: each layer's learning rate is that of the layer above divided by this number
            (ULMFiT: 2.6). 1 gives all layers the same rate.
    """

    checks: ClassVar[Checks] = {
        "lr": at_least_zero, "weight_decay": at_least_zero, "layer_decay": above_zero,
    }  # fmt: skip

    lr: float | None = None
    weight_decay: float | None = None
    layer_decay: float = 1.0

    @property
    def pulls(self) -> bool:
        """Whether the optimizer pulls the weights to θ*."""
        return False

    @property
    def uses_loss(self) -> bool:
        """Whether the step depends on the loss of the update, which :meth:`observe` receives.

        A trainer with another loss than that of labeled samples refuses it.
        """
        return False

    def observe(self, optimizer: Optimizer, loss: Tensor) -> None:
        """Receive the loss of an update before its step.

        Called after each micro-batch with the sum so far. The loss of the update is the mean of
        this sum over the ranks.
        """

    @abstractmethod
    def optimizer(self, groups: list[dict[str, Any]], run: Run, total_updates: int) -> Optimizer:
        """Build the optimizer for groups of named parameters with their ``lr`` and weight decay."""


@dataclass(frozen=True)
class Penalty(_Step, ABC):
    """Stage 3: a pull to θ* in the step of any optimizer.

    A penalty acts once per update, inside the optimizer's step
    (:func:`holdfast.optim.attach_penalties`). A term in the loss would be counted once per
    micro-batch and, with sharded parameters, would not have access to the full weights.

    - *decoupled* (the default): the penalty moves the weights after the step, as weight decay does
      in AdamW. Adam's normalization does not change its strength.
    - *coupled*: the penalty's gradient is added to the parameter's before the step, as for a term
      in the loss.

    Override :meth:`rate` if the pull is proportional to θ − θ*, and :meth:`move` otherwise. To
    support *coupled*, also override :meth:`gradient`.
    """

    needs_reference: ClassVar[bool] = True
    #: Whether each coordinate is weighted by its importance.
    weighted: ClassVar[bool] = False
    #: Whether a parameter without a gradient is skipped, as optimizers do.
    needs_gradient: ClassVar[bool] = True
    #: Whether it acts after the last update, so that a run must not stop early.
    acts_at_end: ClassVar[bool] = False

    @property
    def acts(self) -> bool:
        """False if the settings turn the penalty off."""
        return True

    @property
    def coupled(self) -> bool:
        """Whether the penalty adds to the gradient instead of moving the weights."""
        return False

    def acts_at(self, update: int, total_updates: int | None) -> bool:
        """Whether the penalty acts at an update, counted from 1."""
        return True

    def value(self, difference: Tensor, importance: Tensor | float) -> Tensor | None:
        """Return the penalty's value for the log, or None.

        Args:
            difference: θ − θ*.
            importance: 1 if all coordinates are equally important.
        """
        return None

    def rate(self, lr: float) -> float | None:
        """Return c for a pull that is proportional to θ − θ*; None for any other.

        With importance F, a decoupled step at ``lr`` moves θ by the fraction min(1, c·F) of the
        way to θ*. A coupled penalty adds rate(1)·F·(θ − θ*) to the gradient. Either takes one pass
        over memory, and :meth:`move` is not called.
        """
        return None

    def gradient(self, difference: Tensor, importance: Tensor | float) -> Tensor:
        """Return the gradient that a coupled penalty adds."""
        return (self.rate(1.0) or 0.0) * importance * difference

    def move(self, difference: Tensor, importance: Tensor | float, lr: float) -> Tensor:
        """Return θ − θ* after a decoupled step at ``lr``, for a penalty without :meth:`rate`."""
        raise NotImplementedError(f"{type(self).__name__} defines neither rate nor move")

    def cost(self, planned: Planned) -> Cost:
        """A pass over θ and θ* at the updates at which the penalty acts, and F if it is weighted.

        A coupled penalty reads and writes the gradient instead of writing θ. A penalty without
        :meth:`rate` computes θ − θ* and its new value by separate operations.
        """
        if not self.acts:
            return Cost()
        total = min(planned.updates, _COUNTED)
        share = sum(self.acts_at(update, total) for update in range(1, total + 1)) / total
        values = 3 if self.coupled else 2
        if type(self).rate is Penalty.rate:
            values += 5
        weight = IMPORTANCE_BYTES if self.weighted else 0.0
        return Cost(
            state={"importance": weight} if weight else {},
            moved=share * (values * planned.value + planned.anchor + weight),
        )

    def at(self, lr: float) -> Penalty:
        """Return this penalty with all settings resolved for a run's peak learning rate."""
        return self

    def warning(self, lr: float) -> str | None:
        """Return a warning to show at a learning rate, or None."""
        return None


@dataclass(frozen=True)
class Merging(Method):
    """Stage 4: which weights are kept? Without overrides: the tuned ones."""

    #: A setting that :meth:`sweep` can vary after training, without training again.
    swept: ClassVar[str | None] = None
    #: How many tuned models it merges, at least and at most; None for any number.
    least_models: ClassVar[int] = 1
    most_models: ClassVar[int | None] = 1

    @property
    def interpolates(self) -> bool:
        """Whether the merged weights are linear in the tuned ones; with LoRA adapters, in B."""
        return type(self).scale is not Merging.scale

    @property
    def tensorwise(self) -> bool:
        """Whether it merges tensor by tensor, so that it also merges checkpoints on disk."""
        return self.interpolates or type(self).merged_slice is not Merging.merged_slice

    def unfit_tensors(self, places: Collection[Where]) -> str | None:
        """Return why the method cannot merge a model with these tensors, or None if it can."""
        return None

    def scale(self, where: Where) -> float | None:
        """Return s if the merged tensor is θ* + s·(θ₁ − θ*); None for any other merging.

        The methods below are then not called.
        """
        return None

    def survey(self, where: Where, slices: Slices) -> Any:
        """Return what :meth:`merged_slice` must know of the whole tensor, such as a threshold.

        Args:
            where: the tensor's name and the depth of its block.
            slices: its values in all models; ``slices.map`` reads all of them once.
        """
        return None

    def merged_slice(self, where: Where, part: Slice, known: Any) -> Tensor:
        """Return the merged values of a slice. ``known`` is the result of :meth:`survey`.

        It is a pure function, which is called in memory and for checkpoints on disk.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither scale nor merged_slice")

    def merged(self, where: Where, base: Tensor, tuned: Sequence[Tensor]) -> Tensor:
        """Return the merged values of one tensor in memory.

        Args:
            where: the tensor's name and the depth of its block.
            base: θ* of the tensor, flat, in at least float32.
            tuned: the values of each tuned model, in the same form.
        """
        if (scale := self.scale(where)) is not None:
            return between(base, tuned[0], scale)
        if where.is_statistic or not base.numel():
            return tuned[0]
        slices = SlicesInMemory(base, tuned)
        known = self.survey(where, slices)
        return torch.cat([*slices.map(lambda part: self.merged_slice(where, part, known))])

    def merge(
        self,
        model: nn.Module,
        reference: Reference | None,
        *,
        data: Any = None,
        collate: Collate | None = None,
    ) -> nn.Module:
        """Turn the tuned model into the one to keep, in place.

        Args:
            model: the tuned model.
            reference: θ* of the trained parameters.
            data, collate: the training data, to estimate BatchNorm's statistics again.
        """
        return model

    def sweep(
        self,
        model: nn.Module,
        reference: Reference | None,
        values: Sequence[float],
        evaluate: Callable[[nn.Module], Result],
        *,
        data: Any = None,
        collate: Collate | None = None,
    ) -> dict[float, Result]:
        """Evaluate the merged model at several values of the setting :attr:`swept`.

        Return the result of ``evaluate`` by value. The model is the tuned one again afterwards.
        """
        raise NotImplementedError(f"{type(self).__name__} has no setting to sweep")
