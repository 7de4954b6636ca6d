"""A trial at the rungs of successive halving: it is tested there, and goes on, waits or ends."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from holdfast._torch.borrow import borrowed
from holdfast._torch.finite import is_finite
from holdfast._torch.rng import preserve_rng
from holdfast.comparison import halving
from holdfast.comparison.goals import goals_in, merit_in
from holdfast.comparison.plan import Plan
from holdfast.comparison.results import RunResult
from holdfast.comparison.study import rung_attribute
from holdfast.io import codec as _codec
from holdfast.run import Run

#: The results on the half of the tests that settings are chosen on, and on the other half.
Halves = tuple[RunResult, RunResult]
#: The most samples per test at a rung.
SAMPLES = 32
#: The attribute of a trial with its results at the first rung.
FIRST = rung_attribute(0)


class Pruned(Exception):  # noqa: N818 (not an error)
    """Ends a training run that is worse than the others, or has diverged."""


class OutOfTime(Exception):  # noqa: N818 (not an error)
    """Ends a training run that would not reach its next rung in time; the next session goes on."""


class Paused(Exception):  # noqa: N818 (not an error)
    """Ends a training run at its first rung, until every recipe has reached it."""


def plan_at_rung(plan: Plan) -> Plan:
    """The plan with the tests at a rung: fewer samples, and texts of the base only if need be."""
    asked = plan.measuring
    few = min(asked.limit or SAMPLES, SAMPLES)
    free = 0 if asked.text or asked.data or asked.similarity else asked.context_free
    return replace(plan, measuring=replace(asked, limit=few, context_free=free, tasks=()))


class Rungs:
    """What a trial does at its rungs: test, keep the results, and let the pruner judge.

    Args:
        trial: the trial, which began at ``begin``.
        end: the time at which the training must end; None without a limit.
        judge: called with the number of a rung and the merit there; raises if the trial stops.
        last_tests: the seconds of the tests at the end, given those at a rung.
        on_progress: called with what is being done, how much of it is done, and how much it is.
    """

    def __init__(
        self,
        trial: Any,
        begin: float,
        end: float | None,
        *,
        judge: Callable[[int, float], None],
        last_tests: Callable[[float], float],
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        self.trial, self.begin, self.end = trial, begin, end
        self.judge, self.last_tests, self.on_progress = judge, last_tests, on_progress
        self.first: tuple[int, float] | None = None  # an update of this session, and when it was
        self.tests = 0.0  # seconds of all tests so far
        self.next = ""  # the share of the updates at the next rung

    def progress(self, doing: str, done: int, total: int) -> None:
        to = f" to {self.next}" if self.next and doing == "training" else ""
        self.on_progress(doing + to, done, total)

    def after(self, run: Run, update: int, total: int, *, test: Callable[..., Any]) -> None:
        """Called after every update of the training."""
        rungs = halving.rungs_of(total)
        later = [u for u in rungs if u >= update]
        self.next = str(halving.RUNGS[rungs[later[0]] if later else -1])
        self.first = self.first or (update, time.monotonic())
        rung = rungs.get(update)
        if rung is None or rung_attribute(rung) in self.trial.user_attrs:
            return
        start = time.monotonic()
        halves = _tested_apart(run, test)
        took = time.monotonic() - start
        self.tests += took
        if not is_finite(*goals_in(halves[0])):
            raise Pruned
        merit = merit_in(halves[0])
        chosen, reported = _codec.encode(halves)
        kept = {"merit": merit, "seconds": time.monotonic() - self.begin}
        both = {"halves": {"chosen": chosen, "reported": reported}}
        self.trial.set_user_attr(rung_attribute(rung), {**kept, **both})
        self.judge(rung, merit)
        after = next((u for u in rungs if u > update), total)
        if not self.has_time(after - update, update, took, is_last=after == total):
            raise OutOfTime

    def has_time(self, updates: int, update: int, took: float, *, is_last: bool) -> bool:
        """Whether so many updates, and the tests after them, end in time at the present speed."""
        if self.end is None:
            return True
        first, since = self.first or (update, time.monotonic())
        each = (time.monotonic() - since - self.tests) / max(1, update - first)
        tests = self.last_tests(took) if is_last else took
        return time.time() + each * updates + tests < self.end


def _tested_apart(run: Run, test: Callable[..., Any]) -> Halves:
    """Test a model in the middle of its training, which goes on as if it had not been tested."""
    devices = {p.device for p in run.model.parameters() if p.device.type == "cuda"}
    with borrowed(run.model), preserve_rng([*devices]):
        found: dict[float | None, Halves] = test(run)
    return next(iter(found.values()))
