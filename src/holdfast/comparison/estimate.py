"""What a comparison consists of, and about how long it takes."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from holdfast.comparison.crew import Crew
from holdfast.comparison.inputs import measure_options
from holdfast.comparison.plan import Plan, RunSpec
from holdfast.comparison.processes import share_cores
from holdfast.comparison.sharing import trainings
from holdfast.comparison.worker import Worker
from holdfast.evaluate.amount import Amount, training_seconds
from holdfast.evaluate.measure import Examination
from holdfast.evaluate.suite import Suite
from holdfast.report.words import seconds


def overview(plan: Plan, runs: Sequence[RunSpec], crew: Crew) -> Iterator[str]:
    """Yield lines: how many runs there are and how long they take, and what the tests consist of.

    The time is a lower limit: some recipes do more than plain training.
    """
    groups = trainings(runs)
    jobs = min(crew.at_a_time, len(groups))
    what = f"{len(runs)} run{'s' * (len(runs) != 1)}"
    if len(groups) < len(runs):
        what += f" of {len(groups)} training{'s' * (len(groups) != 1)}"
    what += f", {jobs} at a time"
    trained, tests, at_once = None, None, 1
    if crew.most:  # the worker processes need the GPUs
        yield what
        yield from _repeated(plan, runs)
        return
    device = plan.training.loader(plan.device).target_device()  # raises if it does not exist
    # The runs themselves say what is wrong with the model.
    with (
        contextlib.suppress(ImportError, OSError, RuntimeError, TypeError, ValueError),
        _as_a_worker(crew.at_a_time) as workers,
    ):
        if device.type == "cpu":  # on other devices, runs take turns
            at_once = min(jobs, workers)
        trained, tests = _measured(plan, [group[-1] for group in groups])
    if trained is not None and tests is not None and tests.other is not None:
        each = f"{seconds(trained / len(groups))} per training and {seconds(tests.other)} of tests"
        # Every process tests the base.
        rounds = math.ceil(len(groups) / at_once) / len(groups)
        total = rounds * (trained + len(runs) * tests.other)
        total += math.ceil(jobs / at_once) * (tests.base or 0.0)
        what += f", about {seconds(total)} and what recipes add ({each} per run)"
    yield what
    yield from _repeated(plan, runs)
    yield from str(tests).splitlines() if tests is not None else ()


def _repeated(plan: Plan, runs: Sequence[RunSpec]) -> Iterator[str]:
    """Yield a line if runs that are left share a training with runs that are done."""
    left = {spec.id for spec in runs}
    groups = [{spec.id for spec in group} for group in trainings(plan.runs)]
    if again := sum(bool(group & left and group - left) for group in groups):
        which = "1 training is" if again == 1 else f"{again} trainings are"
        yield (
            f"{which} repeated, from the last checkpoint if there is one: runs that are left share "
            "a training with finished ones, and the trained model was not kept"
        )


@contextlib.contextmanager
def _as_a_worker(jobs: int) -> Iterator[int]:
    """Use as many threads as one of so many workers; yields how many of them the cores can run.

    With more threads, a short run on a busy machine may take a multiple of its time.
    """
    before = torch.get_num_threads()
    try:
        yield share_cores(jobs)
    finally:
        torch.set_num_threads(before)


def _measured(plan: Plan, runs: Sequence[RunSpec]) -> tuple[float | None, Amount]:
    """Return the seconds of all trainings, and the amount of the tests."""
    worker = Worker(plan, Path())
    model: nn.Module = worker.load()
    loaded = worker.data.loader.ready(model, worker.tokenizer)
    exam = Examination(Suite(**measure_options(plan)))
    exam.prepare(loaded, worker.data.head)
    tests, trained, each = exam.amount(loaded), 0.0, {}
    for training in (spec.training for spec in runs):
        samples = worker.samples(model, length := training.max_length)
        if length not in each:
            each[length] = training_seconds(loaded, samples)
        updates, size = training.amount(samples)
        if (one := each[length]) is None:
            return None, tests
        trained += one * updates * size
    return trained, tests
