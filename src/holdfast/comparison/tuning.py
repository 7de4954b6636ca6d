"""Find the settings of a recipe by a search with two objectives: target and retained tests.

Settings are chosen on one half of the tests (every other row, the first half of a text) and
reported on the other half. The points that no other point beats are the frontier. The recipe found
is the point that the report of a comparison would recommend.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast._torch.checks import whole_number
from holdfast.comparison.plan import Plan
from holdfast.comparison.processes import call_in_processes, refuse_in_import
from holdfast.comparison.results import Results, RunResult
from holdfast.comparison.search import (
    Search,
    Tuning,
    counted,
    goals_in,
    open_study,
    place_of,
    revive,
    swept_setting,
)  # fmt: skip
from holdfast.io import codec as _codec
from holdfast.io.files import locked
from holdfast.recipe import Recipe, read_recipe
from holdfast.report.words import level, percent, plain

Values = dict[str, int | float | str | bool | None]


@dataclass(frozen=True)
class Point:
    """One model of the search: a trained model, merged with one α.

    Attributes:
        trial: number of the training run.
        values: the searched settings, by dotted name.
        chosen, reported: results on the half that settings are chosen on, and on the other half.
    """

    trial: int
    values: Values
    chosen: RunResult
    reported: RunResult

    def beats(self, other: Point, half: str = "chosen") -> bool:
        """Whether it is better in one objective and at least as good in the other."""
        mine, theirs = goals_in(getattr(self, half)), goals_in(getattr(other, half))
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True)
class Tuned:
    """The outcome of a search.

    Attributes:
        recipe: name of the recipe that was searched.
        settings: the recipe found, as :meth:`Recipe.to_dict` writes it.
        taken: the point of the recipe found.
        default: the point of the default settings, or None.
        unmerged: the same training run at α = 1, or None.
        frontier: the points that no other point beats on the half that settings are chosen on.
        points: number of all points.
        trained, pruned, failed: number of trials by outcome.
    """

    recipe: str
    settings: dict[str, Any]
    taken: Point
    default: Point | None
    unmerged: Point | None
    frontier: tuple[Point, ...]
    points: int
    trained: int
    pruned: int
    failed: int

    def to_json(self) -> str:
        """Return the outcome as JSON."""
        return _codec.to_json(self)

    def to_yaml(self) -> str:
        """Return the recipe found as YAML, for ``finetune --recipe`` and ``compare``."""
        return Recipe.from_dict(self.settings).to_yaml()

    def results(self, plan: Plan) -> Results:
        """The frontier and the defaults, on the half of the tests that nothing was chosen on."""
        points = [self.default, *self.frontier] if self.default else [*self.frontier]
        runs = {point.reported.label: point.reported for point in (*points, self.taken)}
        return Results(
            runs=tuple(runs.values()), plan=_codec.encode(plan), taken=self.taken.reported.label
        )

    def sentences(self) -> list[str]:
        """Summarize the search; figures are of the half of the tests that nothing was chosen on."""
        counts = {"trained": self.trained, "pruned": self.pruned, "failed": self.failed}
        trials = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        settings = ", ".join(f"{name} = {value:.3g}" for name, value in self.taken.values.items())
        said = [
            f"Trials: {trials}; {self.points} models tested, {len(self.frontier)} of them on the "
            "frontier.",
            f"Found ({self.taken.chosen.label}): {settings}.",
        ]
        if not self.taken.chosen.target.gain > 0:
            said.insert(1, "No model is better on the target than the pretrained one: keep that.")
        if self.default is None:
            return [*said, "The trial with the default settings did not complete."]
        mine, theirs = self.taken.reported, self.default.reported
        metric = mine.target.metric
        lost = f", and lost {percent(mine.loss)} ({percent(theirs.loss)})" if mine.retained else ""
        beats = "beats" if self.taken.beats(self.default, "reported") else "does not beat"
        better = f"{self._better_than(self.default)} beat them"
        if self.unmerged:
            count = self._better_than(self.unmerged)
            better += f", and {count} the defaults without merging (α = 1)"
        return [
            *said,
            "On the half of the tests that nothing was chosen on, the recipe found has "
            f"{level(metric, mine.target.after)} {plain(metric)} (the defaults: "
            f"{level(metric, theirs.target.after)}){lost}: it {beats} the defaults in both.",
            f"Of {len(self.frontier)} on the frontier {better}.",
        ]

    def _better_than(self, point: Point) -> int:
        """How many points of the frontier beat a point on the half to report."""
        return sum(other.beats(point, "reported") for other in self.frontier)


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
    """Search until the study has all its trials; a stopped search continues.

    In a script, put the call under ``if __name__ == "__main__":``: worker processes import it.

    Args:
        plan: the model, the data and the tests; its recipes, seeds and grid are not used.
        tuning: what to search.
        out: folder for the study and for unfinished training runs.
        storage: where Optuna keeps the study: the path of a journal file, which machines may share
            (``out/study.log`` by default), or the URL of a database.
        name: name of the study, the same on all machines.
        jobs: number of training runs at a time on this machine.
        on_trials: called once per second with the trials so far.
    """
    refuse_in_import("tune")
    whole_number("jobs", jobs, 1)
    asked = plan.measuring
    if asked.tasks and not (asked.text or asked.data or asked.similarity):
        raise ValueError(
            "the search chooses settings on one half of the tests, but tasks of the harness cannot "
            "be halved: add text or data"
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
    study: Any,
    jobs: int,
    given: tuple[Plan, Tuning, Path, str, str],
    on_trials: Callable[[list[Any]], None] | None,
) -> None:
    """Run one search per process; replace a process that dies."""
    place, last, deaths = place_of(given[2]), 0.0, 0

    def on_wait() -> None:
        nonlocal last
        if on_trials and time.monotonic() - last > 1:
            on_trials(counted(study))
            last = time.monotonic()

    calls = deque((number, *given) for number in range(jobs))
    ended = call_in_processes(_search, calls, caller="tune", jobs=jobs, on_wait=on_wait)
    with contextlib.closing(ended):
        for search in ended:
            if search.error:
                raise RuntimeError(search.error)
            if search.value is not None:
                raise search.value
            if search.died:
                deaths += 1
                revive(study, place, worker=search.call[0])
                if deaths > 2 * jobs + len(counted(study)):
                    raise ValueError("worker processes die repeatedly: is there enough memory?")
                calls.append(search.call)
    if on_trials:
        on_trials(counted(study))


def _search(number: int, *given: Any) -> Exception | None:
    """In a worker process: search. Return an error of the plan; trials keep their own errors."""
    plan, tuning, folder, storage, name = given
    try:
        Search(plan, tuning, folder, storage, name, number).run()
    except (ValueError, OSError, ImportError) as error:
        return error
    return None


def _check_same(study: Any, plan: Plan, tuning: Tuning) -> None:
    """Refuse a study of another search; only the number of trials may change."""
    plan = replace(plan, training=replace(plan.training, save_seconds=0.0))
    mine = {**_codec.encode(plan), **_codec.encode(replace(tuning, trials=1))}
    theirs = study.user_attrs.get("search", mine)
    if other := [name for name in mine if mine[name] != theirs.get(name)]:
        raise ValueError(
            f"the study holds another search, with another {other[0]}: choose another --out or "
            "--name"
        )
    study.set_user_attr("search", mine)


def tuned_of(study: Any, tuning: Tuning, plan: Plan) -> Tuned:
    """Read the outcome from the trials of a study."""
    trials, every = counted(study), study.get_trials(deepcopy=False)
    states = [trial.state.name for trial in trials]
    failed = [trial.user_attrs["error"] for trial in trials if "error" in trial.user_attrs]
    order = {trial.number: 1 + i for i, trial in enumerate(trials)}
    done = {trial.number for trial in trials if trial.state.name == "COMPLETE"}
    points = [
        _point(trial, order[whose], tuning, plan)
        for trial in every
        if trial.state.name == "COMPLETE"
        and (whose := trial.user_attrs.get("of", trial.number)) in done
    ]
    if not points:
        last = failed[-1].strip().rpartition("\n")[2] if failed else "all were pruned"
        raise ValueError(f"no trial completed: {last}")
    frontier = [point for point in points if not any(other.beats(point) for other in points)]
    frontier.sort(key=lambda point: goals_in(point.chosen))
    chosen = Results(runs=tuple(point.chosen for point in points)).recommendation().label
    taken = next((point for point in points if point.chosen.label == chosen), frontier[0])
    default = next((p for p in points if p.chosen.recipe == "defaults"), None)
    alike = [p for p in points if default and p.trial == default.trial and p is not default]
    swept = swept_setting(read_recipe(tuning.recipe)[1])
    return Tuned(
        recipe=tuning.recipe,
        settings=taken.chosen.settings,
        taken=taken,
        default=default,
        unmerged=next((p for p in alike if swept and p.values.get(swept) == 1.0), None),
        frontier=tuple(frontier),
        points=len(points),
        trained=states.count("COMPLETE"),
        pruned=states.count("PRUNED"),
        failed=len(failed),
    )


def _point(trial: Any, number: int, tuning: Tuning, plan: Plan) -> Point:
    """Read a point from a trial of the study; it is named after its training run and its α."""
    attrs, values = trial.user_attrs, dict(trial.params)
    swept = swept_setting(read_recipe(tuning.recipe)[1])
    alpha: Values = {}
    if swept and swept in values:
        alpha[swept.rpartition(".")[2]] = round(values[swept], 3)
    name, called = ("defaults", {}) if attrs.get("default") else (f"trial {number}", alpha)
    spec = plan.spec(tuning.recipe, tuning.seed, values)
    update = {**spec.settings["update"], "lr": spec.training.lr}
    settings = Recipe.from_dict({**spec.settings, "update": update}).to_dict()
    chosen, reported = (
        replace(
            RunResult.from_json(json.dumps(attrs["halves"][half])),
            recipe=name, values=called, settings=settings,
        )
        for half in ("chosen", "reported")
    )  # fmt: skip
    return Point(number, values, chosen, reported)
