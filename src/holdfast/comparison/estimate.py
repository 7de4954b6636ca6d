"""What a comparison consists of, and about how long it takes."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from holdfast.comparison.crew import Crew
from holdfast.comparison.inputs import measure_options
from holdfast.comparison.plan import Plan, RunSpec
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
    trained, tests = None, None
    if crew.most:  # the worker processes need the GPUs
        yield what
        return
    plan.training.loader(plan.device).target_device()  # raises if the device does not exist
    # The runs themselves say what is wrong with the model.
    with contextlib.suppress(ImportError, OSError, RuntimeError, TypeError, ValueError):
        trained, tests = _measured(plan, [group[-1] for group in groups])
    if trained is not None and tests is not None and tests.other is not None:
        each = f"{seconds(trained / len(groups))} per training and {seconds(tests.other)} of tests"
        # Runs on a CPU share its cores. Every process tests the base.
        total = trained + len(runs) * tests.other + jobs * (tests.base or 0.0)
        what += f", about {seconds(total)} and what recipes add ({each} per run)"
    yield what
    yield from str(tests).splitlines() if tests is not None else ()


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
