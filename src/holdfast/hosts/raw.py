"""The raw PyTorch host: a recipe in one short training loop.

model = finetune_loop(model, "recadam+flow", dataset, lr=2e-5, epochs=3)
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from holdfast._torch.batch import to_device
from holdfast._torch.checks import NamedSettings, above_zero, natural_number, whole_number
from holdfast._torch.finite import check_loss
from holdfast._torch.progress import progress_bar
from holdfast.hosts import _checkpoints as checkpoints
from holdfast.hosts._updates import (
    CLIP_NORM,
    MOST_UPDATES,
    Schedule,
    Updates,
    as_samples,
    labels_of,
    number_of_updates,
    schedule_for,
    source_of,
)
from holdfast.hosts.watching import Observer
from holdfast.losses import LossFunction, Task, count_all
from holdfast.recipe import Recipe
from holdfast.run import Run


@dataclass(frozen=True)
class LoopSettings(NamedSettings):
    """How the loop makes its updates, logs and saves.

    Args:
        max_updates: the number of updates; overrides ``epochs``.
        accumulate: micro-batches per update. The split into micro-batches does not change the
            result, except for operations that act on each micro-batch separately, such as dropout.
        schedule: a function (update, total updates) -> factor of the learning rate, with updates
            counted from 0, such as :func:`~holdfast.optim.slanted_triangular`. If None, the
            learning rate is constant. If the recipe chooses the learning rate, or needs a warm-up,
            it rises over 5 % of the updates and then falls to 0.
        clip_norm: the maximum norm of the gradient. If None, gradients are not clipped, or to norm
            1 if the recipe chooses the learning rate, or needs a warm-up.
        autocast: the dtype in which the model runs, ``torch.bfloat16``. If None, the weights' own.
        log_every: updates between two calls of ``log``.
        save_every: updates, or time, between two saves. If None, about twenty saves per run.
    """

    max_updates: int | None = None
    accumulate: int = 1
    schedule: Schedule | None = None
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    log_every: int = 10
    save_every: int | timedelta | None = None

    def __post_init__(self) -> None:
        if self.max_updates is not None:
            whole_number("max_updates", self.max_updates, 1, MOST_UPDATES)
        whole_number("accumulate", self.accumulate, 1)
        if self.clip_norm is not None:
            above_zero("clip_norm", self.clip_norm)
        if self.autocast is torch.float16:
            raise ValueError(
                "autocast=torch.float16 needs a GradScaler, which this loop does not have: use "
                "autocast=torch.bfloat16"
            )
        whole_number("log_every", self.log_every, 1)
        if isinstance(self.save_every, int):
            whole_number("save_every", self.save_every, 1)


def finetune_loop(
    model: nn.Module,
    recipe: Recipe | str,
    data: Any,
    *,
    lr: float | None = None,
    epochs: float = 1.0,
    batch_size: int = 16,
    task: Task | LossFunction | None = None,
    new: str | tuple[str, ...] | list[str] | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    settings: LoopSettings = LoopSettings(),  # noqa: B008 (frozen)
    checkpoint: str | os.PathLike[str] | None = None,
    log: Callable[[dict[str, float]], None] | None = None,
    watch: Observer | None = None,
    progress: bool = True,
) -> nn.Module:
    """Fine-tune a model with a recipe, on one device, in a plain loop.

    Args:
        model: the model with its pretrained weights, on the device to train on.
        recipe: the methods, or the name of a preset. ``Recipe()`` is plain fine-tuning.
        data: a map-style dataset (``__len__`` and ``__getitem__``), or a DataLoader over one. The
            loop uses the loader's batch size and collate function, but shuffles by itself.
        lr: the peak learning rate. Required unless the recipe sets it or has a default.
        epochs: passes over the data.
        batch_size: samples per micro-batch.
        task: how labels are interpreted, as for :func:`holdfast.score`. If None, it is inferred
            from a transformers model.
        new: parts of the model without pretrained weights, such as ``"classifier"``. If None, they
            are the parts of the head for which ``from_pretrained`` of transformers found none.
        tokenizer: the tokenizer of a language model, for recipes that draw texts from it.
        seed: the seed of the data order, of dropout and of everything that methods draw.
        settings: accumulation, schedule, clipping, precision, and how often to log and save.
        checkpoint: a file for the state of the run. If it exists, the run resumes from it. The
            result is bit-identical to that of an uninterrupted run.
        log: called with ``update``, ``loss``, ``lr`` and the values of the methods: ``lam`` (λ),
            the ``pull``, penalties.
        watch: measures the model during training, as :class:`holdfast.Watch` does. Needs ``log``.
        progress: show progress bars.

    Returns:
        The given model, tuned in place and merged. With LoRA, the PEFT model around it.

    For further options of the methods, such as ``reference=`` or ``cache=``, build a
    :class:`~holdfast.run.Run`, pass it to :func:`train_loop`, and call ``run.finish()``.

    Example:
        >>> import torch, holdfast
        >>> model = torch.nn.Linear(4, 2)
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
        >>> model = holdfast.finetune_loop(
        ...     model, "recadam+wise-ft", data, lr=1e-2, task="classification", progress=False
        ... )
    """
    _check_watch(watch, log)
    was_training = model.training
    torch.manual_seed(natural_number("seed", seed))
    source = as_samples(data, None, batch_size, model)
    size = source.batch_size * settings.accumulate
    total = number_of_updates(len(source.data), size, epochs, settings.max_updates)
    run = Run(
        recipe, model, source.data, lr=lr, task=task, collate=source.collate, new=new, seed=seed,
        tokenizer=tokenizer, visits=total * size, update_size=size, autocast=settings.autocast,
        progress=progress,
    )  # fmt: skip
    with plain_if_interrupted(run):
        train_loop(
            run, epochs=epochs, batch_size=source.batch_size, settings=settings,
            checkpoint=checkpoint, log=log, watch=watch,
        )  # fmt: skip
    return run.finish().train(was_training)


@contextlib.contextmanager
def plain_if_interrupted(run: Run) -> Iterator[None]:
    """Undo what stage 1 did to the model if training ends with an exception."""
    try:
        yield
    except BaseException:
        run.recipe.trainable.finish(run.model)
        raise


def train_loop(
    run: Run,
    *,
    epochs: float = 1.0,
    batch_size: int = 16,
    settings: LoopSettings = LoopSettings(),  # noqa: B008 (frozen)
    checkpoint: str | os.PathLike[str] | None = None,
    log: Callable[[dict[str, float]], None] | None = None,
    watch: Observer | None = None,
) -> None:
    """Train a run up to stage 4, which ``run.finish()`` does.

    Args:
        run: the recipe with its model and data.
        epochs, batch_size, settings, checkpoint, log, watch: as for :func:`finetune_loop`.

    Example:
        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
        >>> options = {"lr": 1e-2, "task": "classification", "progress": False}
        >>> run = Run("recadam", torch.nn.Linear(4, 2), data, **options)
        >>> train_loop(run, epochs=2)
        >>> model = run.finish()
    """
    _check_watch(watch, log)
    updates = Updates(
        source_of(run, batch_size), settings.accumulate, run.seed, epochs=epochs,
        max_updates=settings.max_updates, schedule=schedule_for(run, settings.schedule),
    )  # fmt: skip
    clip_norm = settings.clip_norm
    if clip_norm is None and run.needs_warm_up:
        clip_norm = CLIP_NORM
    total, save_every = updates.total, settings.save_every
    due = checkpoints.Due(-(-total // 20) if save_every is None else save_every, total)
    optimizer = run.make_optimizer(total)
    peaks = [group["lr"] for group in optimizer.param_groups]
    identity = updates.settings(run) | {"clip_norm": clip_norm}
    done = checkpoints.load(checkpoint, run, identity) if checkpoint else 0

    device = next(run.model.parameters()).device
    autocast = settings.autocast
    precision = torch.autocast(device.type, dtype=autocast, enabled=autocast is not None)
    bar = progress_bar(total, "fine-tuning", shown=run.progress, unit="update")
    bar.update(done)
    run.model.train()
    optimizer.zero_grad()
    if log and watch and not done:
        log({"update": 0} | watch(0, run.model))
    with bar:
        for update in range(done + 1, total + 1):
            run.advance(update)
            if updates.factors:
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * updates.factors[update - 1]
            batches = list(updates.batches(update))
            # On the CPU: counting on a GPU takes longer.
            targets = count_all([labels_of(batch, run.task) for batch in batches], run.task)
            run.recall.plan(run.model, update, updates.size, len(batches))
            losses = []
            for batch in batches:
                with precision:
                    loss = run.loss(to_device(batch, device), targets, update)
                loss.backward()
                losses.append(loss.detach())
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(run.model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            bar.update(1)
            seen = watch(update, run.model) if watch else {}
            is_logged = bool(seen) or update % settings.log_every == 0 or update == total
            is_saved = checkpoint is not None and due(update)
            if is_logged or is_saved:  # reading the loss waits for a GPU
                total_loss = check_loss(float(sum(losses)), update)
            if log and is_logged:
                rate = optimizer.param_groups[0]["lr"]
                log({"update": update, "loss": total_loss, "lr": rate} | run.log() | seen)
            if checkpoint and is_saved:
                checkpoints.save(checkpoint, run, update, identity)


def _check_watch(watch: Observer | None, log: Any) -> None:
    if watch is not None and log is None:
        raise ValueError("watch= writes its values to the log: pass log= as well")
