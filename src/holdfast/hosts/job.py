"""Train a model by a recipe into a folder: it can be stopped at any moment, and goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.comparison.plan import Training
from holdfast.evaluate.watch import Watch
from holdfast.hosts.raw import finetune_loop
from holdfast.recipe import Recipe
from holdfast.run import Run

__all__ = ["Progress", "spent_before", "train"]

#: Told what is done, how much of it, and of how much.
Progress = Callable[[str, int, int], None]


def train(
    model: nn.Module,
    recipe: Recipe,
    samples: Sequence[Any],
    training: Training,
    place: Path,
    *,
    new: Sequence[str] = (),
    seed: int = 0,
    progress: Progress | None = None,
    watch: Callable[[nn.Module, int], Watch] | None = None,
    on_trained: Callable[[Run, list[dict[str, float]]], None] | None = None,
) -> tuple[nn.Module, list[dict[str, float]]]:
    """The trained model, and what was logged on the way.

    Args:
        model: holding its pretrained weights.
        recipe: the methods.
        samples: of the training data.
        training: how long, how fast.
        place: a folder for what a stopped run needs to go on.
        new: parts of the model without pretrained weights.
        seed: of all that is drawn.
        progress: told of the updates.
        watch: makes a watch of the pretrained model and the number of updates; None watches the
            distance alone.
        on_trained: given the run before anything is merged, and what was logged.
    """
    torch.manual_seed(seed)
    model.to(torch.float32)
    total = _updates(training, len(samples))
    log = _Log(place, total, progress)
    on_gpu = next(model.parameters()).device.type == "cuda"
    half = training.precision == "bfloat16" or (training.precision == "auto" and on_gpu)
    trained = finetune_loop(
        model,
        recipe,
        samples,
        lr=None if recipe.update.lr is not None else training.lr,
        max_updates=total,
        batch_size=training.batch_size,
        accumulate=training.accumulate,
        weight_decay=training.weight_decay,
        schedule=_schedule(training.warmup),
        clip_norm=training.clip_norm,
        autocast=torch.bfloat16 if half else None,
        new=new,
        seed=seed,
        checkpoint=place / "run.pt",
        save_every=timedelta(seconds=training.save_seconds),
        log=log,
        log_every=max(1, total // 20),
        watch=watch(model, total) if watch else Watch(model, every=max(1, total // 20)),
        on_trained=None if on_trained is None else lambda run: on_trained(run, log.rows()),
        progress=False,
    )
    return trained, log.rows()


class _Log:
    """The figures of a run over its updates, in a file: a run that goes on has them all."""

    def __init__(self, place: Path, total: int, progress: Progress | None) -> None:
        self.file, self.total, self.progress = place / "history.jsonl", total, progress
        self.clock, self.begin = place / "seconds", time.monotonic()
        self.before = spent_before(place)

    def __call__(self, values: dict[str, float]) -> None:
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        self.clock.write_text(str(self.before + time.monotonic() - self.begin))
        if self.progress:
            self.progress("training", int(values["update"]), self.total)

    def rows(self) -> list[dict[str, float]]:
        """One row an update: what was logged twice, around a stop, is the same."""
        found: dict[float, dict[str, float]] = {}
        for line in (
            self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else ()
        ):
            try:
                row = json.loads(line)
            except ValueError:  # a line that a kill has cut short
                continue
            found[row["update"]] = found.get(row["update"], {}) | row
        return [found[update] for update in sorted(found)]


def _updates(training: Training, samples: int) -> int:
    if training.max_updates is not None:
        return training.max_updates
    per_epoch = -(-samples // (training.batch_size * training.accumulate))
    return max(1, round(training.epochs * per_epoch))


def _schedule(warmup: float) -> Callable[[int, int], float]:
    """Up in a straight line, and down to 0 in another."""

    def factor(update: int, total: int) -> float:
        rising = max(1.0, warmup * total)
        return min((update + 1) / rising, (total - update) / max(1.0, total - rising))

    return lambda update, total: min(1.0, factor(update, total))


def spent_before(place: Path) -> float:
    """The seconds that a stopped run has used already."""
    try:
        return float((place / "seconds").read_text())
    except (OSError, ValueError):
        return 0.0
