"""Find the settings of a recipe by a search with two objectives: target and retained tests.

Settings are chosen on one half of the tests (every other row, the first half of a text) and
reported on the other half. The candidates that no other one beats are the frontier. The recipe
found is the candidate that the report of a comparison would recommend.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from holdfast._torch.checks import named_settings, whole_number
from holdfast.comparison import processes, search
from holdfast.comparison.inputs import paths_of
from holdfast.comparison.plan import Plan
from holdfast.comparison.results import Results, RunResult
from holdfast.comparison.search import Tuning
from holdfast.hosts.tracking import Tracking
from holdfast.io import codec as _codec
from holdfast.io.files import first_line
from holdfast.io.outputs import claim, refuse_link, write_changed
from holdfast.io.storage import Place
from holdfast.recipe import Recipe
from holdfast.report.document import Answer, Document
from holdfast.report.shown import Shown
from holdfast.report.words import percent, plain, score_text


@dataclass(frozen=True)
class Candidate:
    """One model of the search: a trained model, merged with one α.

    Attributes:
        chosen, reported: results on the half that settings are chosen on, and on the other half.
    """

    trial: int
    values: dict[str, float]
    chosen: RunResult
    reported: RunResult

    def beats(self, other: Candidate, half: str = "chosen") -> bool:
        """Whether it is better in one objective and at least as good in the other."""
        mine, theirs = (search.goals_in(getattr(one, half)) for one in (self, other))
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True, repr=False)
class Tuned(Shown):
    """The outcome of a search. It is shown by its frontier and the defaults.

    Attributes:
        recipe: name of the recipe that was searched.
        settings, taken: the recipe found, as :meth:`Recipe.to_dict` writes it, and its candidate.
        default: the default settings, or None.
        unmerged: the training run with the default settings at α = 1, or None.
        frontier: those that no other candidate beats on the half that settings are chosen on.
        candidates, trained, pruned, failed: number of models tested, and of trials by outcome.
    """

    recipe: str
    settings: dict[str, Any]
    taken: Candidate
    default: Candidate | None
    unmerged: Candidate | None
    frontier: tuple[Candidate, ...]
    candidates: int
    trained: int
    pruned: int
    failed: int
    schema_version: int = 1
    what: ClassVar[str] = "search"

    def to_yaml(self) -> str:
        """Return the recipe found as YAML, for ``finetune --recipe`` and ``compare``."""
        return Recipe.from_dict(self.settings).to_yaml()

    def rows(self) -> list[dict[str, Any]]:
        """One row per model of the frontier, or of the defaults, and test."""
        return self.results().rows()

    def document(self) -> Document:
        headline, *others = self.sentences()
        answer = Answer(headline, tuple(others))
        shown = self.results().document()
        return replace(shown, kind="search", answer=answer, names=(self.recipe,))

    def results(self, plan: Plan | None = None) -> Results:
        """The frontier and the defaults, on the half that was not used for the choice."""
        shown = [one.reported for one in (self.default, *self.frontier, self.taken) if one]
        runs = {run.label: run for run in shown}
        return Results(
            runs=tuple(runs.values()),
            plan=_codec.encode(plan) if plan else {},
            taken=self.taken.reported.label,
        )

    def sentences(self) -> list[str]:
        """Summarize the search; figures are of the half that was not used for the choice."""
        counts = {"trained": self.trained, "pruned": self.pruned, "failed": self.failed}
        trials = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        settings = ", ".join(f"{name} = {value:.3g}" for name, value in self.taken.values.items())
        said = [
            f"Found ({self.taken.chosen.label}): {settings}.",
            f"Trials: {trials}; {self.candidates} models tested, {len(self.frontier)} of them on "
            "the frontier.",
        ]
        if not self.taken.chosen.target.gain > 0:
            said.insert(0, "No model is better on the target than the pretrained one: keep that.")
        if self.default is None:
            return [*said, "The trial with the default settings did not complete."]
        mine, theirs = self.taken.reported, self.default.reported
        metric = mine.target.metric
        lost = f", and lost {percent(mine.loss)} ({percent(theirs.loss)})" if mine.retained else ""
        beats = "beats" if self.taken.beats(self.default, "reported") else "does not beat"
        better = f"{self._better_than(self.default)} beat the defaults"
        if self.unmerged:
            count = self._better_than(self.unmerged)
            better += f", and {count} beat the defaults without merging"
        return [
            *said,
            "On the half of the tests that was not used for the choice, the recipe found has "
            f"{score_text(metric, mine.target.after)} {plain(metric)} (the defaults: "
            f"{score_text(metric, theirs.target.after)}){lost}: it {beats} the defaults in both.",
            f"Of {len(self.frontier)} models on the frontier, {better}.",
        ]

    def _better_than(self, other: Candidate) -> int:
        """How many of the frontier beat a candidate on the half to report."""
        return sum(one.beats(other, "reported") for one in self.frontier)


@named_settings
def tune(
    plan: Plan,
    tuning: Tuning,
    out: Path,
    *,
    storage: str | None = None,
    name: str = "holdfast",
    jobs: int = 1,
    tracking: Tracking | None = None,
    on_trials: Callable[[list[Any]], None] | None = None,
    on_progress: Callable[[int, str, int, int], None] | None = None,
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
        tracking: trackers that get the log and the final scores of each trial, on the half that
            settings are chosen on. Results do not depend on it.
        on_trials: called once per second with the trials so far.
        on_progress: called with the number of a trial on this machine, and how far it is.
    """
    with claim(out, "tune", paths_of(plan)):
        return tune_in(
            out, plan, tuning, storage=storage, name=name, jobs=jobs, config=None,
            tracking=tracking, on_trials=on_trials, on_progress=on_progress,
        )  # fmt: skip


def tune_in(
    out: Path,
    plan: Plan,
    tuning: Tuning,
    *,
    storage: str | None,
    name: str,
    jobs: int,
    config: str | None,
    tracking: Tracking | None,
    on_trials: Callable[[list[Any]], None] | None,
    on_progress: Callable[[int, str, int, int], None] | None,
) -> Tuned:
    """:func:`tune` in a folder that is claimed; ``config`` is the text of ``config.yaml``."""
    processes.refuse_in_import("tune")
    whole_number("jobs", jobs, 1)
    asked = plan.measuring
    if asked.tasks and not (asked.text or asked.data or asked.similarity):
        raise ValueError(
            "the search chooses settings on one half of the tests, but tasks of the harness cannot "
            "be halved: add text or data"
        )
    kept, folder = storage or str(out / "study.log"), out / "trials"
    refuse_link(out / "study.log")
    if storage is None:  # in a claimed folder, a lock is that of a dead process
        (out / "study.log.lock").unlink(missing_ok=True)
    study = search.open_study(kept, name)
    with _naming_damage(kept):
        _check_same(study, plan, tuning)
        search.revive(study, search.place_of(folder), alone=storage is None)
        left = tuning.trials - len(search.counted(study))
    if config is not None:
        write_changed(Place.at(out / "config.yaml"), config)
    if left > 0:
        if tracking:
            tracking.prepare(out / "tracking")
        given = plan, tuning, folder, kept, name
        _search_in_processes(study, jobs, given, tracking, on_trials, on_progress)
    for unused in folder.glob("*/"):  # a process was killed when its trial was done
        shutil.rmtree(unused, ignore_errors=True)
    with _naming_damage(kept):
        return tuned_of(study, tuning, plan)


@contextlib.contextmanager
def _naming_damage(storage: str) -> Iterator[None]:
    """Raise a ValueError that names the storage of a study if its records do not fit."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"the study in {storage} is damaged: {type(error).__name__} {first_line(error)}"
        ) from error


def _search_in_processes(
    study: Any,
    jobs: int,
    given: processes.Call,
    tracking: Tracking | None,
    on_trials: Callable[[list[Any]], None] | None,
    on_progress: Callable[..., None] | None,
) -> None:
    """Run one search per process; replace a process that dies."""
    place, last, deaths = search.place_of(given[2]), 0.0, 0

    def on_wait() -> None:
        nonlocal last
        if on_trials and time.monotonic() - last > 1:
            on_trials(search.counted(study))
            last = time.monotonic()

    def on_message(_: processes.Call, *message: Any) -> None:
        if on_progress:
            on_progress(*message)

    calls = deque((*given, number) for number in range(jobs))
    ended = processes.call_in_processes(
        partial(_search, tracking=tracking), calls, caller="tune", jobs=jobs, on_wait=on_wait,
        on_progress=on_message,
    )  # fmt: skip
    with contextlib.closing(ended):
        for one in ended:
            if one.error:
                reason = one.error.strip().rpartition("\n")[2]
                raise OSError(errno.EIO, f"a worker process failed: {reason}")
            if one.value is not None:
                kind, text = one.value
                raise _PLAN_ERRORS[kind](text)
            if one.died:
                deaths += 1
                search.revive(study, place, worker=one.call[-1])
                if deaths > 2 * jobs + len(search.counted(study)):
                    raise ValueError("worker processes die repeatedly: is there enough memory?")
                calls.append(one.call)
    if on_trials:
        on_trials(search.counted(study))


#: Errors of the plan. Their objects may not survive pickling, so processes send name and text.
_PLAN_ERRORS = {kind.__name__: kind for kind in (ValueError, OSError, ImportError)}


def _search(*given: Any, tracking: Tracking | None = None) -> tuple[str, str] | None:
    """In a worker process: search. Return an error of the plan; trials keep their own errors."""
    try:
        progress = processes.report_progress
        search.Search(*given, tracking=tracking, on_progress=progress).run()
    except tuple(_PLAN_ERRORS.values()) as error:
        return next(n for n, kind in _PLAN_ERRORS.items() if isinstance(error, kind)), str(error)
    return None


def _check_same(study: Any, plan: Plan, tuning: Tuning) -> None:
    """Refuse a study of another search; only the number of trials may change."""
    plan = replace(plan, training=replace(plan.training, save_seconds=0.0))
    mine = {**_codec.encode(plan), **_codec.encode(replace(tuning, trials=1))}
    mine["contents"] = plan.contents
    theirs = study.user_attrs.get("search", mine)
    if not isinstance(theirs, dict):
        raise TypeError(f"search is {theirs!r}")
    if other := [name for name in mine if mine[name] != theirs.get(name)]:
        raise ValueError(
            f"the study holds another search ({other[0]} differs): choose another --out or --name"
        )
    study.set_user_attr("search", mine)


def tuned_of(study: Any, tuning: Tuning, plan: Plan) -> Tuned:
    trials, every = search.counted(study), study.get_trials(deepcopy=False)
    recipe = search.recipe_of(study, tuning)
    swept = search.swept_setting(recipe)
    states = [trial.state.name for trial in trials]
    failed = [trial.user_attrs["error"] for trial in trials if "error" in trial.user_attrs]
    numbers = {t.number: i for i, t in enumerate(trials, 1) if t.state.name == "COMPLETE"}
    found = [
        _candidate(trial, numbers[whose], tuning, plan, recipe)
        for trial in every
        if trial.state.name == "COMPLETE"
        and (whose := trial.user_attrs.get("of", trial.number)) in numbers
    ]
    if not found:
        last = failed[-1].strip().rpartition("\n")[2] if failed else "all were pruned"
        raise ValueError(f"no trial completed: {last}")
    # Not Optuna's best_trials: it has candidates of trials that did not complete.
    frontier = [one for one in found if not any(other.beats(one) for other in found)]
    frontier.sort(key=lambda one: search.goals_in(one.chosen))
    chosen = Results(runs=tuple(one.chosen for one in found)).recommendation().label
    taken = next((one for one in found if one.chosen.label == chosen), frontier[0])
    default = next((one for one in found if one.chosen.recipe == "defaults"), None)
    alike = [one for one in found if default and one.trial == default.trial and one is not default]
    return Tuned(
        recipe=tuning.recipe,
        settings=taken.chosen.settings,
        taken=taken,
        default=default,
        unmerged=next((one for one in alike if swept and one.values.get(swept) == 1.0), None),
        frontier=tuple(frontier),
        candidates=len(found),
        trained=states.count("COMPLETE"),
        pruned=states.count("PRUNED"),
        failed=len(failed),
    )


def _candidate(trial: Any, number: int, tuning: Tuning, plan: Plan, recipe: Recipe) -> Candidate:
    """Read a candidate from a trial; it is named after its training run and its α."""
    attrs, values = trial.user_attrs, dict(trial.params)
    name, called = "defaults", {}
    if not attrs.get("default"):
        name, swept = f"trial {number}", search.swept_setting(recipe)
        if swept and swept in values:
            called[swept.rpartition(".")[2]] = round(values[swept], 3)
    spec = plan.spec(tuning.recipe, tuning.seed, values, recipe)
    update = {**spec.settings["update"], "lr": spec.training.lr}
    settings = Recipe.from_dict({**spec.settings, "update": update}).to_dict()
    halves = [
        _codec.decode(RunResult, attrs["halves"][half], "the result")
        for half in ("chosen", "reported")
    ]
    chosen, reported = (
        replace(
            half, recipe=name, values=called, settings=settings,
            resolved={**half.resolved, "merging": settings["merging"]},
        )
        for half in halves
    )  # fmt: skip
    return Candidate(number, values, chosen, reported)
