"""Run: applies a recipe to a model and data, in the same order in every host.

A host builds a :class:`Run` from the pretrained model, trains ``run.model`` on the data of
``run.criterion`` with ``run.make_optimizer(total_updates)``, calls ``run.advance`` before each
update, and keeps the model that ``run.finish()`` returns. :func:`holdfast.finetune_loop` is the
shortest example.
"""

import copy
import functools
import logging
import operator
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from holdfast._optim.penalties import AttachedPenalties, attach_penalties
from holdfast._torch.adapters import adapter_parts, adapters_are_new, has_adapters
from holdfast._torch.checks import at_least_zero, named_settings, natural_number
from holdfast._torch.fingerprint import data_fingerprint, fingerprint, same_content
from holdfast._torch.finite import check_weights
from holdfast._torch.head_tap import agree_on_tap
from holdfast._torch.layers import discriminative_groups, within
from holdfast._torch.layout import gathered
from holdfast._torch.names import shorten
from holdfast._torch.pretrained_head import PretrainedHead
from holdfast.data import Collate, number_of_samples
from holdfast.io.heads import mark_trained, new_in
from holdfast.losses import LossFunction, Task, infer_task
from holdfast.recipe import Recipe, as_recipe, difference
from holdfast.reference import Reference, check_parts
from holdfast.stages import Criterion, Merging, Penalty, RecallTerm, TrainingSize, Update

logger = logging.getLogger(__name__)


class Run:
    """A recipe applied to a pretrained model. The constructor runs stage 1, and stage 2 with data.

    Args:
        recipe: the methods.
        model: the pretrained model, also to resume a run: load the tuned weights into
            ``run.model`` afterwards.
        data, collate: as for :func:`holdfast.score`. Without data, call :meth:`prepare_data` later.
        lr: the peak learning rate. Required unless the recipe sets it or has a default.
        default_lr: the learning rate of a host whose user has not set any.
        weight_decay: the weight decay, unless the recipe sets it.
        task: as for :func:`holdfast.score`.
        new: names of new parts of the model, such as ``"classifier"``. They have no pretrained
            weights, so nothing pulls them. If None, they are the parts of the head for which
            ``from_pretrained`` of transformers found no weights.
        reference: the pretrained weights, such as ``Reference.open(path)``. If None, those of the
            model are copied if a method needs them.
        old_data: data of the old task, for methods that train on it as well.
        old_head: the head of the old task, for methods that keep its outputs. Copy it with
            :meth:`holdfast.PretrainedHead.of` before you replace it.
        tokenizer: the tokenizer of a language model, for methods that draw texts from it: those of
            a chat model should look like chats.
        visits: the number of samples that training will visit, counting each epoch; most hosts
            know it. If None, the number of samples in the data.
        size: the number of samples and of epochs, for recipes that choose a learning rate. If None,
            that of the data and the visits.
        update_size: samples per update, over all ranks; most hosts know it.
        autocast: the dtype of autocast in training, such as ``torch.bfloat16``; most hosts know it.
            Methods that keep predictions of the pretrained model compute them in the same way.
        seed: seeds all random choices of the methods.
        cache: the cache of :func:`holdfast.score`.
        progress: show progress bars.

    Attributes:
        recipe: the recipe, with everything resolved that depends on the model.
        model: the model to train.
        anchors: θ* of the trained parameters, if a method needs it.
        criterion: the training data and the loss.
        optimizer, penalties: None until the optimizer is built.
    """

    @named_settings
    def __init__(
        self,
        recipe: Recipe | str,
        model: nn.Module,
        data: Any = None,
        *,
        lr: float | None = None,
        default_lr: float | None = None,
        weight_decay: float = 0.0,
        task: Task | LossFunction | None = None,
        collate: Collate | None = None,
        new: str | Sequence[str] | None = None,
        reference: Reference | None = None,
        old_data: Any = None,
        old_head: PretrainedHead | None = None,
        tokenizer: Any = None,
        visits: int | None = None,
        size: TrainingSize | None = None,
        update_size: int | None = None,
        autocast: torch.dtype | None = None,
        seed: int = 0,
        cache: bool | str | os.PathLike[str] = True,
        progress: bool = True,
    ) -> None:
        recipe = as_recipe(recipe)
        if reference is not None and not isinstance(reference, Reference):
            raise TypeError(
                f"reference must be a Reference, got {reference!r}; read files with "
                'Reference.open("path")'
            )
        self.model, self.data, self.collate, self.given_task = model, data, collate, task
        if new is None:
            new = new_in(model)
            if new:
                logger.info(
                    f"{', '.join(new)} is new: the checkpoint has no weights for it (new=() if you "
                    "have trained it since)"
                )
        self.new = (new,) if isinstance(new, str) else tuple(new)
        check_parts(self.new, [name for name, _ in model.named_parameters()], "new")
        self.old_data, self.old_head = old_data, old_head
        self.tokenizer, self.autocast = tokenizer, autocast
        self.visits, self.update_size = visits, update_size
        self.seed, self.cache, self.progress = natural_number("seed", seed), cache, progress
        if size is None:  # other recipes do not ask for it, and data[0] may be costly
            asked = recipe.recall.depends_on_model
            size = TrainingSize.of(number_of_samples(data, collate) if asked else None, visits)
        self.recipe, self.lr = resolved(
            recipe, model, lr, default_lr, new=self.new, task=task, size=size
        )
        is_given = lr is not None or recipe.update.lr is not None
        self._chose_lr = not is_given and self.lr != default_lr
        recipe = self.recipe
        decay = recipe.update.weight_decay
        self.weight_decay = weight_decay if decay is None else decay

        self.reference = reference
        if reference is not None:
            self.reference = reference.without(self.new).apart_from(model).bind(model)
        elif recipe.needs_reference and not (recipe.trainable.keeps_base or has_adapters(model)):
            self.reference = Reference.of(model, without=self.new)
        self._base = self._fingerprint_of_base()
        self._check_that_ranks_agree()
        self.model = recipe.trainable.prepare(self)
        self.anchors = recipe.trainable.anchors(self)
        self._check_that_something_is_pulled()
        self.criterion = Criterion(self)
        self.importance: dict[Update | Penalty, Reference | None] = {}
        self.optimizer: Optimizer | None = None
        self.penalties: AttachedPenalties | None = None
        self.total_updates = 0
        self._observed: Tensor | float = 0.0  # the loss of the micro-batches of this update
        self._finished: dict[str, tuple[int, int]] | None = None  # the weights of the model to keep
        if data is not None:
            self.prepare_data(data, collate)

    @property
    def full_recipe(self) -> Recipe:
        """The recipe with the learning rate and the weight decay of the run."""
        update = replace(self.recipe.update, lr=self.lr, weight_decay=self.weight_decay)
        return replace(self.recipe, update=update)

    @property
    def needs_warm_up(self) -> bool:
        """Whether hosts warm up the learning rate, let it fall and clip gradients by default.

        True if stage 1 needs it, or if the recipe chose the learning rate: its rates are for this.
        """
        return self._chose_lr or self.recipe.trainable.needs_warm_up

    @property
    def task(self) -> Task | LossFunction:
        """The task; inferred from the model on first use if it was not passed."""
        if self.given_task is None:
            self.given_task = infer_task(self.model)
        return self.given_task

    @property
    def recall(self) -> RecallTerm:
        """What the recipe's recall adds to the loss."""
        return self.criterion.recall

    def prepare_data(self, data: Any, collate: Collate | None) -> None:
        """Run stage 2, and measure everything that methods need at θ*."""
        self.data, self.collate = data, collate
        self.recipe.check_head(self.new)
        self.recipe.check_model(self.model, self.old_data is not None)
        self.recipe.trainable.fit(self)
        self.anchors = self.recipe.trainable.anchors(self)
        self.criterion = self.recipe.objective.prepare(self)
        self.criterion.recall = self.recipe.recall.prepare(self)
        weighing: list[Update | Penalty] = [self.recipe.update, *self.recipe.penalties]
        for method in weighing:
            self.importance[method] = method.measure_importance(self)
        self.recipe.start.apply(self)
        agree_on_tap(self.model)

    def make_optimizer(
        self, total_updates: int, groups: list[dict[str, Any]] | None = None
    ) -> Optimizer:
        """Stage 3: build the recipe's optimizer and attach the penalties to its step.

        Args:
            total_updates: the number of updates of the run.
            groups: the host's groups of named parameters, ``{"params": [(name, p), …]}``. If
                None, all trainable parameters: matrices with weight decay, the others without.
        """
        update = self.recipe.update
        groups = self._groups() if groups is None else groups
        groups = discriminative_groups(groups, self.model, self.lr, update.layer_decay)
        return self.use_optimizer(update.optimizer(groups, self, total_updates), total_updates)

    def use_optimizer(self, optimizer: Optimizer, total_updates: int) -> Optimizer:
        """Stage 3 with the host's own optimizer: attach the penalties to its step."""
        self.total_updates, self.optimizer = total_updates, optimizer
        penalties = (*self.recipe.penalties, *self.recall.penalties)
        if penalties:
            self.penalties = attach_penalties(
                optimizer,
                penalties,
                self.anchors,
                [self.importance.get(penalty) for penalty in penalties],
                total_updates=total_updates,
            )
        self.recall.attach(self)
        self.recipe.trainable.attach(self)
        return optimizer

    def advance(self, update: int) -> None:
        """Freeze and unfreeze parameters. Call it before each update, counted from 1."""
        self._finished, self._observed = None, 0.0
        self.recipe.trainable.advance(self.model, update, self.total_updates)

    def loss(self, batch: Any, num_targets: Tensor | float, update: int) -> Tensor:
        """The loss of one micro-batch, and its part of the recall if ``recall.plan`` was called.

        The arguments are those of :meth:`holdfast.stages.Criterion.loss`.
        """
        return self.losses(batch, num_targets, update)[1]

    def losses(self, batch: Any, num_targets: Tensor | float, update: int) -> tuple[Tensor, Tensor]:
        """The loss of the samples alone, for the log, and :meth:`loss`, for the gradients."""
        with self.recall.beside(self.model) as recalled:
            loss = self.criterion.loss(self.model, batch, num_targets, update)
            whole = loss + recalled()
        self.observe(whole)
        return loss, whole

    def observe(self, loss: Tensor) -> None:
        """Pass the loss of a micro-batch to an update whose step depends on it.

        Call it before the step, unless you call :meth:`loss`. The losses of the micro-batches since
        :meth:`advance` add up to that of the update.
        """
        if self.recipe.update.uses_loss and self.optimizer is not None:
            self._observed = self._observed + loss.detach()
            self.recipe.update.observe(self.optimizer, self._observed)

    def log(self, *, distance: bool = False) -> dict[str, float]:
        """The values to log: those of the methods, the penalties, and ‖θ − θ*‖ if ``distance``."""
        values: dict[str, float] = {}
        for _, method in self.recipe:
            values |= method.log(self)
        if self.penalties is not None and self.recipe.penalties:
            values |= {f"penalty/{name}": v for name, v in self.penalties.values().items()}
        if distance and self.anchors is not None:
            values["distance"] = self.anchors.total_distance(self.model)
        return values

    def finish(self) -> nn.Module:
        """Stage 4: merge, let the recall keep what it promises, and return the model to keep.

        Weights that are not finite are an error: the training diverged. A second call does nothing,
        unless other weights were loaded or trained since.
        """
        if self._finished == _versions(self.model):
            return self.model
        self.model = self._merged(self.model, self.recipe.merging)
        self._finished = _versions(self.model)
        return self.model

    def finished_copy(self, merging: Merging) -> nn.Module:
        """Stage 4 with another merging, on a copy of the model; the run itself is not changed."""
        return self._merged(copy.deepcopy(self.model), merging)

    def _merged(self, model: nn.Module, merging: Merging) -> nn.Module:
        """Merge the trained model in place, and return the model to keep."""
        check_weights(self._trained())
        merged = merging.merge(model, self.anchors, data=self.data, collate=self.collate)
        self.recall.on_merged(merged, self.anchors)
        kept = self.recipe.trainable.finish(merged)
        mark_trained(kept)
        return kept

    def state_dict(self) -> dict[str, Any]:
        """The state of stage 2, to save in a checkpoint beside the model and the optimizer."""
        return {"criterion": self.criterion.state_dict(), "recall": self.recall.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.criterion.load_state_dict(state["criterion"])
        self.recall.load_state_dict(state["recall"])

    def _fingerprint_of_base(self) -> str | None:
        """The fingerprint of θ*, without new parts and new adapters; None if θ* is not used."""
        if self.reference is not None:
            return self.reference.fingerprint()
        if not any(method.uses_base for _, method in self.recipe):
            return None
        # Random numbers in adapters that change nothing yet are no part of θ*.
        adapters = adapter_parts(self.model) if adapters_are_new(self.model) else []
        named = sorted(self.model.named_parameters(), key=operator.itemgetter(0))
        return fingerprint(p for name, p in named if not within(name, [*self.new, *adapters]))

    def _check_that_ranks_agree(self) -> None:
        """θ* must be equal on all ranks: some hosts load the weights on rank 0 only."""
        if len(set(gathered(self._base))) > 1:
            raise ValueError(
                "the ranks have different pretrained weights. Load them on every rank, without "
                "cpu_ram_efficient_loading, and name a new head in new="
            )

    def _check_that_something_is_pulled(self) -> None:
        pulling = [m for m in (self.recipe.update, *self.recipe.penalties) if m.needs_reference]
        if self.anchors is None or not pulling:
            return
        named = self._trained()
        anchors = self.anchors.match([p for _, p in named], [name for name, _ in named])
        if all(anchor is None for anchor in anchors):
            raise ValueError(
                f"{', '.join(type(m).__name__ for m in pulling)} would have no effect: all trained "
                f"parameters ({shorten([n for n, _ in named])}) are new and have no pretrained "
                "weights"
            )

    def _trained(self) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def identity(self) -> dict[str, Any]:
        """Plain values that must be equal for a run to resume a checkpoint."""
        return {
            "recipe": self.recipe.to_dict(), "pretrained": self._base,
            "recall": self.recall.identity(), **self._content,
        }  # fmt: skip

    @functools.cached_property
    def _content(self) -> dict[str, str | None]:
        """Fingerprints of the data and the old data, computed on first use."""
        given = {"data": self.data, "old_data": self.old_data}
        return {
            name: data_fingerprint(x.dataset if isinstance(x, DataLoader) else x)
            for name, x in given.items()
        }

    def check_identity(self, saved: dict[str, Any], where: str) -> None:
        """Raise ValueError if a checkpoint belongs to another run."""
        ours = self.identity()
        if saved["recipe"] != ours["recipe"]:
            raise ValueError(
                f"{where} belongs to a run with another recipe (there and here: "
                f"{difference(saved['recipe'], ours['recipe'])}). Resume with that recipe, or "
                "start a new run in another directory"
            )
        if saved["pretrained"] != ours["pretrained"]:
            raise ValueError(
                f"{where} belongs to a run from other pretrained weights. Build the run from the "
                "pretrained model, also to resume: the host loads the weights of the checkpoint. "
                'If only a new, random head differs, name it: new="classifier"'
            )
        if saved.get("recall") != ours["recall"]:
            raise ValueError(
                f"{where} belongs to a run that recalls something else: with another tokenizer, "
                "other texts, another precision or another length of the training. Resume with the "
                "same ones. On another kind of device, texts are drawn with other rounding: keep "
                "the cache ($HOLDFAST_CACHE). Or start a new run in another directory"
            )
        for name in ("data", "old_data"):
            if not same_content(saved.get(name), ours[name]):
                raise ValueError(
                    f"{where} belongs to a run with other {name}, or the same in another order. "
                    f"Resume with the same {name}, or start a new run in another directory"
                )

    def _groups(self) -> list[dict[str, Any]]:
        named = self._trained()
        if not named:
            raise ValueError(
                "no parameter of the model requires a gradient: there is nothing to train"
            )
        if not self.weight_decay:
            return [{"params": named, "weight_decay": 0.0}]  # each group costs one launch per step
        matrices = [row for row in named if row[1].dim() > 1]
        others = [row for row in named if row[1].dim() <= 1]
        groups = [(matrices, self.weight_decay), (others, 0.0)]
        return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def resolved(
    recipe: Recipe,
    model: nn.Module,
    lr: float | None = None,
    default_lr: float | None = None,
    *,
    new: Sequence[str] = (),
    task: Task | LossFunction | None = None,
    size: TrainingSize = TrainingSize(),  # noqa: B008 (immutable)
) -> tuple[Recipe, float]:
    """The recipe for a model, and its learning rate; the arguments are those of :class:`Run`."""
    own = recipe.update.lr
    if own is not None and lr is not None and own != lr:
        raise ValueError(
            f"lr is {own:g} in the recipe and {lr:g} in the trainer or loop: set it in one place"
        )
    chosen = recipe.recall.resolve(recipe, model, new, task, size)
    if (fitting := chosen.fitting_head(new)) != chosen:
        chosen = fitting
        logger.info(f"the new head is fitted first, by {chosen.trainable}")
    lr = own if lr is None else lr
    if lr is None:
        lr = default_lr if chosen.update.lr is None else chosen.update.lr
        if lr is None:
            raise ValueError("lr is not set: pass lr=, or set it in the recipe")
        adapters = has_adapters(model) or chosen.trainable.keeps_base
        logger.info(f"learning rate {lr:g}, the default{' for adapters' if adapters else ''}")
    return replace(chosen, update=replace(chosen.update, lr=own)), at_least_zero("lr", lr)


def same_run(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two identities have the same recipe, weights and data."""
    return all(
        same_content(one[name], other[name])
        if name in ("data", "old_data")
        else one[name] == other[name]
        for name in one
    )


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Tells whether weights were written since, without reading them."""
    return {name: (id(p), p._version) for name, p in model.named_parameters()}
