"""The search of ``tune``: Optuna proposes settings, a worker trains, the study keeps all results.

A trial trains once. If the recipe's merging has a setting that needs no training (α of WiSE-FT),
the trained model is tested at several values of it, and each is a candidate: a trial of the study.
The sampler sees the half of the tests that settings are chosen on. The study also holds the results
on the other half, for the report. Machines that share the storage of a study share its search.
"""

import contextlib
import copy
import secrets
import shutil
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from holdfast._torch.checks import NamedSettings, did_you_mean, share, whole_number
from holdfast._torch.finite import DivergedError, is_finite
from holdfast._torch.imports import require
from holdfast.comparison.inputs import measure_options
from holdfast.comparison.plan import TUNED_RECIPE, Plan, RunSpec
from holdfast.comparison.results import Measured, RunResult, measured, result_of
from holdfast.comparison.worker import Worker, peak_memory, reset_peak_memory
from holdfast.evaluate.watch import PREFIX, Watch, curves_of, effective_distance
from holdfast.hosts.job import default_lr
from holdfast.hosts.tracking import TrackedRun, Tracking
from holdfast.hosts.watching import Observer
from holdfast.io import codec as _codec
from holdfast.io.files import first_line, naming_errors, remove_cut_line, write_text
from holdfast.io.models import Loader
from holdfast.recipe import Recipe, read_recipe
from holdfast.run import Run, resolved
from holdfast.scoring.scorer import score
from holdfast.stages import MedianLoss, Recall, SearchRange, SearchSpace

Halves = tuple[RunResult, RunResult]

#: Rows per file, and characters per text, of the tests during training.
LOOK_ROWS, LOOK_TEXT = 16, 4000


@dataclass(frozen=True)
class Tuning(NamedSettings):
    """What to search.

    Attributes:
        recipe: a preset or a YAML file; the settings of its methods are searched.
        trials: number of models to train, over all machines together.
        space: ranges to search instead of the defaults, as in ``{"update.pull": [0.01, 0.5]}``.
        alphas: values of the setting that the merging sweeps (α of WiSE-FT) to test each trained
            model at, besides the proposed one.
        prune: stop a training run that is worse, on the target and on the retained tests, than half
            of the others were at the same update. Not with ``patience`` of the training.
        seed: random seed of the training and of the search.
    """

    recipe: str = TUNED_RECIPE
    trials: int = 20
    space: dict[str, tuple[float, ...]] = field(default_factory=dict)
    alphas: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    prune: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("trials", self.trials, 1)
        for alpha in self.alphas:
            share("alphas", alpha)
        recipe = read_recipe(self.recipe)[1]
        if type(recipe.recall).resolve is Recall.resolve:  # else the settings depend on the model
            # They depend neither on the learning rate nor on the data.
            space_of(recipe, 1.0, lambda: 1.0, self.space)


def space_of(
    recipe: Recipe, lr: float, median_loss: MedianLoss, given: Mapping[str, Sequence[float]]
) -> SearchSpace:
    """The settings to search and their ranges, by dotted name; ``given`` replaces ranges.

    The ranges of the methods reach from hardly any change of the model to hardly any protection.
    The default settings are a point of the space, and the first one that is tried.
    """
    space = {"lr": SearchRange(lr / 10, lr * 3, lr)}
    for stage, method in recipe:
        for name, range_ in method.search_space(lr, median_loss).items():
            value = getattr(method, name)
            default = range_.default if value is None or isinstance(value, str) else value
            space[f"{stage}.{name}"] = replace(
                range_, low=min(range_.low, default or range_.low), default=default,
                high=max(range_.high, default),
            )  # fmt: skip
    for name, ends in given.items():
        if name not in space:
            raise ValueError(
                f"{recipe.name} has no setting {name!r} to search{did_you_mean(name, list(space))}"
            )
        if len(ends) != 2:
            raise ValueError(f"{name} needs two ends, such as [0.01, 0.5], got {list(ends)}")
        old = space[name]
        default = type(old.default)(min(max(old.default, ends[0]), ends[1]))
        space[name] = replace(old, low=ends[0], high=ends[1], default=default)
    return space


def suggest(range_: SearchRange, trial: Any, name: str) -> float:
    if isinstance(range_.default, int):
        return int(trial.suggest_int(name, int(range_.low), int(range_.high), log=range_.log))
    return float(trial.suggest_float(name, range_.low, range_.high, log=range_.log))


def swept_setting(recipe: Recipe) -> str | None:
    """The dotted name of the setting that can vary after training, or None.

    >>> swept_setting(Recipe.preset("wise-ft"))
    'merging.alpha'
    """
    return None if recipe.merging.swept is None else f"merging.{recipe.merging.swept}"


def recipe_of(study: Any, tuning: Tuning) -> Recipe:
    """The recipe whose settings are searched, with the methods that were chosen for the model."""
    known = study.user_attrs.get("recipe")
    return read_recipe(tuning.recipe)[1] if known is None else Recipe.from_dict(known)


class Search:
    """The search in one process, by its number: each process draws different settings."""

    def __init__(
        self,
        plan: Plan,
        tuning: Tuning,
        folder: Path,
        storage: str,
        name: str,
        number: int = 0,
        *,
        tracking: Tracking | None = None,
        on_progress: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.tuning, self.folder, self.number = tuning, folder, number
        self.on_progress = on_progress
        # Tasks of the harness cannot be halved, so no settings are chosen on them.
        one = replace(plan.measuring, half=0, tasks=())
        self.plan = replace(plan, measuring=one)
        other = replace(plan, measuring=replace(plan.measuring, half=1))
        group = folder.absolute().parent.name
        self.worker = Worker(self.plan, folder, tracking, group=group)
        self.reporter = Worker(other, folder)
        self.study = open_study(storage, name)
        self._resolve()
        self.recipe = recipe_of(self.study, tuning)
        self.swept = swept_setting(self.recipe)
        lr = self.study.user_attrs["lr"]
        self.space = space_of(self.recipe, lr, self._median_loss, tuning.space)
        self.defaults = {name: range_.default for name, range_ in self.space.items()}
        self.study.sampler = self._sampler()

    def run(self) -> None:
        from optuna.trial import TrialState

        self.study.enqueue_trial(self.defaults, skip_if_exists=True)
        while len(counted(self.study)) < self.tuning.trials:
            trial = self.study.ask()
            trial.set_user_attr("place", place_of(self.folder))
            trial.set_user_attr("worker", self.number)
            before = [t for t in counted(self.study) if t.number < trial.number]
            if len(before) >= self.tuning.trials:
                self.study.tell(trial, state=TrialState.FAIL)  # another process was faster
                return
            try:
                self._do(trial, f"trial {len(before) + 1}")
            except (_Pruned, DivergedError):
                self.study.tell(trial, state=TrialState.PRUNED)
            except OSError:  # of the disk, not of the settings: the next search repeats the trial
                raise
            except Exception as error:
                trial.set_user_attr("error", "".join(traceback.format_exception(error)))
                self.study.tell(trial, state=TrialState.FAIL)

    def _do(self, trial: Any, name: str) -> None:
        values = {name: suggest(range_, trial, name) for name, range_ in self.space.items()}
        trial.set_user_attr("default", values == self.defaults)
        spec = self.plan.spec(self.tuning.recipe, self.tuning.seed, values, self.recipe)
        folder = self.folder / spec.id
        folder.mkdir(parents=True, exist_ok=True)
        reset_peak_memory()
        drawn = values.get(self.swept or "")
        try:
            with self.worker.tracked(spec, name) as tracked:
                results = None
                with contextlib.suppress(_Pruned):  # in the trackers, it has not failed
                    results = self._train_and_test(trial, spec, folder, tracked)
                tracked.conclude(results[drawn][0].figures if results else {"pruned": 1})
            if results is None:
                raise _Pruned
            self._tell(trial, drawn, results)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _train_and_test(
        self, trial: Any, spec: RunSpec, folder: Path, tracked: TrackedRun
    ) -> dict[float | None, Halves]:
        """Return the results on both halves, by value of the swept setting."""
        begin, progress = time.monotonic(), partial(self.on_progress, trial.number)
        found: dict[float | None, Halves] = {}

        def test(run: Run, history: list[dict[str, float]]) -> None:
            curves, trained = curves_of(history), time.monotonic() - begin - tracked.seconds
            progress("testing", 0, 1)

            def both(tuned: Any) -> Halves:
                run.recall.on_merged(tuned, run.anchors)
                if hasattr(tuned, "merge_and_unload"):  # measuring merges the adapters
                    tuned = copy.deepcopy(tuned)
                start = time.monotonic()
                workers, recipe = (self.worker, self.reporter), run.full_recipe
                reports = [worker.measure(spec.id, tuned, recipe) for worker in workers]
                spent = trained + time.monotonic() - start
                one, other = (replace(report, curves=curves) for report in reports)
                made = partial(
                    result_of, spec, recipe, new=self.worker.new, seconds=spent,
                    peak_memory=peak_memory(),
                )  # fmt: skip
                return made(one), made(other)

            merging = run.recipe.merging
            if merging.swept is None:
                found[None] = both(run.model)
                return
            drawn, ends = getattr(merging, merging.swept), self.space[f"merging.{merging.swept}"]
            others = [a for a in self.tuning.alphas if ends.low <= a <= ends.high]
            values = [drawn, *(a for a in others if abs(a - drawn) > 0.005)]
            swept = merging.sweep(
                run.model, run.anchors, values, both, data=run.data, collate=run.collate
            )
            found.update(swept.items())

        looks = self.tuning.prune and spec.training.patience is None
        watch = partial(self._looking, trial) if looks else None
        self.worker.train(spec, folder, progress, watch, on_trained=test, tracked=tracked)
        return found

    def _looking(self, trial: Any, model: nn.Module, total: int) -> Observer:
        """Compute both objectives on a few samples, at each quarter of a training run; prune."""
        tests = measure_options(self.plan)
        tests["text"] = {name: words[:LOOK_TEXT] for name, words in tests["text"].items()}
        length = self.plan.measuring.max_length
        few = Watch(
            model,
            every=max(1, total // 4),
            loader=Loader(max_length=length, tokenizer=self.worker.tokenizer),
            **{**tests, "limit": LOOK_ROWS, "kl_samples": 0, "context_free": 0},
        )
        few.reference = few.reference.without(self.worker.new)
        looks: dict[str, Sequence[float]] = {}

        def look(update: int, model: nn.Module) -> dict[str, float]:
            if update % few.every or update in (0, total):
                return {}
            scores = few.examine(model).scores
            target = next(measured(s) for s in scores if s.role == "target")
            retained = [measured(s) for s in scores if s.role != "target"]
            distance = effective_distance(model, few.reference)
            looks[str(update)] = goals = goals_of(target, retained, distance)
            trial.set_user_attr("looks", looks)
            if not is_finite(*goals) or hopeless(self.study, update, goals):
                raise _Pruned
            return {f"{PREFIX}distance": distance}

        return look

    def _tell(self, trial: Any, drawn: float | None, found: dict[float | None, Halves]) -> None:
        """Add all candidates to the study, the trial's own last: if it exists, so do the others."""
        import optuna

        for value, halves in sorted(found.items(), key=lambda row: row[0] == drawn):
            chosen, reported = _codec.encode(halves)
            both, goals = {"chosen": chosen, "reported": reported}, goals_in(halves[0])
            if value == drawn:
                if not is_finite(*goals):
                    raise _Pruned
                trial.set_user_attr("halves", both)
                self.study.tell(trial, goals)
            elif self.swept and is_finite(*goals):
                other = optuna.trial.create_trial(
                    params={**trial.params, self.swept: value},
                    distributions=trial.distributions,
                    values=goals,
                    user_attrs={"of": trial.number, "halves": both},
                )
                self.study.add_trial(other)

    def _sampler(self) -> Any:
        import optuna

        # A continued search, and one on another machine, must draw other numbers.
        place, trials = place_of(self.folder), self.study.get_trials(deepcopy=False)
        drawn = [self.tuning.seed, self.number, len(trials), zlib.crc32(place.encode())]
        per_training = 1 + len(self.tuning.alphas) if self.swept in self.space else 1
        return optuna.samplers.TPESampler(
            seed=int(np.random.SeedSequence(drawn).generate_state(1)[0]),
            multivariate=True,
            n_startup_trials=per_training * max(4, self.tuning.trials // 4),
        )

    def _resolve(self) -> None:
        """Choose the methods of stages 1 and 4 and the learning rate before the search, by model.

        The recall stays as it is in the recipe, and so do its settings.
        """
        if "recipe" in self.study.user_attrs:  # all processes must use the same
            return
        recipe, model = read_recipe(self.tuning.recipe)[1], self.worker.load()
        lr = self.plan.training.lr if recipe.update.lr is None else recipe.update.lr
        if lr is None:
            lr = default_lr(recipe, model, self.worker.new)
        chosen, _ = resolved(recipe, model, default_lr=lr, new=self.worker.new)
        recipe = replace(recipe, trainable=chosen.trainable, merging=chosen.merging)
        self.study.set_user_attr("lr", lr)
        self.study.set_user_attr("recipe", _codec.encode(recipe.to_dict()))

    def _median_loss(self) -> float | None:
        """None if the model has a new head."""
        model = self.worker.load()
        if self.worker.new:
            return None
        if "median_loss" not in self.study.user_attrs:  # all processes must use the same number
            samples = self.worker.samples(model, self.plan.training.max_length)
            scores = score(model, samples, progress=False)
            median = float(np.median(scores.losses[scores.counts > 0].numpy()))
            self.study.set_user_attr("median_loss", median)
        return float(self.study.user_attrs["median_loss"])


class _Pruned(Exception):  # noqa: N818 (not an error)
    """Ends a training run that is worse than the others, or has diverged."""


def goals_of(target: Measured, retained: Sequence[Measured], moved: float) -> tuple[float, float]:
    """The two objectives, lower is better: the target, and the mean loss of the retained tests.

    Without retained tests, the second one is how far the model moved.
    """
    lost = [max(0.0, -test.relative) for test in retained]
    sign = 1 if target.lower_is_better else -1
    return sign * target.after, sum(lost) / len(lost) if lost else moved


def goals_in(result: RunResult) -> tuple[float, float]:
    far = 0.0 if result.drift is None else result.drift.relative
    no_evidence = {result.target.name, *result.trained_on}  # the target's predictions are to change
    evidence = [kl for name, kl in result.kl.items() if name not in no_evidence]
    return goals_of(result.target, result.retained, next(iter(evidence), far))


def open_study(storage: str, name: str) -> Any:
    """Open or create a study at the path of a journal file, or at the URL of a database."""
    optuna = require("optuna", extra="cli", what="the search")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        kept: Any = storage if "://" in storage else _journal(Path(storage).resolve())
        return optuna.create_study(
            storage=kept, study_name=name, directions=["minimize", "minimize"], load_if_exists=True
        )
    except (ImportError, OSError):
        raise
    except Exception as error:  # a damaged journal makes Optuna raise many types, as databases do
        raise ValueError(
            f"cannot open the study in {storage}, is it damaged? ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from error


def _journal(path: Path) -> Any:
    """The journal of a study in a file.

    The path is absolute because the lock is a symbolic link to it. Optuna breaks the lock of a dead
    process after half a minute, but waits forever if the link is broken.
    """
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock, JournalStorage

    class Lock(JournalFileSymlinkLock):
        def release(self) -> None:
            try:
                super().release()
            except RuntimeError:  # it renames the link first, and tries forever if that fails
                path.with_name(f"{path.name}.lock").unlink(missing_ok=True)

    lock = Lock(str(path))

    class Journal(JournalFileBackend):
        def append_logs(self, logs: Any) -> None:
            lock.acquire()
            try:
                remove_cut_line(path)
            finally:
                lock.release()
            with naming_errors(path):
                super().append_logs(logs)

    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(Journal(str(path), lock))


def counted(study: Any) -> list[Any]:
    """The trials that count: completed, pruned, running, or failed by an error of their own.

    Candidates at other values of the swept setting and trials of dead processes do not count.
    """
    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if "of" not in trial.user_attrs
        and (trial.state.name in ("COMPLETE", "PRUNED", "RUNNING") or "error" in trial.user_attrs)
    ]


def place_of(folder: Path) -> str:
    """A name of a folder that is unique on all machines; it is stored in the folder."""
    file = folder / ".place"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, secrets.token_hex(8))
    return file.read_text()


def revive(study: Any, place: str, worker: int | None = None, *, alone: bool = False) -> None:
    """Put the trials that were stopped in a place back in the queue.

    ``worker`` is the number of the process that died; None if no process runs in this place. A
    trial whose process has died twice has failed. A trial that was stopped before it could record
    its place is put back after a minute, or at once if no other process uses the study (``alone``).
    """
    from optuna.trial import TrialState

    now = datetime.now()
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        attrs = trial.user_attrs
        old = now - trial.datetime_start > timedelta(minutes=1)
        unclaimed = "place" not in attrs and (alone or old)
        ours = attrs.get("place") == place and worker in (None, attrs.get("worker"))
        if not (ours or unclaimed):
            continue
        deaths = attrs.get("deaths", 0) + (worker is not None)
        if deaths >= 2:
            study._storage.set_trial_user_attr(
                trial._trial_id, "error", "the worker process died twice, possibly out of memory"
            )
        study.tell(trial.number, state=TrialState.FAIL)
        if deaths < 2:
            wanted = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
            study.enqueue_trial(wanted, user_attrs={"deaths": deaths})


def hopeless(study: Any, update: int, goals: Sequence[float]) -> bool:
    """Whether at least half of four or more completed trials were better in both objectives then.

    This is the rule of Optuna's median pruner, which supports only one objective.
    """
    then = [
        trial.user_attrs["looks"][str(update)]
        for trial in counted(study)
        if trial.state.name == "COMPLETE" and str(update) in trial.user_attrs.get("looks", {})
    ]
    better = [all(a < b for a, b in zip(look, goals, strict=True)) for look in then]
    return len(then) >= 4 and 2 * sum(better) >= len(then)
