"""Drive a loop through its updates: clip, step, watch, log, save and resume."""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from holdfast._torch.checks import NamedSettings, above_zero, whole_number
from holdfast._torch.finite import check_loss
from holdfast._torch.layout import all_agree, mean_over_ranks, rank_and_world
from holdfast._torch.progress import progress_bar
from holdfast.hosts import _checkpoints as checkpoints
from holdfast.hosts._early_stop import EarlyStop
from holdfast.hosts._updates import CLIP_NORM, MOST_UPDATES, Schedule, Updates
from holdfast.hosts.watching import Observer
from holdfast.run import Run

logger = logging.getLogger(__name__)


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
        patience: stop after this many measurements of the watch without a lower loss on its target,
            and keep the weights with the lowest one. If None, the run makes all updates.
    """

    max_updates: int | None = None
    accumulate: int = 1
    schedule: Schedule | None = None
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    log_every: int = 10
    save_every: int | timedelta | None = None
    patience: int | None = None

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
        if self.patience is not None:
            whole_number("patience", self.patience, 1)
        if isinstance(self.save_every, int):
            whole_number("save_every", self.save_every, 1)


class Loop(Protocol):
    """What a loop has: it yields the number of each update, and computes the gradients of it."""

    run: Run
    updates: Updates
    model: nn.Module
    optimizer: Any
    done: int

    def __iter__(self) -> Iterator[int]: ...

    def backward(self) -> Tensor:
        """Compute the gradients of the update; return the loss of its samples."""
        ...


def drive(
    loop: Loop,
    settings: LoopSettings,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    log: Callable[[dict[str, float]], None] | None = None,
    watch: Observer | None = None,
    on_update: Callable[[int], None] | None = None,
) -> None:
    """Make all updates of a loop. All ranks must call it; only the first one logs and writes.

    With ``settings.patience``, it may stop early, and the run ends with its best weights.
    ``on_update`` is called after each update, before the update is saved.
    """
    run, total, optimizer = loop.run, loop.updates.total, loop.optimizer
    is_first = rank_and_world()[0] == 0
    clip_norm = settings.clip_norm
    if clip_norm is None and run.needs_warm_up:
        clip_norm = CLIP_NORM
    save_every = settings.save_every
    due = checkpoints.Due(-(-total // 20) if save_every is None else save_every, total)
    early = None
    if settings.patience is not None:
        early = EarlyStop(settings.patience, run, watch)
    identity = loop.updates.settings(run) | {
        "clip_norm": clip_norm, "patience": settings.patience,
    }  # fmt: skip
    loop.done = checkpoints.load(checkpoint, run, identity, early) if checkpoint else 0
    if loop.done:
        logger.info(f"continues after update {loop.done} of {total}")

    device = next(run.model.parameters()).device
    bar = progress_bar(total, "fine-tuning", shown=run.progress, unit="update")
    bar.update(loop.done)
    if log and watch and not loop.done:
        seen = {"update": 0} | watch(0, run.model)
        if early:
            early.measured(0)
        if is_first:
            log(seen)
    with bar:
        for update in loop if early is None or not early.is_over else ():
            loss = loop.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(loop.model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            bar.update(1)
            if on_update:
                on_update(update)
            seen = watch(update, run.model) if watch else {}
            if early and seen:
                seen |= early.measured(update)
            is_logged = bool(seen) or update % settings.log_every == 0 or update == total
            # The clock of the first rank decides for all.
            is_saved = checkpoint is not None and all_agree(not is_first or due(update), device)
            if is_logged or is_saved:  # reading the loss waits for a GPU
                check_loss(float(loss) + _recalled(run, device), update)
            if log and is_logged:
                rate = optimizer.param_groups[0]["lr"]
                values = {"update": update, "loss": float(loss), "lr": rate} | run.log() | seen
                if is_first:
                    log(values)
            if checkpoint and is_saved:
                checkpoints.save(checkpoint, run, update, identity, early)
            if early and early.is_over:
                break
    if early:
        early.restore()


def _recalled(run: Run, device: torch.device) -> float:
    """What the recall added to the loss of the update, over all ranks. All ranks must call it."""
    if not run.recall.has_data:
        return 0.0
    own = run.recipe.recall.log(run).get("recall", 0.0)
    return float(mean_over_ranks(torch.tensor(own, device=device)))


def check_watch(watch: Observer | None, log: Any) -> None:
    if watch is not None and log is None:
        raise ValueError("watch= writes its values to the log: pass log= as well")
