"""Recipes in the Hugging Face Trainer.

    trainer = HoldfastTrainer(model=model, recipe=recipe, args=args, train_dataset=dataset)
    trainer.train()

:class:`WithRecipe` gives the same to any other subclass of ``transformers.Trainer``:

    class MyTrainer(WithRecipe, SomeTrainer): ...
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from holdfast._torch.batch import batch_length
from holdfast.columns import keeping
from holdfast.hosts._checkpoints import newest_complete, of_all_ranks, of_this_rank
from holdfast.io.files import write_whole
from holdfast.losses import count_all
from holdfast.recipe import Recipe
from holdfast.reference import Reference
from holdfast.run import Run
from holdfast.stages import Criterion

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
except ImportError as error:
    raise ImportError(
        'the Hugging Face host needs transformers: pip install "holdfast[hf]"'
    ) from error

__all__ = ["HoldfastTrainer", "WithRecipe"]

STATE_FILE = "holdfast.pt"
logger = logging.getLogger(__name__)


class WithRecipe(Trainer):
    """A recipe for any Trainer; write it before the trainer in the list of bases.

    Args:
        recipe: the methods. ``Recipe()`` changes nothing, to the bit.
        new, reference, rehearsal, task: see :class:`~holdfast.run.Run`.
        args, kwargs: the trainer's own.

    Stage 1 is done before the trainer is made, stage 2 (scoring, cached) as soon as it has its
    data. The learning rate is ``TrainingArguments.learning_rate``, unless the recipe sets one.
    ``args.optim`` is honoured while the recipe's update is the default, ``AdamWUpdate()``.
    λ, the pull, the distance and the penalties are in the log. After ``train()`` the model is the
    merged one; what was trained stays in its checkpoint.
    """

    def __init__(
        self,
        *args: Any,
        recipe: Recipe,
        new: str | Sequence[str] = (),
        reference: Reference | None = None,
        rehearsal: Any = None,
        task: Any = None,
        **kwargs: Any,
    ) -> None:
        given = _bind(type(self), args, kwargs)
        model, settings = given.get("model"), given.get("args")
        if not isinstance(recipe, Recipe):
            raise TypeError(
                f'recipe must be a Recipe, got {recipe!r}: Recipe.preset("recadam+flow")'
            )
        if not isinstance(model, nn.Module):
            raise TypeError(
                "pass model= the pretrained model itself: a recipe must see it before training "
                f"(model_init= and names are not supported), got {type(model).__name__}"
            )
        if settings is None:
            settings = given["args"] = TrainingArguments("trainer_output")
        if getattr(settings, "auto_find_batch_size", False) and recipe != Recipe():
            raise ValueError(
                "auto_find_batch_size changes the length of the run, which a recipe is laid out "
                "for: set per_device_train_batch_size"
            )
        if given.get("optimizers", (None, None))[0] is not None:
            raise ValueError("the optimizer comes from the recipe: do not pass optimizers= as well")
        own_update = replace(recipe.update, lr=None) != Recipe().update
        if own_update and given.get("optimizer_cls_and_kwargs") is not None:
            raise ValueError(
                f"optimizer_cls_and_kwargs and the recipe's {type(recipe.update).__name__} are two "
                "optimizers: pass one of them"
            )
        _take_learning_rate(settings, recipe)
        self._total_updates: int | None = None
        self.run = Run(
            recipe, model, lr=settings.learning_rate, weight_decay=settings.weight_decay, task=task,
            new=new, reference=reference, rehearsal=rehearsal, seed=settings.seed,
            progress=not settings.disable_tqdm,
        )  # fmt: skip
        given["model"] = self.run.model
        self._finished = False
        super().__init__(**given)
        if self.is_deepspeed_enabled and (own_update or recipe.penalties):
            raise ValueError(
                "under DeepSpeed the Trainer hands the optimizer flat pieces of many parameters: "
                "use holdfast.hosts.accelerate.AccelerateLoop, or FSDP2 in the Trainer"
            )
        if self.train_dataset is not None:
            self._prepare_data()
        self.add_callback(_Advance(self.run))

    def _prepare_data(self) -> None:
        """Stage 2, on the data and with the collator that the trainer has."""
        data, collate = self.train_dataset, self.data_collator
        if hasattr(data, "column_names") and hasattr(data, "__len__"):
            data = self._remove_unused_columns(data, "training")
        else:
            collate = self._get_collator_with_removed_columns(collate, "training")
        self.run.prepare_data(data, collate)
        criterion = self.run.criterion
        self._refuse_second_losses()
        if type(criterion) is not Criterion:
            self.train_dataset = criterion.data
            self.data_collator = keeping(self.data_collator, criterion.column, optional=True)

    def _refuse_second_losses(self) -> None:
        if type(self.run.criterion) is Criterion:
            return
        if self.args.label_smoothing_factor:
            raise ValueError(
                "label smoothing changes the loss that the objective weighs: set "
                f"label_smoothing_factor=0 with {type(self.run.recipe.objective).__name__}"
            )
        ours = ("holdfast.", "transformers.", "trl.")
        others = [
            f"{cls.__name__}.compute_loss"
            for cls in type(self).__mro__
            if "compute_loss" in vars(cls) and not cls.__module__.startswith(ours)
        ]
        if self.compute_loss_func is not None:
            others.append("compute_loss_func")
        if others:
            raise ValueError(
                f"{others[0]} and the recipe's objective are two losses: have one of them. As a "
                "task, a loss of your own can be weighed: task= a function (model, batch) -> one "
                "loss a sample"
            )
        # The loss is divided by the targets of the whole update already. Before transformers 5
        # only the second of these was looked at.
        self.loss_is_scaled_for_ga = True
        if not hasattr(Trainer, "_prepare_for_training"):
            self.model_accepts_loss_kwargs = True

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: list[str] = self._signature_columns or []
        column = self.run.criterion.column
        if column and column not in columns:
            columns.append(column)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        plain = type(self.run.criterion) is Criterion
        if not batch_samples or plain or not self.run.model.training:
            return super()._get_num_items_in_batch(batch_samples, device)
        if isinstance(self.run.task, str):
            return count_all([batch["labels"].to(device) for batch in batch_samples], self.run.task)
        sizes = [torch.zeros(batch_length(batch), device=device) for batch in batch_samples]
        return count_all(sizes, self.run.task)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The objective's loss in training, the trainer's own otherwise."""
        criterion = self.run.criterion
        if type(criterion) is not Criterion and model.training and not return_outputs:
            criterion.auxiliary = self._share_of_auxiliary()
            return criterion.loss(model, inputs, num_items_in_batch, self.state.global_step + 1)
        inputs = {name: value for name, value in inputs.items() if name != criterion.column}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _share_of_auxiliary(self) -> float:
        """As the trainer's own loss has it: summed over micro-batches and ranks."""
        return self.accelerator.num_processes if self.args.average_tokens_across_devices else 1.0

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """As the trainer's, with the run's length for the recipe."""
        self._total_updates = num_training_steps
        super().create_optimizer_and_scheduler(num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The recipe's optimizer in the trainer's groups, or the trainer's with the penalties."""
        if self.optimizer is not None:
            return self.optimizer
        total = self._total_updates or self.state.max_steps
        if replace(self.run.recipe.update, lr=None) == Recipe().update:
            optimizer = super().create_optimizer(model)
            self.run.use_optimizer(optimizer, total)
        else:
            trained: nn.Module = self.run.model if model is None else model
            decayed = set(self.get_decay_parameter_names(trained))
            named = [(n, p) for n, p in trained.named_parameters() if p.requires_grad]
            groups: list[dict[str, Any]] = [
                {
                    "params": [row for row in named if (row[0] in decayed) == decays],
                    "weight_decay": self.run.weight_decay if decays else 0.0,
                }
                for decays in (True, False)
            ]
            self.optimizer = self.run.make_optimizer(total, [g for g in groups if g["params"]])
        return cast(Optimizer, self.run.optimizer)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The trainer's log, with where the methods stand."""
        if "loss" in logs and self.run.optimizer is not None:
            logs |= self.run.log(distance=True)
        super().log(logs, *args, **kwargs)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, then keep what the recipe keeps.

        ``resume_from_checkpoint=True`` goes on from the newest checkpoint that is complete: one
        that a kill cut short is passed over. A checkpoint of another recipe, of other pretrained
        weights or of other training data is refused.
        """
        if self._finished:
            raise RuntimeError(
                "this run is over and its model is the merged one: make a new trainer, from the "
                "pretrained model, for another"
            )
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_complete(str(self.args.output_dir))
            if resume_from_checkpoint is None:
                logger.warning(
                    f"no complete checkpoint in {self.args.output_dir}: training from the start"
                )
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        self.run.finish()
        self._finished = True
        return output

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        criteria = of_all_ranks(self.run.criterion.state_dict())
        if self.args.should_save:
            state = {"run": self.run.identity(), "criteria": criteria}
            write_whole(Path(output_dir) / STATE_FILE, lambda path: torch.save(state, path))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        file = None if checkpoint is None else Path(checkpoint) / STATE_FILE
        if file is not None and file.exists():
            state = torch.load(file, map_location="cpu", weights_only=True)
            self.run.check_identity(state["run"], str(checkpoint))
            self.run.criterion.load_state_dict(of_this_rank(state["criteria"]))
        elif file is not None and self.run.recipe != Recipe():
            whole = (file.parent / "trainer_state.json").exists() and any(
                file.parent.glob("optimizer*")
            )
            what = "is of a run without a recipe" if whole else "holds the model only"
            raise ValueError(f"{checkpoint} {what}: begin a new run")
        super()._load_optimizer_and_scheduler(checkpoint)


class HoldfastTrainer(WithRecipe):
    """The Hugging Face Trainer with a recipe.

    Example:
        >>> from holdfast import Recipe
        >>> from holdfast.hosts.hf import HoldfastTrainer
        >>> # trainer = HoldfastTrainer(model=model, recipe=Recipe.preset("recadam+flow"),
        >>> #                           args=TrainingArguments(...), train_dataset=dataset)
    """


class _Advance(TrainerCallback):
    """Stage 1 before each update."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What may change in the update that begins."""
        self.run.advance(state.global_step + 1)


def _bind(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, of the first trainer behind WithRecipe that names its own.

    A subclass may hand on ``*args, **kwargs``, and take keywords of its own besides.
    """
    for base in cls.__mro__[cls.__mro__.index(WithRecipe) + 1 :]:
        parameters = inspect.signature(base).parameters
        if "model" in parameters:
            return dict(zip(parameters, args, strict=False)) | kwargs
    raise TypeError(f"{cls.__name__} is no Trainer")


def _take_learning_rate(settings: TrainingArguments, recipe: Recipe) -> None:
    """The recipe's learning rate, where the arguments were left at their default."""
    default = next(f.default for f in fields(settings) if f.name == "learning_rate")
    if recipe.update.lr is not None and settings.learning_rate == default:
        settings.learning_rate = recipe.update.lr
