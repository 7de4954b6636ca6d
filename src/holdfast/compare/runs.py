"""One run of a plan: train by the recipe, test before and after, write the result.

A run goes on where it was stopped, to the bit, and one that is finished is read.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast._files import write_whole
from holdfast.compare.plan import Plan, RunSpec
from holdfast.compare.results import RunResult, result_of
from holdfast.compare.task import load_rows, samples_of
from holdfast.compare.train import Progress, spent_before, train
from holdfast.forgetting.measure import measure_many
from holdfast.forgetting.models import Loader
from holdfast.forgetting.report import ForgettingReport
from holdfast.forgetting.watch import curves_of
from holdfast.recipe import Recipe

__all__ = ["Worker"]


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
        model, history = self.train(spec, place, progress)
        report = replace(self.measure(spec.id, model), curves=curves_of(history))
        spent = spent_before(place) + time.monotonic() - begin
        result = result_of(spec, report, spent, _peak_memory())
        write_whole(file, lambda path: path.write_text(result.to_json(), encoding="utf-8"))
        for left in ("run.pt", "history.jsonl", "seconds"):  # what only a stopped run needs
            (place / left).unlink(missing_ok=True)
        return result

    def train(
        self, spec: RunSpec, place: Path, progress: Progress | None = None
    ) -> tuple[nn.Module, list[dict[str, float]]]:
        """The trained model of a run, and what was logged on the way."""
        model = self.loader.load(self.plan.model)
        loader = replace(self.loader, max_length=spec.training.max_length)
        loaded = loader.ready(model, self.tokenizer)
        samples = samples_of(loaded, self.rows, self.plan.data)
        recipe = Recipe.from_dict(spec.method)
        return train(
            model, recipe, samples, spec.training, place, new=self.plan.new, seed=spec.seed,
            progress=progress,
        )  # fmt: skip

    def measure(self, name: str, model: nn.Module) -> ForgettingReport:
        """What it cost: beside the base, which an open generator remembers."""
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


def _peak_memory() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
