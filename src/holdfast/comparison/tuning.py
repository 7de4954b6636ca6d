"""Find a recipe's settings: a search with two goals, and what came of it on data it has not seen.

Settings are chosen on one half of the tests (every other row, the first half of a text) and
reported on the other. The points that no other beats in both goals are the frontier; of them the
recipe to take is the one that :mod:`~holdfast.report.comparison_recommend` would.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from holdfast._torch.checks import whole
from holdfast.comparison.plan import Plan
from holdfast.comparison.result import RunResult
from holdfast.comparison.results import Results
from holdfast.comparison.scheduler import no_interrupts, refuse_in_import, take_share, unguarded
from holdfast.comparison.search import Search, Tuning, goals_in
from holdfast.comparison.space import ALPHA
from holdfast.comparison.study import counted, open_study, place_of, revive
from holdfast.io import codec as _codec
from holdfast.io.files import locked
from holdfast.recipe import Recipe
from holdfast.report.comparison_words import share
from holdfast.report.words import level, plain

__all__ = ["Point", "Tuned", "tune"]

Values = dict[str, int | float | str | bool | None]


@dataclass(frozen=True)
class Point:
    """One model of the search: a trained one, at one α.

    Attributes:
        trial: the training that it comes from.
        values: its settings, by dotted name.
        chosen, reported: its results on the half that settings are chosen on, and on the other.
    """

    trial: int
    values: Values
    chosen: RunResult
    reported: RunResult

    def beats(self, other: Point, half: str = "chosen") -> bool:
        """Whether it is better in both goals, or in one and as good in the other."""
        mine, theirs = goals_in(getattr(self, half)), goals_in(getattr(other, half))
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    Attributes:
        recipe: the name of what was searched.
        method: the recipe to take, as :meth:`Recipe.to_dict` writes it.
        taken: its point.
        default, unmerged: those of the defaults, and of the same training at α = 1; None if there
            is none.
        frontier: the points that none beats on the half that settings are chosen on.
        points: how many there are, the frontier among them.
        trained, given_up, failed: trials by what became of them.
    """

    recipe: str
    method: dict[str, Any]
    taken: Point
    default: Point | None
    unmerged: Point | None
    frontier: tuple[Point, ...]
    points: int
    trained: int
    given_up: int
    failed: int

    def to_json(self) -> str:
        """As text."""
        return json.dumps(_codec.encode(self), indent=1, ensure_ascii=False, allow_nan=False)

    def to_yaml(self) -> str:
        """The recipe, for ``finetune --recipe`` and ``compare``."""
        return Recipe.from_dict(self.method).to_yaml()

    def results(self, plan: Plan) -> Results:
        """The frontier and the defaults on the half that nothing was chosen on."""
        points = [self.default, *self.frontier] if self.default else [*self.frontier]
        runs = {point.reported.label: point.reported for point in (*points, self.taken)}
        return Results(
            runs=tuple(runs.values()), plan=_codec.encode(plan), taken=self.taken.reported.label
        )

    def sentences(self) -> list[str]:
        """What it came to, on the half that nothing was chosen on."""
        ended = [f"{self.trained} trained"]
        ended += [f"{self.given_up} given up midway"] if self.given_up else []
        ended += [f"{self.failed} failed"] if self.failed else []
        said = [
            f"Trials: {', '.join(ended)}; {self.points} models tested, {len(self.frontier)} of "
            "them on the frontier."
        ]
        settings = ", ".join(f"{name} = {value:.3g}" for name, value in self.taken.values.items())
        if not self.taken.chosen.target.gain > 0:
            said += ["No model is better on the target than the pretrained one: keep that."]
        said += [f"Found ({self.taken.chosen.label}): {settings}."]
        if self.default is None:
            return [*said, "The defaults did not come to an end."]
        mine, theirs = self.taken.reported, self.default.reported
        metric = mine.target.metric
        lost = f", and lost {share(mine.loss)} ({share(theirs.loss)})" if mine.retained else ""
        beats = self.taken.beats(self.default, "reported")
        better = sum(point.beats(self.default, "reported") for point in self.frontier)
        return [
            *said,
            "On the half of the tests that nothing was chosen on, the recipe found has "
            f"{level(metric, mine.target.after)} {plain(metric)} (the defaults: "
            f"{level(metric, theirs.target.after)}){lost}: it "
            + ("beats the defaults in both." if beats else "does not beat the defaults in both."),
            f"Of {len(self.frontier)} on the frontier {better} beat them{self._unmerged()}.",
        ]

    def _unmerged(self) -> str:
        """How many beat the defaults without merging."""
        if (plain_ones := self.unmerged) is None:
            return ""
        better = sum(point.beats(plain_ones, "reported") for point in self.frontier)
        return f", and {better} the defaults without merging (α = 1)"


def tune(
    plan: Plan,
    tuning: Tuning,
    out: Path,
    *,
    storage: str | None = None,
    name: str = "holdfast",
    jobs: int = 1,
    on_trials: Callable[[list[Any]], None] | None = None,
) -> Tuned:
    """Search until the study has its trials; one that was stopped goes on.

    In a script the call stands under ``if __name__ == "__main__":``, since the processes import it.

    Args:
        plan: the model, the data and the tests; its recipes, seeds and grid are not used.
        tuning: what to search.
        out: where a training is kept while it is under way, and the study.
        storage: of the study: the path of a journal file (``out/study.log``; machines may share
            it), or the URL of a database that Optuna knows.
        name: of the study: the same on all machines.
        jobs: trainings at a time on this machine.
        on_trials: told every second of the trials so far.
    """
    refuse_in_import("tune")
    whole("jobs", jobs, 1)
    asked = plan.measuring
    if asked.tasks and not (asked.text or asked.data or asked.similarity):
        raise ValueError(
            "tasks of the harness cannot be halved, and settings are chosen on one half: give a "
            "text or data as well"
        )
    kept, folder = storage or str(out / "study.log"), out / "trials"
    with locked(out):
        study = open_study(kept, name)
        _check_same(study, plan, tuning)
        revive(study, place_of(folder))
        if len(counted(study)) < tuning.trials:
            _search_in_processes(study, jobs, (plan, tuning, folder, kept, name), on_trials)
        return tuned_of(study, tuning, plan)


def _search_in_processes(
    study: Any, jobs: int, given: Any, on_trials: Callable[[list[Any]], None] | None
) -> None:
    """Each does one trial after the other; where one dies, another takes its place."""
    context = get_context("spawn")
    errors: Any = context.SimpleQueue()
    place = place_of(given[2])

    def start(number: int) -> Any:
        process = context.Process(target=_search, args=(errors, number, jobs, *given))
        with no_interrupts():
            process.start()
        return process

    trials_before = len(counted(study))
    at_work = {number: start(number) for number in range(jobs)}
    deaths = 0
    try:
        while at_work:
            wait([process.sentinel for process in at_work.values()], timeout=1.0)
            if on_trials:
                on_trials(counted(study))
            for number, process in list(at_work.items()):
                if process.is_alive():
                    continue
                process.join()
                del at_work[number]
                if not errors.empty():
                    raise errors.get()
                if process.exitcode == 1 and len(counted(study)) == trials_before:
                    raise unguarded("tune")  # an exception of the search would be among the errors
                if process.exitcode:
                    deaths += 1
                    revive(study, place, number)
                    if deaths > 2 * jobs + len(counted(study)):
                        raise ValueError("processes die again and again: is there enough memory?")
                    at_work[number] = start(number)
    finally:
        for process in at_work.values():
            process.kill()
            process.join()


def _search(
    errors: Any, number: int, jobs: int, plan: Plan, tuning: Tuning, folder: Path, storage: str,
    name: str,
) -> None:  # fmt: skip
    """In a process of its own."""
    try:
        take_share(number, jobs)
        Search(plan, tuning, folder, storage, name, number).run()
    except Exception as error:  # of the plan itself: trials keep theirs
        known = isinstance(error, ValueError | OSError | ImportError)
        errors.put(error if known else RuntimeError("".join(traceback.format_exception(error))))


def _check_same(study: Any, plan: Plan, tuning: Tuning) -> None:
    """A study holds one search: the number of trials may change, nothing else."""
    training = replace(plan.training, save_seconds=0.0)
    plan = replace(plan, training=training)
    mine = {**_codec.encode(plan), **_codec.encode(replace(tuning, trials=1))}
    theirs = study.user_attrs.get("search", mine)
    if other := [name for name in mine if mine[name] != theirs.get(name)]:
        raise ValueError(
            f"the study holds another search, with another {other[0]}: give another --out, or "
            "another --name"
        )
    study.set_user_attr("search", mine)


def tuned_of(study: Any, tuning: Tuning, plan: Plan) -> Tuned:
    """What the trials of a study came to."""
    trials, every = counted(study), study.get_trials(deepcopy=False)
    states = [trial.state.name for trial in trials]
    failed = [trial.user_attrs["error"] for trial in trials if "error" in trial.user_attrs]
    order = {trial.number: 1 + i for i, trial in enumerate(trials)}
    done = {trial.number for trial in trials if trial.state.name == "COMPLETE"}
    points = [
        _point(trial, order[whose])
        for trial in every
        if trial.state.name == "COMPLETE"
        and (whose := trial.user_attrs.get("of", trial.number)) in done
    ]
    if not points:
        last = failed[-1].strip().rpartition("\n")[2] if failed else "all were given up"
        raise ValueError(f"no trial came to an end: {last}")
    frontier = [point for point in points if not any(other.beats(point) for other in points)]
    chosen = Results(runs=tuple(point.chosen for point in points)).recommendation().label
    frontier.sort(key=lambda point: goals_in(point.chosen))
    taken = next((point for point in points if point.chosen.label == chosen), frontier[0])
    default = next((p for p in points if p.chosen.recipe == "defaults"), None)
    alike = [p for p in points if default and p.trial == default.trial and p is not default]
    return Tuned(
        recipe=tuning.recipe,
        method=_method(tuning, plan, taken),
        taken=taken,
        default=default,
        unmerged=next((p for p in alike if p.values.get(ALPHA) == 1.0), None),
        frontier=tuple(frontier),
        points=len(points),
        trained=states.count("COMPLETE"),
        given_up=states.count("PRUNED"),
        failed=len(failed),
    )


def _point(trial: Any, number: int) -> Point:
    """A trial of the study, called by the training it comes from and its α."""
    attrs, values = trial.user_attrs, dict(trial.params)
    alpha: Values = {"alpha": round(values[ALPHA], 3)} if ALPHA in values else {}
    name, called = ("defaults", {}) if attrs.get("default") else (f"trial {number}", alpha)
    chosen, reported = (
        replace(RunResult.from_json(json.dumps(attrs["halves"][half])), recipe=name, values=called)
        for half in ("chosen", "reported")
    )
    return Point(number, values, chosen, reported)


def _method(tuning: Tuning, plan: Plan, point: Point) -> dict[str, Any]:
    """A recipe with the settings of a point, its learning rate too."""
    spec = plan.spec(tuning.recipe, tuning.seed, point.values)
    method = dict(spec.method)
    method["update"] = {**method["update"], "lr": spec.training.lr}
    return Recipe.from_dict(method).to_dict()
