"""One run of a plan: train by the recipe, test before and after, write the result.

A stopped run resumes exactly. The result of a finished run is read.
"""

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast._torch.rng import preserve_rng
from holdfast.comparison.inputs import measure_options, training_data
from holdfast.comparison.plan import Plan, RunSpec
from holdfast.comparison.processes import count_from_now
from holdfast.comparison.results import RunResult, read_result, result_of
from holdfast.evaluate.measure import Meter
from holdfast.evaluate.report import ForgettingReport
from holdfast.evaluate.suite import Suite
from holdfast.evaluate.watch import Watch, curves_of, watch_training
from holdfast.hosts.job import ProgressCallback, Trained, Training, spent_before, train
from holdfast.hosts.tracking import TrackedRun, Tracking
from holdfast.hosts.watching import Observer
from holdfast.io.storage import Place
from holdfast.recipe import Recipe
from holdfast.run import Run

logger = logging.getLogger(__name__)


class Worker:
    """Does runs of one plan, each in its own folder; the base model is tested only once."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        tracking: Tracking | None = None,
        *,
        group: str | None = None,
    ) -> None:
        self.plan, self.folder = plan, folder
        self.tracking, self.group = tracking or Tracking(), group
        self.data = training_data(plan)
        self.tokenizer = self.data.tokenizer
        self.new: tuple[str, ...] = plan.new  # load() adds the new head
        self._meter: Meter | None = None
        self._samples: dict[tuple[str | None, int], Sequence[Any]] = {}

    def __call__(
        self,
        spec: RunSpec,
        progress: ProgressCallback | None = None,
        results: Place | None = None,
        sharing: Sequence[RunSpec] = (),
        on_shared: Callable[[int, RunResult], None] | None = None,
    ) -> RunResult:
        """Return the result in ``results`` (by default the folder); without one, train and test.

        ``sharing`` are other runs with the same training. They are merged and tested as well, and
        their results are written. A run that fails in this has no result, and can be done alone.
        ``on_shared`` is called with the number of each such run and its result.
        """
        place = results or Place.at(self.folder)
        if (found := read_result(_file(place, spec), spec)) is not None:
            return found
        folder = self.folder / spec.id
        watch = _Stopwatch(spent_before(folder))
        folder.mkdir(parents=True, exist_ok=True)
        reset_peak_memory()
        count_from_now()
        together = tuple(one.label for one in (*sharing, spec)) if sharing else ()
        try:
            with self.tracked(spec, f"{spec.label}, seed {spec.seed}") as tracked:

                def merge(run: Run, history: list[dict[str, float]]) -> None:
                    spent = watch() - tracked.seconds
                    with watch.paused():
                        for number, other in enumerate(sharing):
                            shared = self._share(run, history, other, place, spent, together)
                            if shared is not None and on_shared:
                                on_shared(number, shared)
                    run.finish()

                model, recipe, history = self.train(
                    spec, folder, progress, on_trained=merge, tracked=tracked
                )
                if progress:
                    progress("testing", 0, 1)
                report = replace(self.measure(spec.id, model, recipe), curves=curves_of(history))
                spent = watch() - tracked.seconds
                result = result_of(spec, recipe, report, self.new, spent, peak_memory(), together)
                tracked.conclude(result.figures)
        except Exception:
            # Another attempt, on a node that Ray believed dead, may have finished and cleaned up.
            if (found := read_result(_file(place, spec), spec)) is not None:
                return found
            raise
        return self._keep(result, spec, place)

    def _share(
        self,
        run: Run,
        history: list[dict[str, float]],
        spec: RunSpec,
        place: Place,
        spent: float,
        together: tuple[str, ...],
    ) -> RunResult | None:
        """Merge and test a copy of a trained model as another run asks, and write its result.

        Return the result; None if the run failed. ``spent`` are the seconds of the training, which
        count for every run that shares it.
        """
        if (found := read_result(_file(place, spec), spec)) is not None:
            return found
        watch, merging = _Stopwatch(spent), Recipe.from_dict(spec.settings).merging
        devices = {p.device for p in run.model.parameters() if p.device.type == "cuda"}
        try:
            with (
                preserve_rng([*devices]),
                self.tracked(spec, f"{spec.label}, seed {spec.seed}") as tracked,
            ):
                recipe = replace(run.full_recipe, merging=merging)
                tracked.follow(recipe.to_dict(), history)
                report = self.measure(spec.id, run.finished_copy(merging), recipe)
                report = replace(report, curves=curves_of(history))
                spent = watch() - tracked.seconds
                result = result_of(spec, recipe, report, self.new, spent, peak_memory(), together)
                tracked.conclude(result.figures)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning(f"{spec.label} cannot share the training of another run ({reason})")
            return None
        return self._keep(result, spec, place)

    def _keep(self, result: RunResult, spec: RunSpec, place: Place) -> RunResult:
        """Write a result, unless another attempt was faster, and remove what a stopped run needs.

        Return the result that is kept.
        """
        file, folder = _file(place, spec), self.folder / spec.id
        if (found := read_result(file, spec)) is None:
            found = result
            file.write_text(found.to_json())
        for left in ("run.pt", "history.jsonl", "seconds"):
            (folder / left).unlink(missing_ok=True)
        for cut in folder.glob(".*.tmp"):  # left by a kill during a write
            cut.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty if the result is in it, or never made
            folder.rmdir()
        return found

    def train(
        self,
        spec: RunSpec,
        folder: Path,
        progress: ProgressCallback | None = None,
        watch: Callable[[nn.Module, int], Observer] | None = None,
        on_update: Callable[[Run, int, int], None] | None = None,
        on_trained: Callable[[Run, list[dict[str, float]]], None] | None = None,
        tracked: TrackedRun | None = None,
    ) -> Trained:
        model = self.load()
        length, old = spec.training.max_length, self.plan.old_data
        samples = self.samples(model, length)
        recipe = Recipe.from_dict(spec.settings)
        recipe.check_head(self.new)
        return train(
            model, recipe, samples, spec.training, folder,
            old_data=None if old is None else self.samples(model, length, old), new=self.new,
            tokenizer=self.tokenizer, seed=spec.seed, progress=progress,
            watch=watch or self._watching(spec.training), on_update=on_update,
            on_trained=on_trained, tracked=tracked,
        )  # fmt: skip

    def _watching(self, training: Training) -> Callable[[nn.Module, int], Watch]:
        loader = replace(self.data.loader, max_length=training.max_length, tokenizer=self.tokenizer)
        return partial(
            watch_training, training=training, loader=loader, validation=self.data.validation,
            new=self.new,
        )  # fmt: skip

    def tracked(self, spec: RunSpec, name: str) -> TrackedRun:
        """The run in the trackers, whose files are beside the folder of the runs."""
        plan, digest = self.plan, spec.id.rpartition("-")[2]
        about = {"model": plan.model, "data": plan.data, "recipe": spec.recipe, "seed": spec.seed}
        return self.tracking.run(
            self.folder.parent / "tracking", name, key=digest, group=self.group,
            settings={**about, **vars(spec.training)},
        )  # fmt: skip

    def load(self) -> nn.Module:
        model, self.new = self.data.load()
        return model

    def samples(self, model: nn.Module, max_length: int, other: str | None = None) -> Sequence[Any]:
        """The training samples, or those of other data, which are encoded once."""
        key = (other, max_length)
        if key not in self._samples:
            self._samples[key] = self.data.samples(model, max_length, other)
        return self._samples[key]

    @property
    def has_tested_base(self) -> bool:
        """Whether the base has taken the tests, which it takes before the first model."""
        return self._meter is not None

    def measure(self, name: str, model: Any, recipe: Recipe) -> ForgettingReport:
        quantized = self.data.loader.bits is not None
        if not quantized:
            model = model.float()  # as the base is tested
            if hasattr(model, "merge_and_unload"):
                model = model.merge_and_unload()
        if self._meter is None:
            base: str | nn.Module = self.plan.model
            tests = measure_options(self.plan)
            if self.data.head is not None:  # it is in no file, and its predictions are random
                base, tests["kl_samples"] = self.load(), 0
            length = self.plan.measuring.max_length
            loader = replace(
                self.data.loader, dtype=torch.float32, max_length=length, tokenizer=self.tokenizer
            )
            # A quantized base is tested as it was trained, but its packed weights say nothing.
            drift = not quantized or base == self.plan.model
            self._meter = Meter(base, Suite(**tests), drift=drift, loader=loader, progress=False)
        try:
            return self._meter(name, model, recipe)
        except BaseException:
            self._meter = None  # the base may have taken only some of the tests
            raise


class _Stopwatch:
    """Counts seconds after those that were spent before."""

    def __init__(self, before: float) -> None:
        self.begin = time.monotonic() - before

    def __call__(self) -> float:
        return time.monotonic() - self.begin

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.begin += time.monotonic() - start


def _file(place: Place, spec: RunSpec) -> Place:
    return place / spec.id / "result.json"


def reset_peak_memory() -> None:
    """Reset the peak that :func:`peak_memory` returns (without a GPU, only on Linux).

    What earlier runs left in cycles of references is freed: it would count as memory of this one.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The peak memory in bytes, of the GPU if there is one, else of this process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
