"""The search of ``tune``: Optuna proposes settings, a worker trains, the study keeps all results.

A trial trains once. If the recipe's merging has a setting that needs no training (α of WiSE-FT),
the trained model is tested at several values of it, and each is a candidate: a trial of the study.
The sampler sees the half of the tests that settings are chosen on. The study also holds the results
on the other half, for the report. Machines that share the storage of a study share its search.

The settings of one recipe are searched with two objectives, the target and what was lost. A search
over several recipes, or within a budget of time, uses successive halving
(:mod:`~holdfast.comparison.halving`) and one objective. Every recipe is tried with its defaults up
to the first rung before any of them goes on, except standard fine-tuning: its defaults are trained
to the end, because the report compares the recipe found with them.
"""

import copy
import math
import shutil
import statistics
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from holdfast._torch.checks import NamedSettings, duration, positive_share, share, whole_number
from holdfast._torch.finite import DivergedError, is_finite
from holdfast.comparison import halving
from holdfast.comparison.contenders import (
    ALL,
    RECIPE,
    Contender,
    contenders_of,
    fitting,
)
from holdfast.comparison.goals import goals_in, goals_of, hopeless, merit_in
from holdfast.comparison.inputs import measure_options, samples_in
from holdfast.comparison.plan import TUNED_RECIPE, Plan, RunSpec
from holdfast.comparison.processes import at_a_time, count_from_now, device_failed
from holdfast.comparison.results import measured, result_of
from holdfast.comparison.rungs import FIRST, Halves, OutOfTime, Paused, Pruned, Rungs, plan_at_rung
from holdfast.comparison.study import (
    counted,
    open_study,
    place_of,
    rung_attribute,
    tell_failed,
)
from holdfast.comparison.worker import Worker, peak_memory, reset_peak_memory
from holdfast.evaluate.report import Curve
from holdfast.evaluate.watch import PREFIX, Watch, curves_of, effective_distance
from holdfast.hosts.job import default_lr
from holdfast.hosts.tracking import TrackedRun, Tracking
from holdfast.hosts.watching import Observer
from holdfast.io import codec as _codec
from holdfast.io.models import Loader
from holdfast.recipe import Recipe, read_recipe
from holdfast.report import LEARN_AT_LEAST
from holdfast.run import Run, resolved
from holdfast.scoring.scorer import score
from holdfast.stages import Trainable

#: Rows per file, and characters per text, of the tests during training.
LOOK_ROWS, LOOK_TEXT = 16, 4000
#: Trials by default, for one recipe and for each of several.
TRIALS, TRIALS_EACH = 20, 3
#: The attribute of a trial with the seconds of the tests at its end, per model.
TESTS = "seconds of tests"


@dataclass(frozen=True)
class Tuning(NamedSettings):
    """What to search, as in ``Tuning("recadam", space={"update.pull": (0.01, 0.5)})``.

    Attributes:
        recipes: one or more presets or YAML files; ``"all"`` stands for every recipe that fits the
            model and the data. The settings of their methods are searched.
        trials: number of models to train, over all machines together. By default 20 for one recipe
            and 3 per recipe for several, or as many as the budget allows.
        budget: time limit of the search, over all its sessions: ``90s``, ``30m``, ``1h30m``,
            ``2d``. The report is written within it.
        space: ranges to search instead of the defaults: the name of a setting and its two ends.
        alphas: values of the setting that the merging sweeps (α of WiSE-FT) to test each trained
            model at, besides the proposed one.
        learn_at_least: share of the best gain on the target that the recipe found has at least.
        prune: stop training runs early. With several recipes or a budget, two thirds stop at 1/9 of
            the updates, and two thirds of the others at 1/3. Else those stop that are worse, on the
            target and on the retained tests, than half of the others were at the same update; not
            with ``patience`` of the training.
        seed: random seed of the training and of the search.
    """

    recipes: str | tuple[str, ...] = (TUNED_RECIPE,)
    trials: int | None = None
    budget: str | None = None
    space: dict[str, tuple[float, ...]] = field(default_factory=dict)
    alphas: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    learn_at_least: float = LEARN_AT_LEAST
    prune: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.recipes, str):
            object.__setattr__(self, "recipes", (self.recipes,))
        if not self.recipes:
            raise ValueError("recipes must name at least one recipe, or be all")
        if self.trials is not None:
            whole_number("trials", self.trials, 1)
        _ = self.seconds  # raises if the budget is no duration
        for alpha in self.alphas:
            share("alphas", alpha)
        positive_share("learn_at_least", self.learn_at_least)
        named = [read_recipe(name) for name in self.recipes if name != ALL]
        labels = [label for label, _ in named]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"recipes contains {twice[0]!r} twice")
        fixed = not any(r.recall.depends_on_model for _, r in named)
        if fixed and ALL not in self.recipes:  # else the settings depend on the model
            # They depend neither on the learning rate nor on the data.
            contenders_of({n: (r, 1.0) for n, r in named}, lambda: 1.0, self.space)

    @property
    def seconds(self) -> float | None:
        """The budget in seconds; None without one."""
        return None if self.budget is None else duration("budget", self.budget)

    @property
    def halves(self) -> bool:
        """Whether the search uses successive halving, with one objective."""
        return len(self.recipes) > 1 or ALL in self.recipes or self.budget is not None

    def most_trials(self, recipes: int) -> float:
        """The number of trials over so many recipes; infinity if only the time limits it."""
        if self.trials is not None:
            return self.trials
        if self.budget is not None:
            return float("inf")
        return TRIALS if recipes == 1 else TRIALS_EACH * recipes


def recipes_of(study: Any, plan: Plan, tuning: Tuning) -> tuple[tuple[str, ...], dict[str, str]]:
    """The recipes of a search, and the reasons why others were left out; the study keeps both."""
    if "recipes" not in study.user_attrs:  # all processes, and a later version, use the same
        fits, unfit = fitting(plan, tuning.recipes)
        study.set_user_attr("left_out", unfit)
        study.set_user_attr("recipes", list(fits))
    return tuple(study.user_attrs["recipes"]), dict(study.user_attrs["left_out"])


def resolved_recipes(study: Any, names: Sequence[str]) -> dict[str, tuple[Recipe, float | None]]:
    """The recipes by name as they are searched, with their learning rates."""
    known = study.user_attrs.get("resolved", {})
    return {
        name: (Recipe.from_dict(known[name]["recipe"]), known[name]["lr"])
        if name in known
        else (read_recipe(name)[1], None)
        for name in names
    }


class Search:
    """The search in one process, by its number: each process draws different settings.

    ``end`` is the time at which the last training must end; None without a limit.
    """

    def __init__(
        self,
        plan: Plan,
        tuning: Tuning,
        folder: Path,
        storage: str,
        name: str,
        number: int = 0,
        *,
        end: float | None = None,
        tracking: Tracking | None = None,
        on_progress: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.tuning, self.folder, self.number, self.end = tuning, folder, number, end
        self.on_progress = on_progress
        # Tasks of the harness cannot be halved, so no settings are chosen on them.
        one = replace(plan.measuring, half=0, tasks=())
        self.plan = replace(plan, measuring=one)
        other = replace(plan, measuring=replace(plan.measuring, half=1))
        group = folder.absolute().parent.name
        self.worker = Worker(self.plan, folder, tracking, group=group)
        self.testers = self.worker, Worker(other, folder)
        self.rung_testers = tuple(Worker(plan_at_rung(half), folder) for half in (self.plan, other))
        self.study = open_study(storage, name, objectives=1 if tuning.halves else 2)
        while number and "begun" not in self.study.user_attrs:
            time.sleep(0.1)  # the first process prepares the search for all
        self.names, _ = recipes_of(self.study, plan, tuning)
        self.most_trials = tuning.most_trials(len(self.names))
        self._resolve()
        recipes: Any = resolved_recipes(self.study, self.names)
        self.contenders = contenders_of(recipes, self._median_loss, tuning.space)
        self.study.sampler = self._sampler()
        self.study.pruner = halving.make_pruner(tuning.prune)
        self.paused: list[Any] = []

    def run(self) -> None:
        self._enqueue()
        self.paused = [*self._adopted()]
        while True:
            self._settle()
            if len(counted(self.study)) >= self.most_trials:
                break
            trial = self.study.ask()
            trial.set_user_attr("place", place_of(self.folder))
            trial.set_user_attr("worker", self.number)
            before = [t for t in counted(self.study) if t.number < trial.number]
            if len(before) >= self.most_trials:
                self._put_back(trial)  # another process was faster
                break
            if not self._has_time_for(self._contender(trial)):
                self._put_back(trial)
                return  # trials that wait for the others are judged when the search goes on
            self._attempt(trial)
        self._settle(is_over=True)

    def _enqueue(self) -> None:
        """Put the defaults of every recipe into the queue: the first process for all others."""
        if "begun" in self.study.user_attrs:
            return
        for one in self.contenders.values():
            attrs = {"first_look": True} if self.tuning.halves else None
            self.study.enqueue_trial(one.defaults, user_attrs=attrs, skip_if_exists=True)
        self.study.set_user_attr("begun", True)

    def _adopted(self) -> Iterator[Any]:
        """The trials that a process with this number has left at a rung."""
        from optuna.trial import Trial, TrialState

        mine = place_of(self.folder), self.number
        for trial in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            whose = trial.user_attrs.get("place"), trial.user_attrs.get("worker")
            if whose == mine and FIRST in trial.user_attrs:
                yield Trial(self.study, trial._trial_id)

    def _attempt(self, trial: Any) -> None:
        number = len([t for t in counted(self.study) if t.number < trial.number]) + 1
        try:
            self._do(trial, f"trial {number}")
        except Paused:
            trial.set_user_attr("paused", True)
            self.paused.append(trial)
        except OutOfTime:
            pass  # what it has reached is in the study
        except (Pruned, DivergedError):
            self._tell_state(trial, "PRUNED")
        except OSError:  # of the disk, not of the settings: the next search repeats the trial
            raise
        except Exception as error:
            if device_failed(error) and (at_a_time() or 1) > 1:
                raise  # others on the device may be the cause: the trial is repeated
            tell_failed(self.study, trial, "".join(traceback.format_exception(error)))

    def _tell_state(self, trial: Any, state: str) -> None:
        from optuna.trial import TrialState

        self.study.tell(trial, state=TrialState[state])

    def _stored(self, trial: Any) -> Any:
        return self.study._storage.get_trial(trial._trial_id)

    def _contender(self, trial: Any) -> Contender:
        """The recipe of a trial, which the sampler draws."""
        if len(self.contenders) == 1:
            return next(iter(self.contenders.values()))
        return self.contenders[trial.suggest_categorical(RECIPE, [*self.contenders])]

    def _settle(self, *, is_over: bool = False) -> None:
        """Judge the first looks of this process: the best third of all recipes goes on.

        Standard fine-tuning goes on in any case: the recommendation compares the others with it.
        A recipe that is still unseen may be better or worse than all others. A look waits as long
        as this matters, unless the search ``is_over``, or half of its time: some training should
        be completed.
        """
        looks = [t for t in self.study.get_trials(deepcopy=False) if "first_look" in t.user_attrs]
        merits = [t.user_attrs[FIRST]["merit"] for t in looks if FIRST in t.user_attrs]
        unseen = sum(not t.state.is_finished() and FIRST not in t.user_attrs for t in looks)
        if self.end is not None and self.tuning.seconds is not None:
            is_over |= self.end - time.time() < self.tuning.seconds / 2
        if is_over:
            unseen = 0
        paused, self.paused = self.paused, []
        # The best first: time may be short.
        for trial in sorted(paused, key=lambda t: -t.user_attrs[FIRST]["merit"]):
            merit = trial.user_attrs[FIRST]["merit"]
            went_on = "first_look" not in trial.user_attrs or "goes_on" in trial.user_attrs
            went_on |= self._contender(trial).is_standard
            if went_on or halving.goes_on(merit, [*merits, *[math.inf] * unseen]):
                if self._has_time_for(self._contender(trial), rungs=2):
                    trial.set_user_attr("goes_on", True)
                    trial.set_user_attr("paused", False)
                    self._attempt(trial)
            elif halving.goes_on(merit, [*merits, *[-math.inf] * unseen]):
                self.paused.append(trial)
            else:
                self._tell_state(trial, "PRUNED")

    def _has_time_for(self, contender: Contender, rungs: int = 1) -> bool:
        """Whether a trial can reach a rung before the end, at the speed of those before."""
        if self.end is None:
            return True
        name = rung_attribute(rungs - 1)
        seen = {t.number: t for t in counted(self.study) if name in t.user_attrs}
        own = [t for t in seen.values() if t.params.get(RECIPE, contender.name) == contender.name]
        took = [t.user_attrs[name]["seconds"] for t in own or seen.values()]
        return time.time() + (statistics.median(took) if took else 0.0) < self.end

    def seconds_of_tests(self, contender: Contender, at_rung: float) -> float:
        """About how long the tests at the end take: the median of those before.

        The first ones are estimated by the seconds of the tests ``at_rung``, which have fewer
        samples.
        """
        known = [t.user_attrs[TESTS] for t in counted(self.study) if TESTS in t.user_attrs]
        each = statistics.median(known) if known else at_rung * self._more_samples
        others = len(self.tuning.alphas) if contender.swept else 0
        return float(each * (1 + others + (not self.worker.has_tested_base)))

    @cached_property
    def _more_samples(self) -> float:
        """How many times the samples of a rung the tests at the end have."""
        return samples_in(self.plan) / samples_in(plan_at_rung(self.plan))

    def _put_back(self, trial: Any) -> None:
        """Undo the start of a trial; one that was enqueued is enqueued again."""
        fixed = self._stored(trial).system_attrs.get("fixed_params")
        kept = {n: v for n, v in trial.user_attrs.items() if n not in ("place", "worker")}
        self._tell_state(trial, "FAIL")
        if fixed:
            self.study.enqueue_trial(fixed, user_attrs=kept)

    def _do(self, trial: Any, name: str) -> None:
        contender = self._contender(trial)
        values = contender.draw(trial)
        is_default = {contender.parameter(n): v for n, v in values.items()}
        trial.set_user_attr("default", is_default.items() <= contender.defaults.items())
        spec = self.plan.spec(contender.name, self.tuning.seed, values, contender.recipe)
        if self.tuning.halves:
            self._report_known(trial)
        folder = self.folder / spec.id
        folder.mkdir(parents=True, exist_ok=True)
        reset_peak_memory()
        count_from_now()
        drawn = values.get(contender.swept or "")
        try:
            with self.worker.tracked(spec, name) as tracked:
                results: dict[float | None, Halves] | None = None
                stopped: Exception = Pruned()
                try:
                    results = self._train_and_test(trial, contender, spec, folder, tracked)
                except (Pruned, Paused, OutOfTime) as stop:  # in the trackers, it has not failed
                    stopped = stop
                tracked.conclude(results[drawn][0].figures if results else {"pruned": 1})
            if results is None:
                raise stopped
            self._tell(trial, contender, drawn, results)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _train_and_test(
        self, trial: Any, contender: Contender, spec: RunSpec, folder: Path, tracked: TrackedRun
    ) -> dict[float | None, Halves]:
        """Return the results on both halves, by value of the swept setting."""
        begin, found = time.monotonic(), {}
        rungs = Rungs(
            trial, begin, self.end, judge=partial(self._judge, trial),
            last_tests=partial(self.seconds_of_tests, contender),
            on_progress=partial(self.on_progress, trial.number),
        )  # fmt: skip

        def test(run: Run, curves: tuple[Curve, ...] | None = None) -> dict[float | None, Halves]:
            """Test at a rung, or with the curves of the whole training."""
            trained = time.monotonic() - begin - tracked.seconds
            rungs.progress("testing", 0, 1)
            at_end = curves is not None
            testers = self.testers if at_end else self.rung_testers
            both = partial(self._both, run, spec, testers, trained, curves or ())
            others = self.tuning.alphas if at_end else ()
            start, base = time.monotonic(), not self.worker.has_tested_base
            results = dict(self._candidates(run, contender, both, others))
            if at_end:
                each = (time.monotonic() - start) / (len(results) + base)
                trial.set_user_attr(TESTS, each)
            return results

        def at_end(run: Run, history: list[dict[str, float]]) -> None:
            found.update(test(run, curves_of(history)))

        looks = self.tuning.prune and spec.training.patience is None and not self.tuning.halves
        watch = partial(self._looking, trial) if looks else None
        self.worker.train(
            spec, folder, rungs.progress, watch, on_trained=at_end, tracked=tracked,
            on_update=partial(rungs.after, test=test) if self.tuning.halves else None,
        )  # fmt: skip
        return found

    def _candidates(
        self,
        run: Run,
        contender: Contender,
        both: Callable[[nn.Module], Halves],
        others: Sequence[float],
    ) -> Iterator[tuple[float | None, Halves]]:
        """Test a model as stage 4 leaves it, also at other values of the setting it sweeps."""
        merging, given = run.recipe.merging, {"data": run.data, "collate": run.collate}
        if merging.swept is None:
            yield None, both(merging.merge(run.model, run.anchors, **given))
            return
        drawn, ends = getattr(merging, merging.swept), contender.space[f"merging.{merging.swept}"]
        inside = [a for a in others if ends.low <= a <= ends.high and abs(a - drawn) > 0.005]
        yield from merging.sweep(run.model, run.anchors, [drawn, *inside], both, **given).items()

    def _both(
        self,
        run: Run,
        spec: RunSpec,
        testers: Sequence[Worker],
        trained: float,
        curves: tuple[Curve, ...],
        tuned: Any,
    ) -> Halves:
        """Test a merged model on both halves."""
        run.recall.on_merged(tuned, run.anchors)
        trainable, recipe = run.recipe.trainable, run.full_recipe
        is_finished = type(trainable).finish is Trainable.finish
        if not is_finished or hasattr(tuned, "merge_and_unload"):  # measuring merges the adapters
            tuned = trainable.finish(copy.deepcopy(tuned))
        start = time.monotonic()
        reports = [
            replace(worker.measure(spec.id, tuned, recipe), curves=curves) for worker in testers
        ]
        spent, memory = trained + time.monotonic() - start, peak_memory()
        one, other = (
            result_of(spec, recipe, report, self.worker.new, spent, memory) for report in reports
        )
        return one, other

    def _report_known(self, trial: Any) -> None:
        """Report the rungs that the trial had reached before it was stopped."""
        for rung in range(len(halving.RUNGS) - 1):
            if known := trial.user_attrs.get(rung_attribute(rung)):
                self._judge(trial, rung, known["merit"])

    def _judge(self, trial: Any, rung: int, merit: float) -> None:
        """Report the merit at a rung to Optuna's pruner; stop the trial if it does not go on."""
        step = halving.step_of(rung)
        if step not in self._stored(trial).intermediate_values:
            trial.report(merit, step)
        is_stopped = trial.should_prune()  # also lets others compare with it
        if "goes_on" in trial.user_attrs and rung == 0:
            return
        if rung == 0 and "first_look" in trial.user_attrs and self.tuning.prune:
            raise Paused
        is_baseline = "first_look" in trial.user_attrs and self._contender(trial).is_standard
        if is_stopped and not is_baseline:
            raise Pruned

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
                raise Pruned
            return {f"{PREFIX}distance": distance}

        return look

    def _tell(
        self,
        trial: Any,
        contender: Contender,
        drawn: float | None,
        found: Mapping[float | None, Halves],
    ) -> None:
        """Add all candidates to the study, the trial's own last: if it exists, so do the others."""
        import optuna

        for value, halves in sorted(found.items(), key=lambda row: row[0] == drawn):
            chosen, reported = _codec.encode(halves)
            both, goals = {"chosen": chosen, "reported": reported}, goals_in(halves[0])
            told: Any = merit_in(halves[0]) if self.tuning.halves else goals
            if value == drawn:
                if not is_finite(*goals):
                    raise Pruned
                trial.set_user_attr("halves", both)
                self.study.tell(trial, told)
            elif contender.swept and is_finite(*goals):
                other = optuna.trial.create_trial(
                    params={**trial.params, contender.parameter(contender.swept): value},
                    distributions=trial.distributions,
                    values=[told] if self.tuning.halves else told,
                    user_attrs={"of": trial.number, "halves": both},
                )
                self.study.add_trial(other)

    def _sampler(self) -> Any:
        import optuna

        # A continued search, and one on another machine, must draw other numbers.
        place, trials = place_of(self.folder), self.study.get_trials(deepcopy=False)
        drawn = [self.tuning.seed, self.number, len(trials), zlib.crc32(place.encode())]
        # With groups, the settings of each recipe are drawn together.
        options: dict[str, Any] = {"n_startup_trials": max(4, len(self.contenders)), "group": True}
        if not self.tuning.halves:
            (one,) = self.contenders.values()
            per_training = 1 + len(self.tuning.alphas) if one.swept in one.space else 1
            random_ones = max(4, int(self.most_trials) // 4)
            options = {"n_startup_trials": per_training * random_ones}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(
                seed=int(np.random.SeedSequence(drawn).generate_state(1)[0]),
                multivariate=True,
                **options,
            )

    def _resolve(self) -> None:
        """Choose the methods of stages 1 and 4 and the learning rate before the search, by model.

        The recall stays as it is in the recipe, and so do its settings.
        """
        if "resolved" in self.study.user_attrs:  # all processes must use the same
            return
        model, found = self.worker.load(), {}
        training = self.plan.common
        size = training.size_on(self.worker.samples(model, training.max_length))
        for name in self.names:
            recipe = read_recipe(name)[1]
            lr = training.lr if recipe.update.lr is None else recipe.update.lr
            if lr is None:
                lr = default_lr(recipe, model, self.worker.new, size)
            chosen, _ = resolved(recipe, model, default_lr=lr, new=self.worker.new)
            recipe = replace(recipe, trainable=chosen.trainable, merging=chosen.merging)
            found[name] = {"lr": lr, "recipe": _codec.encode(recipe.to_dict())}
        self.study.set_user_attr("resolved", found)

    def _median_loss(self) -> float | None:
        """None if the model has a new head."""
        if "median_loss" not in self.study.user_attrs:  # all processes must use the same number
            model, median = self.worker.load(), None
            if not self.worker.new:
                samples = self.worker.samples(model, self.plan.common.max_length)
                scores = score(model, samples, progress=False)
                median = float(np.median(scores.losses[scores.counts > 0].numpy()))
            self.study.set_user_attr("median_loss", median)
        known = self.study.user_attrs["median_loss"]
        return None if known is None else float(known)
