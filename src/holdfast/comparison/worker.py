"""One run of a plan: train by the recipe, test before and after, write the result.

A run goes on where it was stopped, to the bit, and one that is finished is read.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.comparison.halves import inputs_of
from holdfast.comparison.plan import Plan, RunSpec
from holdfast.comparison.results import RunResult, read_result, result_of
from holdfast.evaluate.measure import measure_many
from holdfast.evaluate.report import ForgettingReport
from holdfast.evaluate.watch import Watch, curves_of, watch_distance
from holdfast.hosts.job import Progress, spent_before, train
from holdfast.io.models import Loader
from holdfast.io.storage import Place
from holdfast.io.training_data import TrainingData
from holdfast.recipe import Recipe
from holdfast.run import Run

__all__ = ["Worker"]


class Worker:
    """Does the runs of one plan, one after the other; the base model is asked only once.

    Args:
        plan: whose runs they are.
        folder: where each run has a folder of its own.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        loader = Loader(max_length=plan.training.max_length)
        self.task = TrainingData.open(plan.model, plan.data, loader, head=plan.head, new=plan.new)
        self.tokenizer = self.task.tokenizer
        self.new: tuple[str, ...] = plan.new  # with the head, once it is there
        self._next: tuple[str, nn.Module] | None = None
        self._reports: Any = None
        self._samples: dict[int, Sequence[Any]] = {}

    def __call__(
        self, spec: RunSpec, progress: Progress | None = None, results: Place | None = None
    ) -> RunResult:
        """The result of a run: read if it is there, else worked out and written.

        Args:
            spec: the run.
            progress: told how far it is.
            results: where results go, by run; as a rule, to the folder of the run.
        """
        file = (results or Place.at(self.folder)) / spec.id / "result.json"
        if (found := read_result(file)) is not None:
            return found
        place = self.folder / spec.id
        begin = time.monotonic() - spent_before(place)
        place.mkdir(parents=True, exist_ok=True)
        reset_peak_memory()
        try:
            model, history = self.train(spec, place, progress)
            if progress:
                progress("testing", 0, 1)
            report = replace(self.measure(spec.id, model), curves=curves_of(history))
        except Exception:
            # Another attempt, of a node that was thought dead, may have finished and tidied up.
            if (found := read_result(file)) is not None:
                return found
            raise
        if (found := read_result(file)) is None:
            found = result_of(spec, report, time.monotonic() - begin, peak_memory())
            file.write_text(found.to_json())
        for left in ("run.pt", "history.jsonl", "seconds"):  # what only a stopped run needs
            (place / left).unlink(missing_ok=True)
        for cut in place.glob(".*.tmp"):  # where a kill hit a write
            cut.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the result lies in it, or elsewhere
            place.rmdir()
        return found

    def train(
        self,
        spec: RunSpec,
        place: Path,
        progress: Progress | None = None,
        watch: Callable[[nn.Module, int], Watch] = watch_distance,
        on_trained: Callable[[Run, list[dict[str, float]]], None] | None = None,
    ) -> tuple[nn.Module, list[dict[str, float]]]:
        """The trained model of a run, and what was logged on the way."""
        model = self.load()
        samples = self.samples(model, spec.training.max_length)
        recipe = Recipe.from_dict(spec.settings)
        recipe.check_head(self.new)
        return train(
            model, recipe, samples, spec.training, place, new=self.new, seed=spec.seed,
            progress=progress, watch=watch, on_trained=on_trained,
        )  # fmt: skip

    def load(self) -> nn.Module:
        """The pretrained model; a new head is the same each time."""
        model, self.new = self.task.load()
        return model

    def samples(self, model: nn.Module, max_length: int) -> Sequence[Any]:
        """What it is trained on; read once."""
        if max_length not in self._samples:
            self._samples = {max_length: self.task.samples(model, max_length)}
        return self._samples[max_length]

    def measure(self, name: str, model: nn.Module) -> ForgettingReport:
        """What it cost: beside the base, which an open generator remembers."""
        adapted: Any = model
        if hasattr(adapted, "merge_and_unload"):
            model = adapted.merge_and_unload()
        if self._reports is None:
            asked = self.plan.measuring
            options: dict[str, Any] = {} if self.task.head is None else {"kl_samples": 0}
            self._reports = measure_many(
                # A head that was drawn is in no file, and its predictions are nothing to keep to.
                self.plan.model if self.task.head is None else self.load().to(torch.float32),
                self._feed(),
                **inputs_of(self.plan),
                **options,
                tasks=asked.tasks,
                include_path=asked.include_path,
                limit=asked.limit,
                context_free=asked.context_free,
                loader=Loader(
                    dtype=torch.float32, max_length=asked.max_length, tokenizer=self.tokenizer
                ),
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

    def close(self) -> None:
        """Let go of what the base has said."""
        if self._reports is not None:
            self._reports.close()
            self._reports = None

    def _feed(self) -> Iterator[tuple[str, nn.Module]]:
        while self._next is not None:
            yield self._next


def reset_peak_memory() -> None:
    """From here on, :func:`peak_memory` counts anew (on a CPU: where Linux lets it)."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The most bytes that were in use: of the GPU if there is one, else of this process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
