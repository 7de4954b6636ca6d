"""Find a recipe and its settings by a search: one that learns enough and forgets least.

Settings are chosen on one half of the tests (every other row, the first half of a text) and
reported on the other half. The candidates that no other one beats are the frontier. The recipe
found is the one that a comparison would recommend. Only candidates that were trained equally long
are compared.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from holdfast._torch.checks import named_settings
from holdfast.comparison import halving, processes, search
from holdfast.comparison import study as _study
from holdfast.comparison.clock import Clock, spent
from holdfast.comparison.contenders import RECIPE, Contender, label_of
from holdfast.comparison.crew import Crew, PerGpu, crew_for
from holdfast.comparison.goals import OBJECTIVES, goals_in
from holdfast.comparison.inputs import paths_of, warn_of_known_target
from holdfast.comparison.plan import Plan
from holdfast.comparison.results import Results, RunResult
from holdfast.comparison.search import Tuning
from holdfast.hosts.tracking import Tracking
from holdfast.io import codec as _codec
from holdfast.io.files import first_line
from holdfast.io.outputs import claim, refuse_link, write_changed
from holdfast.io.storage import Place
from holdfast.recipe import Recipe
from holdfast.report import LEARN_AT_LEAST
from holdfast.report import comparison as _shown
from holdfast.report import searched as _searched
from holdfast.report.document import Document
from holdfast.report.recommend import STANDARD, Recommendation, recommend
from holdfast.report.shown import Shown


@dataclass(frozen=True)
class Candidate:
    """One model of the search: a trained model, merged with one α.

    Attributes:
        chosen, reported: results on the half that settings are chosen on, and on the other half.
        recipe: name of its recipe.
        rung: the share of the updates that it was trained for.
        is_default: whether it has the default settings.
    """

    trial: int
    values: dict[str, float]
    chosen: RunResult
    reported: RunResult
    recipe: str = ""
    rung: float = 1.0
    is_default: bool = False

    def beats(self, other: Candidate) -> bool:
        """Whether it is better in one objective and at least as good in the other."""
        mine, theirs = (goals_in(one.chosen) for one in (self, other))
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True)
class Tried:
    """What a search knows about one of its recipes.

    Attributes:
        best: the recipe found; of another recipe, the candidate that the rule of the
            recommendation takes from its own that were trained longest, or None.
        trials, failed: the number of its trials, and of those that failed.
        error: the last line of the last error, or empty.
    """

    recipe: str
    best: Candidate | None
    trials: int
    failed: int
    error: str = ""


@dataclass(frozen=True, repr=False)
class Tuned(Shown):
    """The outcome of a search. It is shown by its frontier and the defaults.

    Attributes:
        recipes: the recipes that were searched, each with its best candidate.
        settings, taken: the recipe found, as :meth:`Recipe.to_dict` writes it, and its candidate.
        default: the default settings of the recipe found, or None.
        standard: standard fine-tuning, with the settings that are best on the target. None if it
            was not trained as long, or not at all.
        frontier: those that no other candidate beats on the half that settings are chosen on.
        candidates, trained, pruned, failed, unfinished: number of models tested, and of trials by
            outcome.
        left_out: of ``all``, the recipes that do not fit the model and the data, with the reason.
        seconds: the time that the search took, over all its sessions; None if it is not known.
        plan: the plan, as plain values, with the recipes that were searched.
        learn_at_least: as in :class:`~holdfast.comparison.search.Tuning`.
    """

    recipes: tuple[Tried, ...]
    settings: dict[str, Any]
    taken: Candidate
    default: Candidate | None
    frontier: tuple[Candidate, ...]
    candidates: int
    trained: int
    pruned: int
    failed: int
    unfinished: int = 0
    standard: Candidate | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    learn_at_least: float = LEARN_AT_LEAST
    schema_version: int = 3
    what: ClassVar[str] = "search"

    @classmethod
    def upgraded(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Version 1 had one recipe; both earlier ones had two more candidates."""
        if "recipe" in value:
            name = value.pop("recipe")
            counts = [value.get(key, 0) for key in ("trained", "pruned", "failed")]
            tried = {"recipe": name, "best": value.get("taken"), "trials": sum(counts)}
            value["recipes"] = [{**tried, "failed": counts[-1]}]
        kept = {k: item for k, item in value.items() if k not in ("second", "unmerged")}
        return {**kept, "schema_version": 3}

    def to_yaml(self) -> str:
        """Return the recipe found as YAML, for ``finetune --recipe`` and ``compare``."""
        return Recipe.from_dict(self.settings).to_yaml()

    def rows(self) -> list[dict[str, Any]]:
        """One row per model of the frontier, or of the defaults, and test."""
        return self.results().rows()

    def document(self) -> Document:
        """The frontier as a comparison, and what is known about each recipe."""
        results, asked = self.results(), self.recommendation()
        figures = results.recommendation().sentences
        said = *asked.elsewhere, _searched.ON_THE_OTHER_HALF, *figures, *self.sentences()
        command = results.command(self.taken.reported.label) if asked.label else ""
        shown = _shown.document(results, replace(asked, sentences=said, next=command))
        several = len(self.recipes) > 1
        names = (f"{len(self.recipes)} recipes",) if several else (self.recipes[0].recipe,)
        first = _searched.by_recipe(self) if several else ()
        sections = (*first, *shown.sections)
        return replace(shown, kind="search", names=names, sections=sections, download="tune.json")

    def recommendation(self) -> Recommendation:
        """The recipe found, and why, on the half that settings are chosen on."""
        runs = {one.chosen.label: one.chosen for one in (*self.frontier, self.taken)}
        nouns = "model on the frontier", "models on the frontier"
        return recommend(Results(tuple(runs.values())), self.learn_at_least, nouns)

    def results(self) -> Results:
        """The frontier, the defaults and standard fine-tuning, on the half to report."""
        shown = self.default, self.standard, *self.frontier, self.taken
        runs = {one.reported.label: one.reported for one in shown if one}
        return Results(tuple(runs.values()), plan=self.plan, taken=self.taken.reported.label)

    def sentences(self) -> list[str]:
        """Summarize the search; figures are of the half that was not used for the choice."""
        return _searched.sentences(self)


@named_settings
def tune(
    plan: Plan,
    tuning: Tuning,
    out: Path,
    *,
    storage: str | None = None,
    name: str = "holdfast",
    jobs: int | None = 1,
    per_gpu: PerGpu = "auto",
    tracking: Tracking | None = None,
    on_begin: Callable[[Begun], None] | None = None,
    on_trials: Callable[[list[Any]], None] | None = None,
    on_progress: Callable[[int, str, int, int], None] | None = None,
) -> Tuned:
    """Search until the study has all its trials or the time is over; a stopped search continues.

    In a script, put the call under ``if __name__ == "__main__":``: worker processes import it.

    Args:
        plan: the model, the data and the tests; its recipes, seeds and grid are not used.
        tuning: what to search.
        out: folder for the study and for unfinished training runs.
        storage: where Optuna keeps the study: the path of a journal file, which machines may share
            (``out/study.log`` by default), or the URL of a database.
        name: name of the study, the same on all machines.
        jobs, per_gpu: number of training runs at a time on this machine and on each of its GPUs,
            as in :func:`~holdfast.compare`.
        tracking: trackers that get the log and the final scores of each trial, on the half that
            settings are chosen on. Results do not depend on it.
        on_begin: called once, before the first training.
        on_trials: called once per second with the trials so far.
        on_progress: called with the number of a trial on this machine, and how far it is.
    """
    with claim(out, "tune", paths_of(plan)):
        processes.refuse_in_import("tune")
        return tune_in(
            out, plan, tuning, storage=storage, name=name,
            crew=crew_for(plan, jobs, per_gpu), config=None, tracking=tracking,
            on_begin=on_begin, on_trials=on_trials, on_progress=on_progress,
        )  # fmt: skip


class Begun(NamedTuple):
    """What a session of a search begins with.

    Attributes:
        recipes: the recipes that are searched.
        left_out: of ``all``, the recipes that do not fit, with the reason.
        trials: the number of trials so far, and at most (infinity without a limit).
        clock: the time that the search has taken, and what is left of its budget.
    """

    recipes: tuple[str, ...]
    left_out: dict[str, str]
    trials: tuple[int, float]
    clock: Clock


def tune_in(
    out: Path,
    plan: Plan,
    tuning: Tuning,
    *,
    storage: str | None,
    name: str,
    crew: Crew,
    config: str | None,
    tracking: Tracking | None,
    on_begin: Callable[[Begun], None] | None,
    on_trials: Callable[[list[Any]], None] | None,
    on_progress: Callable[[int, str, int, int], None] | None,
) -> Tuned:
    """:func:`tune` in a folder that is claimed; ``config`` is the text of ``config.yaml``."""
    warn_of_known_target(plan.data, plan.target)
    asked = plan.measuring
    if asked.tasks and not (asked.text or asked.data or asked.similarity):
        raise ValueError(
            "the search chooses settings on one half of the tests, but tasks of the harness cannot "
            "be halved: add text or data"
        )
    kept, folder = storage or str(out / "study.log"), out / "trials"
    refuse_link(out / "study.log")
    if storage is None:  # in a claimed folder, a lock is that of a dead process
        _study.unlock(kept)
    study = _study.open_study(kept, name, objectives=1 if tuning.halves else 2)
    with _naming_damage(kept):
        _check_same(study, plan, tuning)
        clock = Clock(study, tuning.seconds)
        place = _study.place_of(folder)
        _study.revive(study, place, alone=storage is None, jobs=crew.at_a_time)
        recipes, left_out = search.recipes_of(study, plan, tuning)
        most, trials = tuning.most_trials(len(recipes)), _study.counted(study)
        done = sum(trial.state.is_finished() for trial in trials)
        left = [
            t for t in trials if t.user_attrs.get("place") == place and not t.state.is_finished()
        ]
        is_over = clock.is_over or (len(trials) >= most and not left)
    if config is not None:
        write_changed(Place.at(out / "config.yaml"), config)
    if on_begin:
        on_begin(Begun(recipes, left_out, (done, most), clock))
    if not is_over:
        if tracking:
            tracking.prepare(out / "tracking")
        given = plan, tuning, folder, kept, name
        unlock = partial(_study.unlock, kept) if storage is None else None
        _search_in_processes(study, crew, given, clock, tracking, on_trials, on_progress, unlock)
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
    crew: Crew,
    given: processes.Call,
    clock: Clock,
    tracking: Tracking | None,
    on_trials: Callable[[list[Any]], None] | None,
    on_progress: Callable[..., None] | None,
    unlock: Callable[[], None] | None,
) -> None:
    """Run one search per process; replace a process that dies, and end all when time is over.

    If a trial fails because of others on its GPU, its process waits until one of them has ended,
    and its trial goes back to the queue. A process that is ended may hold the lock of the study:
    ``unlock`` removes it.
    """
    place, last, deaths = _study.place_of(given[2]), 0.0, 0
    jobs = crew.at_a_time

    def on_wait() -> None:
        nonlocal last
        if given[1].halves:
            clock.tick()
        if clock.is_over:
            raise _TimeOver
        if on_trials and time.monotonic() - last > 1:
            on_trials(_study.counted(study))
            last = time.monotonic()

    def on_message(_: processes.Call, *message: Any) -> None:
        if on_progress:
            on_progress(*message)

    calls = deque((*given, number) for number in range(jobs))
    # At the end of the time, the processes exit; the study has what their trials have reached.
    with contextlib.suppress(_TimeOver):
        ended = processes.call_in_processes(
            partial(_search, end=clock.end, tracking=tracking), calls, caller="tune", jobs=jobs,
            workers=crew.workers, admits=crew.admits, on_wait=on_wait, on_progress=on_message,
        )  # fmt: skip
        with contextlib.closing(ended):
            for one in ended:
                # The first process prepares the search while all others wait for it.
                if one.disturbed and "begun" in study.user_attrs:
                    crew.lower(one.gpu, one.at_a_time, one.error or "")
                    _study.revive(study, place, worker=one.call[-1], died=False)
                    calls.append(one.call)
                    continue
                if one.error:
                    reason = one.error.strip().rpartition("\n")[2]
                    raise OSError(errno.EIO, f"a worker process failed: {reason}")
                if one.value is not None:
                    kind, text = one.value
                    raise _PLAN_ERRORS[kind](text)
                if one.died:
                    deaths += 1
                    _study.revive(study, place, worker=one.call[-1])
                    if deaths > 2 * jobs + len(_study.counted(study)):
                        raise ValueError("worker processes die repeatedly: is there enough memory?")
                    calls.append(one.call)
    if unlock:
        unlock()
    if given[1].halves:
        clock.tick(now=True)
    if on_trials:
        on_trials(_study.counted(study))


class _TimeOver(Exception):  # noqa: N818 (not an error)
    """The time of the search is over."""


#: Errors of the plan. Their objects may not survive pickling, so processes send name and text.
_PLAN_ERRORS = {kind.__name__: kind for kind in (ValueError, OSError, ImportError)}


def _search(
    *given: Any, end: float | None = None, tracking: Tracking | None = None
) -> tuple[str, str] | None:
    """In a worker process: search. Return an error of the plan; trials keep their own errors."""
    try:
        progress = processes.report_progress
        search.Search(*given, end=end, tracking=tracking, on_progress=progress).run()
    except tuple(_PLAN_ERRORS.values()) as error:
        return next(n for n, kind in _PLAN_ERRORS.items() if isinstance(error, kind)), str(error)
    return None


def _check_same(study: Any, plan: Plan, tuning: Tuning) -> None:
    """Refuse a study of another search; trials, time and the share of the gain may change."""
    plan = replace(plan, training=replace(plan.training, save_seconds=0.0))
    free = replace(tuning, trials=None, budget=None)
    mine = {**_codec.encode(plan), **_codec.encode(free), "contents": plan.contents}
    mine |= {"halves": tuning.halves, "objectives": OBJECTIVES}
    del mine["learn_at_least"]
    theirs = study.user_attrs.get("search", mine)
    if not isinstance(theirs, dict):
        raise TypeError(f"search is {theirs!r}")
    if other := [name for name in mine if mine[name] != theirs.get(name)]:
        what = "one has a budget" if other == ["halves"] else f"it differs in {other[0]}"
        if "objectives" in other:
            what = "an earlier version of holdfast began it, with other objectives"
        raise ValueError(f"the study holds another search ({what}): choose another --out or --name")
    study.set_user_attr("search", mine)


def tuned_of(study: Any, tuning: Tuning, plan: Plan) -> Tuned:
    names, left_out = search.recipes_of(study, plan, tuning)
    contenders = {
        name: Contender(name, recipe, {}, alone=len(names) == 1)
        for name, (recipe, _) in search.resolved_recipes(study, names).items()
    }
    trials = _study.counted(study)
    numbers = {trial.number: i for i, trial in enumerate(trials, 1)}
    complete = {trial.number for trial in trials if trial.state.name == "COMPLETE"}
    read = partial(_candidate, tuning=tuning, plan=plan)
    of: dict[str, list[Any]] = {name: [] for name in names}
    found: list[Candidate] = []
    for trial in study.get_trials(deepcopy=False):
        own, whose = contenders[_recipe_of(trial, names)], trial.user_attrs.get("of", trial.number)
        if whose not in numbers:
            continue
        if whose == trial.number:
            of[own.name].append(trial)
        if whose in complete:
            found.append(read(trial, numbers[whose], own, trial.user_attrs["halves"]))
        elif reached := _study.rungs_reached(trial):
            known = trial.user_attrs[_study.rung_attribute(reached - 1)]["halves"]
            share = float(halving.RUNGS[reached - 1])
            found.append(replace(read(trial, numbers[whose], own, known), rung=share))
    failed = [trial.user_attrs["error"] for trial in trials if "error" in trial.user_attrs]
    unfinished = sum(not trial.state.is_finished() for trial in trials)
    if not found:
        late = "there was no time for one: raise --budget (budget= in Python)"
        last = "all were pruned" if len(trials) > unfinished else late
        raise ValueError(f"no trial completed: {processes.reason(failed[-1]) if failed else last}")
    longest = _longest(found)
    # Not Optuna's best_trials: it has candidates of trials that did not complete.
    frontier = [one for one in longest if not any(other.beats(one) for other in longest)]
    frontier.sort(key=lambda one: goals_in(one.chosen))
    taken = _best(longest, tuning)
    same = [one for one in longest if one.recipe == taken.recipe]
    standard = [one for one in longest if one.recipe == STANDARD]
    return Tuned(
        recipes=tuple(_tried(name, of[name], found, taken, tuning) for name in names),
        settings=taken.chosen.settings,
        taken=taken,
        default=next((one for one in same if one.is_default), None),
        frontier=tuple(frontier),
        candidates=len(found),
        trained=len(complete),
        pruned=len(trials) - len(complete) - len(failed) - unfinished,
        failed=len(failed),
        unfinished=unfinished,
        standard=min(standard, key=lambda one: goals_in(one.chosen), default=None),
        left_out=left_out,
        seconds=round(spent(study), 1) if tuning.halves else None,
        plan={**_codec.encode(plan), "recipes": [*map(label_of, names)]},
        learn_at_least=tuning.learn_at_least,
    )


def _recipe_of(trial: Any, names: Sequence[str]) -> str:
    return str(trial.params.get(RECIPE, names[0]))


def _best(found: Sequence[Candidate], tuning: Tuning) -> Candidate:
    """The candidate to take, or if none is better than the base, the best on the target."""
    results = Results(tuple(one.chosen for one in found))
    label = results.recommendation(tuning.learn_at_least).label
    taken = next((one for one in found if one.chosen.label == label), None)
    return taken or min(found, key=lambda one: goals_in(one.chosen))


def _longest(found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that were trained longest: only those can be compared."""
    most = max((one.rung for one in found), default=0.0)
    return [one for one in found if one.rung == most]


def _tried(
    name: str, trials: Sequence[Any], found: Sequence[Candidate], taken: Candidate, tuning: Tuning
) -> Tried:
    label = label_of(name)
    errors = [t.user_attrs["error"] for t in trials if "error" in t.user_attrs]
    own = [one for one in found if one.recipe == label]
    best = taken if taken.recipe == label else _best(_longest(own), tuning) if own else None
    error = processes.reason(errors[-1])[:300] if errors else ""
    return Tried(label, best, len(trials), len(errors), error)


def _candidate(
    trial: Any, number: int, contender: Contender, halves: Any, *, tuning: Tuning, plan: Plan
) -> Candidate:
    """Read a candidate from a trial: its recipe, and unless it is the defaults, trial and α."""
    values, swept = contender.values_of(trial.params), contender.swept
    is_default = bool(trial.user_attrs.get("default"))
    called: dict[str, int | float | str | bool | None] = {}
    if not is_default:
        called["trial"] = number
        if swept and swept in values:
            called[swept.rpartition(".")[2]] = round(values[swept], 3)
    spec = plan.spec(contender.name, tuning.seed, values, contender.recipe)
    update = {**spec.settings["update"], "lr": spec.training.lr}
    settings = Recipe.from_dict({**spec.settings, "update": update}).to_dict()
    both = [_codec.decode(RunResult, halves[half], "the result") for half in ("chosen", "reported")]
    chosen, reported = (
        replace(
            half, recipe=contender.label, values=called, settings=settings,
            resolved={**half.resolved, "merging": settings["merging"]},
        )
        for half in both
    )  # fmt: skip
    return Candidate(
        number, values, chosen, reported, recipe=contender.label, is_default=is_default
    )
