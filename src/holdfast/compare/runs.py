"""One run of a plan: train by the recipe, test before and after, write the result.

A run goes on where it was stopped, to the bit, and one that is finished is read.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast._files import write_whole
from holdfast.compare.plan import Plan, RunSpec, Training
from holdfast.compare.results import RunResult, result_of
from holdfast.compare.task import load_rows, samples_of
from holdfast.forgetting.measure import measure_many
from holdfast.forgetting.models import Loader
from holdfast.forgetting.report import ForgettingReport
from holdfast.forgetting.watch import Watch, curves_of
from holdfast.hosts.raw import finetune_loop
from holdfast.recipe import Recipe

__all__ = ["Worker"]

Progress = Callable[[str, int, int], None]


class Worker:
    """Does the runs of one plan, one after the other; the base model is asked only once.

    Args:
        plan: whose runs they are.
        folder: where each run has a folder of its own.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.loader = Loader(max_length=plan.training.max_length)
        self.tokenizer = self.loader.tokenizer_of(plan.model)
        self.rows = load_rows(plan.data)
        self._next: tuple[str, nn.Module] | None = None
        self._reports: Any = None

    def __call__(self, spec: RunSpec, progress: Progress | None = None) -> RunResult:
        """The result of a run: read if it is there, else worked out and written."""
        place = self.folder / spec.id
        file = place / "result.json"
        if file.exists():
            return RunResult.from_json(file.read_text(encoding="utf-8"))
        place.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        model, history = self._train(spec, place, progress)
        report = replace(self._measure(spec.id, model), curves=curves_of(history))
        spent = _spent_before(place) + time.monotonic() - begin
        result = result_of(spec, report, spent, _peak_memory())
        write_whole(file, lambda path: path.write_text(result.to_json(), encoding="utf-8"))
        for left in ("run.pt", "history.jsonl", "seconds"):  # what only a stopped run needs
            (place / left).unlink(missing_ok=True)
        return result

    def _train(
        self, spec: RunSpec, place: Path, progress: Progress | None
    ) -> tuple[nn.Module, list[dict[str, float]]]:
        training, recipe = spec.training, Recipe.from_dict(spec.method)
        torch.manual_seed(spec.seed)
        model = self.loader.load(self.plan.model).to(torch.float32)
        loader = replace(self.loader, max_length=training.max_length)
        loaded = loader.ready(model, self.tokenizer)
        samples = samples_of(loaded, self.rows, self.plan.data)
        total = _updates(training, len(samples))
        log = _Log(place, total, progress)
        on_gpu = loaded.device.type == "cuda"
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
            new=self.plan.new,
            seed=spec.seed,
            checkpoint=place / "run.pt",
            save_every=max(1, total // 10),
            log=log,
            log_every=max(1, total // 20),
            watch=Watch(model, every=max(1, total // 20)),
            progress=False,
        )
        return trained, log.rows()

    def _measure(self, name: str, model: nn.Module) -> ForgettingReport:
        """Beside the base, which an open generator remembers."""
        adapted: Any = model
        if hasattr(adapted, "merge_and_unload"):
            model = adapted.merge_and_unload()
        if self._reports is None:
            asked = self.plan.measuring
            self._reports = measure_many(
                self.plan.model,
                self._feed(),
                text=asked.text,
                data=asked.data,
                target={Path(self.plan.target).name.split(".")[0]: self.plan.target},
                tasks=asked.tasks,
                include_path=asked.include_path,
                limit=asked.limit,
                context_free=asked.context_free,
                max_length=asked.max_length,
                tokenizer=self.tokenizer,
                dtype=torch.float32,
                progress=False,
            )
        self._next = (name, model)
        try:
            return next(self._reports)  # type: ignore[no-any-return]
        except BaseException:
            self._reports = None  # a generator that has failed gives no more
            raise
        finally:
            self._next = None

    def _feed(self) -> Iterator[tuple[str, nn.Module]]:
        while self._next is not None:
            yield self._next


class _Log:
    """The figures of a run over its updates, in a file: a run that goes on has them all."""

    def __init__(self, place: Path, total: int, progress: Progress | None) -> None:
        self.file, self.total, self.progress = place / "history.jsonl", total, progress
        self.clock, self.begin = place / "seconds", time.monotonic()
        self.before = _spent_before(place)

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


def _spent_before(place: Path) -> float:
    try:
        return float((place / "seconds").read_text())
    except (OSError, ValueError):
        return 0.0


def _peak_memory() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
