"""Train a model into a folder by a recipe. A run may be stopped at any time and resumed later."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast._torch.checks import (
    NamedSettings,
    above_zero,
    at_least_zero,
    natural_number,
    share,
    whole_number,
)
from holdfast._torch.multimodal import freeze_other_parts
from holdfast.hosts._driving import LoopSettings, drive
from holdfast.hosts._updates import as_samples, number_of_updates, warm_up_and_decay
from holdfast.hosts.raw import plain_if_interrupted
from holdfast.hosts.watching import Observer
from holdfast.io.encoding import TrainingData
from holdfast.io.files import naming_errors, open_here, remove_cut_line, write_text
from holdfast.recipe import DEFAULT_RECIPE, Recipe
from holdfast.run import Run, resolved

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
        save_seconds: seconds between two checkpoints; a stopped run resumes from the last one.
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
    precision: str = "auto"
    save_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.lr is not None:
            above_zero("lr", self.lr)
        above_zero("epochs", self.epochs), share("warmup", self.warmup)
        whole_number("batch_size", self.batch_size, 1)
        whole_number("max_length", self.max_length, 2)
        at_least_zero("weight_decay", self.weight_decay)
        at_least_zero("save_seconds", self.save_seconds)
        LoopSettings(self.max_updates, self.accumulate, clip_norm=self.clip_norm)  # checks them
        if self.precision not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"precision must be auto, float32 or bfloat16, got {self.precision!r}")

    def schedule(self, update: int, total: int) -> float:
        """The factor of the learning rate: linear warm-up, then linear decay to 0."""
        return warm_up_and_decay(update, total, warm_up=self.warmup)


def encode(
    task: TrainingData, recipes: Iterable[Recipe], old_data: str | None = None
) -> tuple[Sequence[Any], Sequence[Any] | None]:
    """Encode the data and the old data, before any weights are loaded.

    Raise ValueError if the columns do not fit the model, or a recipe does not fit either.
    """
    model = task.loader.skeleton(task.source, task.head)
    new = task.given or (("the head",) if task.head else ())
    for recipe in recipes:
        recipe.check_head(new)
        recipe.check_model(model, old_data is not None)
    old = None if old_data is None else task.samples(model, other=old_data)
    return task.samples(model), old


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
    on_trained: Callable[[Run, list[dict[str, float]]], None] | None = None,
) -> Trained:
    """Train a pretrained model, or resume the run in the folder.

    Accelerate places the run: on one device, or on all processes that a launcher started. Every
    process calls this function with the whole model; the first one writes to the folder, and only
    its log is complete.

    ``show`` shows progress bars of what happens before training, such as drawing texts. ``watch``
    builds a watch from the pretrained model and the total number of updates; its values go into the
    log. ``on_trained`` is called with the run and its log instead of stage 4.
    """
    from holdfast.hosts.accelerate import AccelerateLoop, autocast_of, make_accelerator

    torch.manual_seed(natural_number("seed", seed))
    was_training = model.training
    model.to(torch.float32)
    freeze_other_parts(model)  # the data has no images for a language model
    source = as_samples(samples, None, training.batch_size, model)
    accelerator = make_accelerator(model, training.accumulate)
    ranks = accelerator.num_processes
    size = training.batch_size * training.accumulate * ranks
    total = number_of_updates(len(samples), size, training.epochs, training.max_updates)
    log = _Log(folder, total, progress)
    if ranks > 1:
        logger.info(f"{ranks} processes, {size} samples per update")
    autocast = autocast_of(accelerator, training.precision, next(model.parameters()).device)
    # The watch needs the pretrained weights, which a Run may change.
    watching = watch(model, total) if watch else None
    torch.manual_seed(seed)
    lr = training.lr if recipe.update.lr is None else recipe.update.lr
    run = Run(
        recipe, model, source.data, collate=source.collate,
        lr=lr, default_lr=default_lr(recipe, model, new) if lr is None else None,
        weight_decay=training.weight_decay, old_data=old_data, new=new, tokenizer=tokenizer,
        visits=total * size, update_size=size, autocast=autocast, seed=seed, progress=show,
    )  # fmt: skip
    run.progress = False  # the caller shows the progress of the training itself
    settings = LoopSettings(
        clip_norm=training.clip_norm, log_every=max(1, total // 20),
        save_every=timedelta(seconds=training.save_seconds),
    )  # fmt: skip
    with plain_if_interrupted(run):
        loop = AccelerateLoop(
            accelerator, run, max_updates=total, batch_size=training.batch_size,
            schedule=training.schedule,
        )  # fmt: skip
        drive(loop, settings, checkpoint=folder / "run.pt", log=log, watch=watching)
    loop.unwrap()
    history = log.rows() if accelerator.is_main_process else []
    if on_trained is None:
        run.finish()
    else:
        on_trained(run, history)
    return Trained(run.model.train(was_training), run.full_recipe, history)


def default_lr(recipe: Recipe, model: nn.Module, new: Sequence[str]) -> float:
    """The learning rate that the default recipe would have with the trainable set of a recipe.

    2e-5 if it has none for the model, such as a model of an unknown kind.
    """
    # Without the settings of stage 1: they may not fit what the default recipe adds.
    default = replace(Recipe.preset(DEFAULT_RECIPE), trainable=type(recipe.trainable)())
    return resolved_quietly(default, model, new)[1]


def resolved_quietly(recipe: Recipe, model: nn.Module, new: Sequence[str]) -> tuple[Recipe, float]:
    """The recipe for a model and its learning rate, without a line in the log: none is trained."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return resolved(recipe, model, default_lr=DEFAULT_LR, new=new)
    finally:
        logging.disable(before)


class _Log:
    """The log of a run, appended to a file, so that a resumed run has all of it."""

    def __init__(self, folder: Path, total: int, progress: ProgressCallback | None) -> None:
        self.file, self.total, self.progress = folder / "history.jsonl", total, progress
        self.clock, self.start = folder / "seconds", time.monotonic()
        self.before = spent_before(folder)
        if self.file.exists():
            remove_cut_line(self.file)
        self.rows()  # raises before the training if a line is damaged

    def __call__(self, values: dict[str, float]) -> None:
        row = json.dumps(values) + "\n"
        with naming_errors(self.file), open(self.file, "ab", opener=open_here) as file:
            file.write(row.encode())
        write_text(self.clock, str(self.before + time.monotonic() - self.start))
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
