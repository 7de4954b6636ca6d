"""Recipes in the Hugging Face Trainer.

    trainer = HoldfastTrainer(model=model, recipe=recipe, args=args, train_dataset=dataset)
    trainer.train()

:class:`WithRecipe` adds a recipe to any other subclass of ``transformers.Trainer``:

    class MyTrainer(WithRecipe, SomeTrainer): ...

The trainer may compute another loss than that of labeled samples, such as a loss of preferences.
Recalls with data of their own, updates, penalties and merging work with any loss.
"""

import copy
import inspect
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from holdfast._torch.adapters import adapters_are_new, has_adapters
from holdfast._torch.imports import require
from holdfast._torch.pretrained_head import PretrainedHead
from holdfast._torch.replace import replaced
from holdfast._torch.rng import seeded
from holdfast.columns import keeping
from holdfast.data import Collate
from holdfast.hosts._checkpoints import STATE_FILE, load_run_state, run_state
from holdfast.hosts._updates import WARM_UP, labels_of, number_of_epochs
from holdfast.io.files import write_whole
from holdfast.losses import count_all
from holdfast.recipe import FILE, Recipe, as_recipe
from holdfast.reference import Reference
from holdfast.run import Run
from holdfast.stages import TrainingSize

require("transformers", extra="hf", what="The Hugging Face host")
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

__all__ = ["HoldfastTrainer", "WithRecipe"]

logger = logging.getLogger(__name__)


class WithRecipe(Trainer):
    """A mixin that adds a recipe to a Trainer; put it first in the list of base classes.

    Args:
        recipe: the methods, or the name of a preset. ``Recipe()`` changes nothing, to the bit.
        new, reference, old_data, old_head, task: see :class:`~holdfast.run.Run`.
        args, kwargs: the arguments of the trainer. Adapters come from the recipe or from
            ``peft_config=``, but not from both.

    Stage 1 runs before the trainer is built, stage 2 (scoring, cached) as soon as the trainer has
    its data. Set the learning rate in ``TrainingArguments`` or in the recipe; two different values
    raise an error. The default value of ``learning_rate`` counts as not set, because nobody can
    see whether you wrote it; a recipe that chooses a learning rate, such as ``"holdfast"``, then
    replaces it with a warning, unless the trainer has a loss of its own: the rates are for labeled
    samples. ``args.optim`` is used only if the recipe has the default update,
    ``adamw``. λ, the pull, the distance and the penalties are in the log. After ``train()`` the
    model is the merged one; checkpoints hold the trained weights before merging.
    """

    #: Packages and modules whose ``compute_loss`` returns the model's own loss.
    plain_losses: ClassVar[tuple[str, ...]] = ("holdfast.", "transformers.", "trl.")

    def __init__(
        self,
        *args: Any,
        recipe: Recipe | str,
        new: str | Sequence[str] | None = None,
        reference: Reference | None = None,
        old_data: Any = None,
        old_head: PretrainedHead | None = None,
        task: Any = None,
        **kwargs: Any,
    ) -> None:
        given = dict(zip(_parameters(type(self)), args, strict=False)) | kwargs
        recipe = as_recipe(recipe)
        # A copy, as the learning rate is set below: the user's may serve for another trainer.
        settings = given["args"] = copy.copy(given.get("args") or _default_arguments(type(self)))
        _check_arguments(given, settings, recipe)
        if given.get("peft_config") is not None:  # before the recipe looks at the model
            given["model"] = _adapted(given["model"], given.pop("peft_config"), settings, recipe)
        default: Any = next(f.default for f in fields(settings) if f.name == "learning_rate")
        is_set = settings.learning_rate != default
        # Rates that a recipe chooses are for the loss of labeled samples.
        other_loss = self._other_loss(given.get("compute_loss_func")) is not None
        keeps = is_set or (other_loss and recipe.update.lr is None)
        lr = settings.learning_rate if keeps else None
        self._total_updates: int | None = None
        self._finished = False
        self._to_plan = 0  # micro-batches of the next update
        self.run = Run(
            recipe, given["model"], lr=lr, default_lr=default, weight_decay=settings.weight_decay,
            task=task, new=new, reference=reference, old_data=old_data, old_head=old_head,
            seed=settings.seed, tokenizer=given.get("processing_class"),
            size=_training_size(settings, given.get("train_dataset")),
            progress=not settings.disable_tqdm,
        )  # fmt: skip
        if lr is None and recipe.update.lr is None and self.run.lr != default:
            logger.warning(
                f"learning_rate has its default value {default:g}, so the recipe's {self.run.lr:g} "
                "is used. To train with another one, set learning_rate, or lr in the recipe"
            )
        settings.learning_rate = self.run.lr
        given["model"] = self.run.model
        adapters = {*getattr(self.run.model, "peft_config", ())}
        super().__init__(**given)
        _remove_copies(self.run.model, adapters)
        own = has_own_update(recipe) or recipe.penalties or recipe.recall.interpolates
        own = own or not recipe.trainable.elementwise
        if self.is_deepspeed_enabled and own:
            raise ValueError(
                "under DeepSpeed the Trainer gives the optimizer flat pieces of many parameters, "
                "which this recipe cannot use: use holdfast.hosts.accelerate.AccelerateLoop, or "
                "FSDP2 in the Trainer"
            )
        if self.train_dataset is not None:
            self._prepare_data()
        self.add_callback(_Advance(self.run))

    @property
    def _has_own_loss(self) -> bool:
        """Whether the recipe changes the trainer's loss of a batch."""
        return any(method.changes_loss for _, method in self.run.recipe)

    def _prepare_data(self) -> None:
        """Stage 2, with the data and the collator of the trainer."""
        self._prepare_run(*self._samples_to_read())
        if self._has_own_loss:
            criterion = self.run.criterion
            self.train_dataset = criterion.data
            self.data_collator = keeping(self.data_collator, *criterion.columns, optional=True)

    def _samples_to_read(self) -> tuple[Any, Collate]:
        """The data that methods read before training, and its collate function."""
        data, collate = self.train_dataset, self.data_collator
        if hasattr(data, "column_names") and hasattr(data, "__len__"):
            data = self._remove_unused_columns(data, "training")
        else:
            collate = self._get_collator_with_removed_columns(collate, "training")
        return data, collate

    def _prepare_run(self, data: Any, collate: Collate) -> None:
        """Stage 2, and what the run can know only now that the trainer is built."""
        run = self.run
        run.visits, run.update_size = self._visits(), self._samples_per_update()
        run.autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
            self.accelerator.mixed_precision
        )
        if run.tokenizer is None:  # a trainer may load it by itself
            run.tokenizer = getattr(self, "processing_class", None)
        if self._has_own_loss:
            self._replace_loss()
        elif loss := self._other_loss(self.compute_loss_func):
            if run.recipe.update.uses_loss:
                name = type(run.recipe.update).__name__
                raise ValueError(
                    f"{loss} computes another loss than that of samples with labels, from which "
                    f"{name} sets the learning rate: leave out {name}"
                )
            reading = (type(method).__name__ for _, method in run.recipe if method.reads_data)
            collate = partial(_collate_labeled, collate, " and ".join(reading), loss)
        run.prepare_data(data, collate)
        self._refuse_parallelism()

    @property
    def _samples_per_row(self) -> float:
        """How many samples a row of the data is: several if a trainer generates them from it."""
        return getattr(self, "num_generations", 1) * getattr(self, "num_iterations", 1)

    def _samples_per_update(self) -> int:
        return self.get_total_train_batch_size(self.args)

    def _visits(self) -> int | None:
        """The number of samples that training visits; None if the data has no length."""
        if self.args.max_steps > 0:
            return self.args.max_steps * self._samples_per_update()
        data: Any = self.train_dataset
        if not hasattr(data, "__len__"):
            return None
        return math.ceil(self.args.num_train_epochs * len(data) * self._samples_per_row)

    def _refuse_parallelism(self) -> None:
        kinds = {"tensor": "tp", "context": "cp", "sequence": "sp"}
        sizes = {k: getattr(self, f"get_{v}_size", lambda: 1)() for k, v in kinds.items()}
        if self.run.recall.has_data and (split := [k for k, size in sizes.items() if size > 1]):
            raise ValueError(
                f"the recipe {self.run.recipe.name} runs the model on data of its own, which does "
                f"not work with {split[0]} parallelism: use DistributedDataParallel or FSDP2"
            )

    @classmethod
    def _other_loss(cls, function: Any) -> str | None:
        """The name of what computes another loss than that of labeled samples; None if nothing.

        ``function`` is the argument ``compute_loss_func`` of the trainer.
        """
        for base in cls.__mro__:
            if "compute_loss" in vars(base) and not base.__module__.startswith(cls.plain_losses):
                return f"{base.__name__}.compute_loss"
        return "compute_loss_func" if callable(function) else _loss_of_trl(cls)

    def _replace_loss(self) -> None:
        """Prepare the trainer for the recipe's loss, or raise ValueError."""
        if self.args.label_smoothing_factor:
            raise ValueError(
                f"label smoothing does not work with the recipe {self.run.recipe.name}, which "
                "replaces the loss: set label_smoothing_factor=0"
            )
        if loss := self._other_loss(self.compute_loss_func):
            changing = (type(m).__name__ for _, m in self.run.recipe if m.changes_loss)
            names = " and ".join(changing)
            raise ValueError(
                f"{loss} computes another loss than that of samples with labels, which {names} "
                f"would change: leave out {names}, or pass a loss of your own as task=, a function "
                "(model, batch) -> one loss per sample"
            )
        # The criterion divides by the targets of the whole update. New versions of transformers
        # read the first flag, those up to 5.17 only the second.
        if not hasattr(Trainer, "loss_is_scaled_for_ga"):
            self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: list[str] = self._signature_columns or []
        columns += [name for name in self.run.criterion.columns if name not in columns]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of an update, and the number of their targets, in training mode.

        The trainer sets this mode only afterwards; pretrained models and evaluations leave it.
        """
        self.run.model.train()
        batches, targets = super().get_batch_samples(*args, **kwargs)
        self._to_plan = len(batches)
        return batches, targets

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if not (batch_samples and self._has_own_loss and self.run.model.training):
            return super()._get_num_items_in_batch(batch_samples, device)
        task = self.run.task
        return count_all([labels_of(batch, task).to(device) for batch in batch_samples], task)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Any:
        """The trainer's own step, beside the recall's own data."""
        recall, accelerator = self.run.recall, self.accelerator
        if not recall.has_data:
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.run.observe(loss)
            return loss
        if self._to_plan:  # the first micro-batch of an update
            update = self.state.global_step + 1
            recall.plan(model, update, self._samples_per_update(), self._to_plan)
            self._to_plan = 0
        # Accelerate divides by it, except under DeepSpeed.
        steps = 1 if self.is_deepspeed_enabled else accelerator.gradient_accumulation_steps
        backward, added = accelerator.backward, torch.zeros((), device=self.args.device)

        def backward_with_recall(loss: Tensor, **options: Any) -> None:
            with self.compute_loss_context_manager():
                more = recalled()
            added.add_(torch.as_tensor(more).detach())
            backward(loss + steps * more, **options)

        # Only here is the loss final: trainers and their versions scale it in several ways.
        with (
            recall.beside(model) as recalled,
            replaced(accelerator, "backward", backward_with_recall),
        ):
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.run.observe(loss + added)
        return loss  # of the samples, for the log, which has the recall beside it

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The recipe's loss in training, otherwise the trainer's own loss."""
        criterion = self.run.criterion
        if self._has_own_loss and model.training and not return_outputs:
            criterion.auxiliary = self._share_of_auxiliary()
            return criterion.loss(model, inputs, num_items_in_batch, self.state.global_step + 1)
        inputs = {name: value for name, value in inputs.items() if name not in criterion.columns}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _share_of_auxiliary(self) -> float:
        """Like the trainer's own loss: the sum over micro-batches and ranks."""
        return self.accelerator.num_processes if self.args.average_tokens_across_devices else 1.0

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self._total_updates = num_training_steps  # transformers 4; later ones know it by then
        super().create_optimizer_and_scheduler(num_training_steps)

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own schedule, with a warm-up where the run needs it and none is set."""
        if self.run.needs_warm_up and not self.args.get_warmup_steps(num_training_steps):
            self.args.warmup_steps = math.ceil(WARM_UP * num_training_steps)
        return super().create_scheduler(num_training_steps, *args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The recipe's optimizer with the trainer's groups, or the trainer's with penalties."""
        if self.optimizer is not None:
            return self.optimizer
        total = self._total_updates or self.state.max_steps
        if not has_own_update(self.run.recipe):
            return self.run.use_optimizer(super().create_optimizer(model), total)
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
        return self.optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.run.optimizer is not None:
            theirs = getattr(self, "_metrics", {}).get("train", {})  # TRL writes them over ours
            for name, value in self.run.log(distance=True).items():
                logs[f"holdfast/{name}" if name in theirs else name] = value
        super().log(logs, *args, **kwargs)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, then merge as the recipe says.

        ``resume_from_checkpoint=True`` resumes from the newest complete checkpoint and skips one
        that a kill cut short. A checkpoint of another recipe, other pretrained weights or other
        training data is an error.
        """
        if self._finished:
            raise RuntimeError(
                "this trainer has finished and its model is merged: build a new trainer from the "
                "pretrained model"
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

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        folder: Any = output_dir or self.args.output_dir
        self.save_recipe(folder)

    def save_recipe(self, folder: str) -> None:
        """Write the recipe beside a model. Reports read it: a training signal is no evidence."""
        text = self.run.full_recipe.to_yaml()
        write_whole(Path(folder) / FILE, lambda path: path.write_text(text, encoding="utf-8"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        state = run_state(self.run)  # on all ranks
        if self.args.should_save:
            write_whole(Path(output_dir) / STATE_FILE, lambda path: torch.save(state, path))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        file = None if checkpoint is None else Path(checkpoint) / STATE_FILE
        if file is not None and file.exists():
            state = torch.load(file, map_location="cpu", weights_only=True)
            load_run_state(self.run, state, str(checkpoint))
        elif file is not None and self.run.recipe != Recipe():
            complete = _is_complete(file.parent) and any(file.parent.glob("optimizer*"))
            what = "was saved by a run without a recipe" if complete else "holds only a model"
            raise ValueError(f"{checkpoint} {what}: start a new run")
        super()._load_optimizer_and_scheduler(checkpoint)


class HoldfastTrainer(WithRecipe):
    """The Hugging Face Trainer with a recipe; its arguments are those of :class:`WithRecipe`."""


def newest_complete(folder: str) -> str | None:
    """The newest complete checkpoint of a Hugging Face Trainer, or None."""
    numbers = {path: path.name.rpartition("-")[2] for path in Path(folder).glob("checkpoint-*")}
    found = {int(number): path for path, number in numbers.items() if number.isdigit()}
    newest_first = (found[number] for number in sorted(found, reverse=True))
    return next((str(path) for path in newest_first if _is_complete(path)), None)


def _is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end: the trainer writes its own state last."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return True


class _Advance(TrainerCallback):
    """Stage 1 before each update."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.advance(state.global_step + 1)


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The parameters of the first trainer after WithRecipe that names them.

    A subclass may pass on ``*args, **kwargs`` and take further keywords.
    """
    for base in cls.__mro__[cls.__mro__.index(WithRecipe) + 1 :]:
        parameters = inspect.signature(base).parameters
        if "model" in parameters:
            return dict(parameters)
    raise TypeError(f"{cls.__name__} is not a Trainer")


def _training_size(settings: TrainingArguments, data: Any) -> TrainingSize:
    """The number of samples of a trainer, and of its epochs, before it packs any."""
    steps = settings.max_steps if settings.max_steps > 0 else None
    size = settings.train_batch_size * settings.gradient_accumulation_steps * settings.world_size
    if not hasattr(data, "__len__"):
        return TrainingSize.of(None, steps and steps * size)
    epochs = number_of_epochs(len(data), size, settings.num_train_epochs, steps)
    return TrainingSize(len(data), epochs)


def _default_arguments(cls: type) -> TrainingArguments:
    """The training arguments of a trainer that gets none, of the type that it names first."""
    named = get_args(_parameters(cls)["args"].annotation)
    types = [t for t in named if isinstance(t, type) and issubclass(t, TrainingArguments)]
    return (types or [TrainingArguments])[0]("trainer_output")


def _loss_of_trl(cls: type) -> str | None:
    """The function in which a trainer of TRL computes a loss of its own; None if it has none.

    The loss of SFTTrainer is that of labeled samples. Some trainers compute theirs in their step.
    """
    for base in cls.__mro__:
        is_other = base.__module__.startswith("trl.") and "sft" not in base.__module__
        found = [name for name in ("compute_loss", "training_step") if name in vars(base)]
        if is_other and found:
            return f"{base.__name__}.{found[0]}"
    return None


def _adapted(
    model: nn.Module, peft_config: Any, settings: TrainingArguments, recipe: Recipe
) -> nn.Module:
    """The model with adapters of a PEFT configuration."""
    if recipe.trainable.keeps_base:
        raise ValueError(
            f"the recipe's {type(recipe.trainable).__name__} and peft_config are two sets of "
            "adapters: pass only one of them"
        )
    peft = require("peft", extra="peft", what="peft_config=")
    with seeded(settings.seed):  # the same A on every rank
        return cast(nn.Module, peft.get_peft_model(model, peft_config))


def _remove_copies(model: nn.Module, adapters: set[str]) -> None:
    """Remove TRL's copy of new adapters: its reference is then the model with its adapters off.

    Both are the pretrained model, but transformers resumes with one set of adapters only.
    """
    peft: Any = model
    if has_adapters(model) and adapters_are_new(model):
        for copied in {*getattr(model, "peft_config", ())} - adapters:
            peft.delete_adapter(copied)


def _collate_labeled(collate: Collate, reading: str, loss: str, samples: list[Any]) -> Any:
    """A batch of labeled samples; ValueError if the trainer's batches have no labels."""
    batch = collate(samples)
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
    else:
        labels = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
    if not isinstance(labels, Tensor):
        raise ValueError(
            f"{reading} reads samples with labels before training, but the batches for {loss} have "
            "no labels: use a method that does not read the data"
        )
    return batch


def _check_arguments(given: dict[str, Any], settings: TrainingArguments, recipe: Recipe) -> None:
    model = given.get("model")
    if not isinstance(model, nn.Module):
        raise TypeError(
            "model= must be the pretrained model itself, because the recipe uses it before "
            f"training (model_init= and names are not supported), got {type(model).__name__}"
        )
    if getattr(settings, "auto_find_batch_size", False) and recipe != Recipe():
        raise ValueError(
            "auto_find_batch_size changes the number of updates, which the recipe must know "
            "beforehand: set per_device_train_batch_size"
        )
    if given.get("optimizers", (None, None))[0] is not None:
        raise ValueError("the recipe builds the optimizer: do not pass optimizers=")
    if has_own_update(recipe) and given.get("optimizer_cls_and_kwargs") is not None:
        raise ValueError(
            f"optimizer_cls_and_kwargs and the recipe's {type(recipe.update).__name__} are two "
            "optimizers: pass only one of them"
        )


def has_own_update(recipe: Recipe) -> bool:
    """Whether the recipe's update differs from the default in more than its learning rate."""
    return replace(recipe.update, lr=None) != Recipe().update
