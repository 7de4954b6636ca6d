"""Train a model into a folder by a recipe. A run may be stopped at any time and resumed later."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args, get_type_hints

import torch
from torch import nn

from holdfast._torch.checks import (
    NamedSettings,
    above_zero,
    at_least_zero,
    flag,
    natural_number,
    one_of,
    positive_share,
    share,
    whole_number,
)
from holdfast._torch.imports import require
from holdfast._torch.multimodal import freeze_other_parts
from holdfast.hosts._checkpoints import saved_lr
from holdfast.hosts._driving import LoopSettings, drive
from holdfast.hosts._early_stop import check_may_stop
from holdfast.hosts._packing import Packed, check_packing
from holdfast.hosts._updates import (
    as_samples,
    number_of_epochs,
    number_of_updates,
    warm_up_and_decay,
)
from holdfast.hosts.raw import plain_if_interrupted
from holdfast.hosts.tracking import TrackedRun
from holdfast.hosts.watching import Observer
from holdfast.io.encoding import TrainingData
from holdfast.io.files import naming_errors, open_here, remove_cut_line, write_text
from holdfast.io.heads import model_kind
from holdfast.io.models import Loader
from holdfast.io.rows import Sources, share_a_file
from holdfast.losses import Task, infer_task
from holdfast.recipe import DEFAULT_RECIPE, Recipe, preset_that
from holdfast.run import Run, resolved
from holdfast.stages import TrainingSize

#: Called with the name of an activity, the amount done, and the total amount.
ProgressCallback = Callable[[str, int, int], None]


logger = logging.getLogger(__name__)

DEFAULT_LR = 2e-5  # of models for which the default recipe has none


@dataclass(frozen=True)
class Training(NamedSettings):
    """Settings of the training loop. A learning rate in the recipe takes precedence over ``lr``.

    Attributes:
        lr: peak learning rate; by default that of the recipe, or of the preset holdfast.
        epochs: passes over the data.
        max_updates: number of weight updates; overrides ``epochs``.
        batch_size: samples per micro-batch and process.
        accumulate: micro-batches per update.
        max_length: maximum length of a sample, in tokens.
        warmup: fraction of the updates over which the learning rate rises; it then falls to 0.
        weight_decay: weight decay of matrices.
        clip_norm: maximum norm of the gradient. If None, gradients are not clipped.
        precision: ``"float32"``, ``"bfloat16"`` (autocast; weights stay float32), or ``"auto"``,
            which is bfloat16 on a GPU or if Accelerate is set to it, and float32 elsewhere.
        dtype: ``"float32"`` or ``"bfloat16"``, the dtype of the weights. In bfloat16 they take half
            the memory, but small updates of a weight are rounded away; adapters stay float32.
        load_in_4bit, load_in_8bit: quantize the linear layers (bitsandbytes), which are then frozen
            under adapters: the recipe must train some.
        gradient_checkpointing: compute activations again in the backward pass, to save memory.
        packing: join samples of a language model to sequences of ``max_length`` tokens, without
            padding. They do not see each other. ``batch_size`` then counts sequences.
        save_seconds: seconds between two checkpoints; a stopped run resumes from the last one.
        validation: rows of the new task that are not trained on: a file, or the share of the
            training data that is held out for it. The log has the loss on them.
        patience: stop after this many evaluations on ``validation`` without a lower loss, and keep
            the weights with the lowest one. If None, the run makes all updates.
        evaluate_every: updates between two evaluations; by default a twentieth of the run.
    """

    lr: float | None = None
    epochs: float = 1.0
    max_updates: int | None = None
    batch_size: int = 16
    accumulate: int = 1
    max_length: int = 512
    warmup: float = 0.03
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    gradient_checkpointing: bool = False
    packing: bool = False
    save_seconds: float = 60.0
    validation: str | float | None = None  # or a path
    patience: int | None = None
    evaluate_every: int | None = None

    def __post_init__(self) -> None:
        if self.lr is not None:
            above_zero("lr", self.lr)
        above_zero("epochs", self.epochs), share("warmup", self.warmup)
        whole_number("batch_size", self.batch_size, 1)
        whole_number("max_length", self.max_length, 2)
        at_least_zero("weight_decay", self.weight_decay)
        at_least_zero("save_seconds", self.save_seconds)
        if self.validation is not None and self.validation_file is None:
            one, most = positive_share("validation", self.validation), 0.5
            if one > most:
                raise ValueError(f"validation must be a file or a share up to {most}, got {one}")
        if self.patience is not None and self.validation is None:
            raise ValueError("patience needs rows for validation, by which the training stops")
        if self.evaluate_every is not None:
            whole_number("evaluate_every", self.evaluate_every, 1)
        LoopSettings(  # checks them
            self.max_updates, self.accumulate, clip_norm=self.clip_norm, patience=self.patience
        )
        for name in ("precision", "dtype"):
            one_of(name, getattr(self, name), get_args(get_type_hints(Training)[name]))
        for name in ("load_in_4bit", "load_in_8bit", "gradient_checkpointing", "packing"):
            flag(name, getattr(self, name))
        if self.load_in_4bit and self.load_in_8bit:
            raise ValueError("load_in_4bit and load_in_8bit exclude each other: choose one")
        if self.dtype != "float32" and (self.load_in_4bit or self.load_in_8bit):
            raise ValueError(
                f"a quantized model has no dtype {self.dtype}: leave out dtype (precision is the "
                "dtype that it computes in)"
            )

    def loader(self, device: Any = None, *, trust_remote_code: bool = False) -> Loader:
        """How the pretrained model is loaded."""
        bits: Literal[4, 8] | None = 4 if self.load_in_4bit else 8 if self.load_in_8bit else None
        return Loader(
            device, max_length=self.max_length, bits=bits, trust_remote_code=trust_remote_code
        )

    @property
    def validation_file(self) -> str | None:
        """The file of the rows for validation; None if there is none."""
        given = self.validation
        return os.fspath(given) if isinstance(given, str | os.PathLike) else None

    def check_validation(self, **others: Sources) -> None:
        """Raise ValueError if the rows for validation are used for something else as well."""
        if self.validation_file is None:
            return
        for name, source in others.items():
            if share_a_file(self.validation_file, source):
                raise ValueError(
                    f"validation and {name} are both {self.validation}, but what the training "
                    "stops by must not be trained on or reported: give other rows"
                )

    def amount(self, samples: Sequence[Any], processes: int = 1) -> tuple[int, int]:
        """The number of updates on some samples, and about how many samples each of them takes."""
        size, rows = self.batch_size * self.accumulate * processes, self._rows(samples)
        total = number_of_updates(rows, size, self.epochs, self.max_updates)
        return total, round(size * len(samples) / rows)

    def size_on(self, samples: Sequence[Any], processes: int = 1) -> TrainingSize:
        """The number of samples, and how often each of them is visited."""
        size = self.batch_size * self.accumulate * processes
        epochs = number_of_epochs(self._rows(samples), size, self.epochs, self.max_updates)
        return TrainingSize(len(samples), epochs)

    @property
    def extent(self) -> tuple[Any, ...]:
        """The settings that say how much is trained on some samples."""
        return (
            self.epochs, self.max_updates, self.batch_size, self.accumulate, self.packing,
            self.max_length,
        )  # fmt: skip

    def _rows(self, samples: Sequence[Any]) -> int:
        return len(Packed(samples, self.max_length)) if self.packing else len(samples)

    def schedule(self, update: int, total: int) -> float:
        """The factor of the learning rate: linear warm-up, then linear decay to 0."""
        return warm_up_and_decay(update, total, warm_up=self.warmup)


def encode(
    task: TrainingData, recipes: Iterable[Recipe], training: Training, old_data: str | None = None
) -> tuple[Sequence[Any], Sequence[Any] | None]:
    """Encode the data and the old data, before any weights are loaded.

    Raise ValueError if the columns do not fit the model, or a recipe does not fit either, or cannot
    be trained with these settings.
    """
    model = task.loader.skeleton(task.source, task.head)
    if training.packing and model_kind(model) != "causal_lm":
        raise ValueError(
            f"packing joins texts for a language model, but {type(model).__name__} is none"
        )
    for recipe in recipes:
        check_fit(recipe, model, task, training, has_old_data=old_data is not None)
    old = None if old_data is None else task.samples(model, other=old_data)
    return task.samples(model), old


def check_fit(
    recipe: Recipe, model: nn.Module, data: TrainingData, training: Training, *, has_old_data: bool
) -> None:
    """Raise ValueError if a recipe does not fit the model, the data or the training settings.

    ``model`` needs no values of its weights.
    """
    recipe.check_head(data.given or (("the head",) if data.head else ()))
    recipe.check_model(model, has_old_data)
    if (task := _task_of(model)) is not None:
        recipe.check_task(task)
    if training.patience is not None:
        check_may_stop(recipe)
    if training.packing and (reason := recipe.objective.packing_conflict()):
        raise ValueError(reason)


def _task_of(model: nn.Module) -> Task | None:
    """The task of a model; None if it is not known, which the training reports."""
    try:
        return infer_task(model)
    except ValueError:
        return None


class Trained(NamedTuple):
    """A trained model, the recipe as it was trained, and the log of the training."""

    model: nn.Module
    recipe: Recipe
    history: list[dict[str, float]]


def train(
    model: nn.Module,
    recipe: Recipe,
    samples: Sequence[Any],
    training: Training,
    folder: Path,
    *,
    old_data: Sequence[Any] | None = None,
    new: Sequence[str] = (),
    tokenizer: Any = None,
    seed: int = 0,
    show: bool = False,
    progress: ProgressCallback | None = None,
    watch: Callable[[nn.Module, int], Observer] | None = None,
    on_update: Callable[[Run, int, int], None] | None = None,
    on_trained: Callable[[Run, list[dict[str, float]]], None] | None = None,
    tracked: TrackedRun | None = None,
) -> Trained:
    """Train a pretrained model, or resume the run in the folder.

    Accelerate places the run: on one device, or on all processes that a launcher started. Every
    process calls this function with the whole model; the first one writes to the folder, and only
    its log is complete.

    ``show`` shows progress bars of what happens before training, such as drawing texts. ``watch``
    builds a watch from the pretrained model and the total number of updates; its values go into the
    log. ``on_update`` is called with the run, the update and their total number after each update.
    ``on_trained`` is called with the run and its log instead of stage 4. ``tracked`` gets the rows
    of the log as well.
    """
    from holdfast.hosts.accelerate import AccelerateLoop, autocast_of, make_accelerator

    torch.manual_seed(natural_number("seed", seed))
    was_training = model.training
    model = _ready(model, training)
    freeze_other_parts(model)  # the data has no images for a language model
    exact = recipe.trainable.keeps_base or getattr(recipe.update, "stochastic_rounding", False)
    if training.dtype == "bfloat16" and not exact:
        logger.warning(
            "the weights are bfloat16, so updates of less than .4 % of a weight are lost: add "
            f"{preset_that('keeps_base')}, set update.stochastic_rounding of a method that has it, "
            "or leave dtype at float32 and set precision to bfloat16"
        )
    if training.packing:
        check_packing(model)
        if reason := recipe.objective.packing_conflict():
            raise ValueError(reason)
    source = as_samples(samples, None, training.batch_size, model)
    accelerator = make_accelerator(model, training.accumulate)
    ranks = accelerator.num_processes
    total, update_size = training.amount(samples, ranks)
    log = _Log(folder, total, progress)
    if ranks > 1:
        logger.info(f"{ranks} processes, {update_size} samples per update")
    if training.packing:
        rows = len(Packed(samples, training.max_length))
        logger.info(f"{len(samples)} samples are packed into {rows} sequences")
    autocast = autocast_of(accelerator, training.precision, next(model.parameters()).device)
    # The watch needs the pretrained weights, which a Run may change.
    watching = watch(model, total) if watch else None
    torch.manual_seed(seed)
    lr = training.lr if recipe.update.lr is None else recipe.update.lr
    if lr is None:  # an unfinished run goes on with its own, also if the default has changed since
        lr = saved_lr(folder / "run.pt")
    size = training.size_on(samples, ranks)
    run = Run(
        recipe, model, source.data, collate=source.collate,
        lr=lr, default_lr=default_lr(recipe, model, new, size) if lr is None else None,
        weight_decay=training.weight_decay, old_data=old_data, new=new, tokenizer=tokenizer,
        visits=total * update_size, size=size, update_size=update_size, autocast=autocast,
        seed=seed, progress=show,
    )  # fmt: skip
    run.progress = False  # the caller shows the progress of the training itself
    if tracked and accelerator.is_main_process:
        tracked.follow(run.full_recipe.to_dict(), log.rows())
        log.tracked = tracked
    if training.packing:
        data, columns = run.criterion.data, run.criterion.columns
        run.criterion.data = Packed(data, training.max_length, columns)
    settings = LoopSettings(
        clip_norm=training.clip_norm, log_every=max(1, total // 20),
        save_every=timedelta(seconds=training.save_seconds), patience=training.patience,
    )  # fmt: skip
    with plain_if_interrupted(run):
        loop = AccelerateLoop(
            accelerator, run, max_updates=total, batch_size=training.batch_size,
            schedule=training.schedule,
        )  # fmt: skip
        drive(
            loop, settings, checkpoint=folder / "run.pt", log=log, watch=watching,
            on_update=(lambda update: on_update(run, update, total)) if on_update else None,
        )  # fmt: skip
    loop.unwrap()
    history = log.rows() if accelerator.is_main_process else []
    if on_trained is None:
        run.finish()
    else:
        on_trained(run, history)
    return Trained(run.model.train(was_training), run.full_recipe, history)


def _ready(model: nn.Module, training: Training) -> nn.Module:
    """The model with weights of the right dtype, as gradient checkpointing needs it."""
    again = training.gradient_checkpointing
    if again and not getattr(model, "supports_gradient_checkpointing", False):
        raise ValueError(f"{type(model).__name__} does not support gradient checkpointing")
    how = {"use_reentrant": False}
    if getattr(model, "is_quantized", False):
        peft = require("peft", extra="peft", what="training adapters of a quantized model")
        frozen: nn.Module = peft.prepare_model_for_kbit_training(model, again, how)
        return frozen
    model.to(torch.float32)
    if training.dtype != "float32":  # not the buffers: the frequencies of positions need float32
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, training.dtype))
    if again:
        cast(Any, model).gradient_checkpointing_enable(how)
    return model


def default_lr(
    recipe: Recipe,
    model: nn.Module,
    new: Sequence[str],
    size: TrainingSize = TrainingSize(),  # noqa: B008 (immutable)
) -> float:
    """The learning rate that the default recipe would have with the trainable set of a recipe.

    2e-5 if it has none for the model, such as a model of an unknown kind.
    """
    # Without the settings of stage 1: they may not fit what the default recipe adds.
    default = replace(Recipe.preset(DEFAULT_RECIPE), trainable=type(recipe.trainable)())
    return resolved_quietly(default, model, new, size)[1]


def resolved_quietly(
    recipe: Recipe,
    model: nn.Module,
    new: Sequence[str],
    size: TrainingSize = TrainingSize(),  # noqa: B008 (immutable)
) -> tuple[Recipe, float]:
    """The recipe for a model and its learning rate, without a line in the log: none is trained."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return resolved(recipe, model, default_lr=DEFAULT_LR, new=new, size=size)
    finally:
        logging.disable(before)


class _Log:
    """The log of a run, appended to a file, so that a resumed run has all of it."""

    def __init__(self, folder: Path, total: int, progress: ProgressCallback | None) -> None:
        self.file, self.total, self.progress = folder / "history.jsonl", total, progress
        self.clock, self.start = folder / "seconds", time.monotonic()
        self.before = spent_before(folder)
        self.tracked: TrackedRun | None = None
        if self.file.exists():
            remove_cut_line(self.file)
        self.rows()  # raises before the training if a line is damaged

    def __call__(self, values: dict[str, float]) -> None:
        row = json.dumps(values) + "\n"
        with naming_errors(self.file), open(self.file, "ab", opener=open_here) as file:
            file.write(row.encode())
        if self.tracked:
            self.tracked(values)
        beside = self.tracked.seconds if self.tracked else 0.0
        write_text(self.clock, str(self.before + time.monotonic() - self.start - beside))
        if self.progress:
            self.progress("training", int(values["update"]), self.total)

    def rows(self) -> list[dict[str, float]]:
        """One row per update; a row that was logged again after a resume has the same values."""
        found: dict[float, dict[str, float]] = {}
        for number, line in enumerate(self._lines(), 1):
            try:
                row = json.loads(line)
                found[row["update"]] = found.get(row["update"], {}) | row
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ValueError(
                    f"{self.file}, line {number} is damaged: remove {self.file.parent} to start "
                    "the run again"
                ) from error
        return [found[update] for update in sorted(found)]

    def _lines(self) -> list[str]:
        try:
            return self.file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.file} is damaged: remove {self.file.parent} to start the run again"
            ) from error


def spent_before(folder: Path) -> float:
    """The seconds that a stopped run has used so far."""
    try:
        return float((folder / "seconds").read_text())
    except (OSError, ValueError):
        return 0.0
