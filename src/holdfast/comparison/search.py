"""The search behind ``tune``: Optuna asks, a worker trains, the study remembers everything.

A trial trains once by the recipe without its merging, and is tested at several α of WiSE-FT, which
cost no training: each of them is a point of the study. What the sampler sees is the half of the
tests that settings are chosen on; the other half lies beside it in the study, for the report.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from holdfast._torch.checks import share, whole_number
from holdfast._torch.rng import preserve_rng
from holdfast.comparison.halves import inputs_of
from holdfast.comparison.plan import TUNED_RECIPE, Plan, RunSpec
from holdfast.comparison.results import Measured, RunResult, measured, result_of
from holdfast.comparison.space import ALPHA, space_of, suggest
from holdfast.comparison.study import counted, hopeless, open_study, place_of
from holdfast.comparison.worker import Worker, peak_memory, reset_peak_memory
from holdfast.evaluate.watch import PREFIX, Watch, curves_of, effective_distance, watch_distance
from holdfast.io.models import Loader
from holdfast.recipe import read_recipe
from holdfast.run import Run
from holdfast.scoring.scorer import score

__all__ = ["Search", "Tuning", "goals_in"]

Halves = tuple[RunResult, RunResult]

#: Rows of each file, and characters of each text, that a look in mid-training takes.
LOOK_ROWS, LOOK_TEXT = 16, 4000


@dataclass(frozen=True)
class Tuning:
    """What to search.

    Attributes:
        recipe: a preset or a YAML file: the methods whose settings are searched.
        trials: models to train, over all machines together.
        space: ranges by dotted name, ``{"update.pull": [0.01, 0.5]}``, instead of the usual ones.
        alphas: WiSE-FT's α to test each trained model at, beside the one that is drawn.
        prune: give a training up that is worse, in target and in retained, than half of the others
            were at that moment.
        seed: of the training, and of the search.
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
        read_recipe(self.recipe)


class Search:
    """One process at work on a study.

    Args:
        plan: the model, the data and the tests.
        tuning: what to search.
        folder: where each training has a folder.
        storage, name: of the study.
        number: of this process, so that no two draw alike.
    """

    def __init__(
        self, plan: Plan, tuning: Tuning, folder: Path, storage: str, name: str, number: int = 0
    ) -> None:
        self.tuning, self.folder, self.number = tuning, folder, number
        # The harness's tasks cannot be halved: nothing is chosen on them.
        one = replace(plan.measuring, half=0, tasks=())
        self.plan = replace(plan, measuring=one)
        other = replace(plan, measuring=replace(plan.measuring, half=1))
        self.worker, self.reporter = Worker(self.plan, folder), Worker(other, folder)
        self.recipe = read_recipe(tuning.recipe)[1]
        self.study = open_study(storage, name)
        lr = self.recipe.update.lr or plan.training.lr
        self.space = space_of(self.recipe, lr, self._median_loss, tuning.space)
        self.defaults = {name: range_.default for name, range_ in self.space.items()}
        self.study.sampler = self._sampler()

    def run(self) -> None:
        """Ask for trials and do them."""
        try:
            self._run()
        finally:
            self.worker.close()
            self.reporter.close()

    def _run(self) -> None:
        from optuna.trial import TrialState

        self.study.enqueue_trial(self.defaults, skip_if_exists=True)
        while len(counted(self.study)) < self.tuning.trials:
            trial = self.study.ask()
            trial.set_user_attr("place", place_of(self.folder))
            trial.set_user_attr("worker", self.number)
            before = [t for t in counted(self.study) if t.number < trial.number]
            if len(before) >= self.tuning.trials:
                self.study.tell(trial, state=TrialState.FAIL)  # another process was quicker
                return
            try:
                self._do(trial)
            except _Hopeless:
                self.study.tell(trial, state=TrialState.PRUNED)
            except Exception as error:
                trial.set_user_attr("error", "".join(traceback.format_exception(error)))
                self.study.tell(trial, state=TrialState.FAIL)

    def _do(self, trial: Any) -> None:
        values = {name: suggest(range_, trial, name) for name, range_ in self.space.items()}
        trial.set_user_attr("default", values == self.defaults)
        spec = self.plan.spec(self.tuning.recipe, self.tuning.seed, values)
        place = self.folder / spec.id
        place.mkdir(parents=True, exist_ok=True)
        reset_peak_memory()
        try:
            self._tell(trial, values.get(ALPHA), self._train_and_test(trial, spec, place))
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _train_and_test(self, trial: Any, spec: RunSpec, place: Path) -> dict[float | None, Halves]:
        """The results on both halves, by α."""
        begin = time.monotonic()
        looks: dict[str, Sequence[float]] = {}
        found: dict[float | None, Halves] = {}

        def look(update: int, goals: Sequence[float]) -> None:
            looks[str(update)] = goals
            trial.set_user_attr("looks", looks)
            if not all(map(math.isfinite, goals)) or hopeless(self.study, update, goals):
                raise _Hopeless

        def watch(model: nn.Module, total: int) -> Watch:
            if not self.tuning.prune:
                return watch_distance(model, total)
            return _Look(model, total, self.plan, self.worker.tokenizer, look)

        def test(run: Run, history: list[dict[str, float]]) -> None:
            curves, trained = curves_of(history), time.monotonic() - begin

            def both(tuned: Any) -> Halves:
                if hasattr(tuned, "merge_and_unload"):  # which would change it
                    tuned = copy.deepcopy(tuned)
                start = time.monotonic()
                reports = [w.measure(spec.id, tuned) for w in (self.worker, self.reporter)]
                spent = trained + time.monotonic() - start
                one, other = (
                    result_of(spec, replace(r, curves=curves), spent, peak_memory())
                    for r in reports
                )
                return one, other

            merging = run.recipe.merging
            if merging.swept is not None:
                alphas = self._alphas(getattr(merging, merging.swept))
                swept = merging.sweep(
                    run.model, run.anchors, alphas, both, data=run.data, collate=run.collate
                )
                found.update(swept.items())
            else:
                found[None] = both(run.model)

        self.worker.train(spec, place, watch=watch, on_trained=test)
        return found

    def _alphas(self, drawn: float) -> list[float]:
        """The α to test at: what was drawn, and those of the range that are not next to it."""
        ends = self.space[ALPHA]
        others = [a for a in self.tuning.alphas if ends.low <= a <= ends.high]
        return [drawn, *(alpha for alpha in others if abs(alpha - drawn) > 0.005)]

    def _tell(self, trial: Any, drawn: float | None, found: dict[float | None, Halves]) -> None:
        """The trial's own point last: where it is, all others are."""
        import optuna

        for alpha, halves in sorted(found.items(), key=lambda row: row[0] == drawn):
            chosen, reported = (json.loads(half.to_json()) for half in halves)
            both, goals = {"chosen": chosen, "reported": reported}, goals_in(halves[0])
            if alpha == drawn:
                if not all(map(math.isfinite, goals)):
                    raise _Hopeless
                trial.set_user_attr("halves", both)
                self.study.tell(trial, goals)
            elif all(map(math.isfinite, goals)):
                other = optuna.trial.create_trial(
                    params={**trial.params, ALPHA: alpha},
                    distributions=trial.distributions,
                    values=goals,
                    user_attrs={"of": trial.number, "halves": both},
                )
                self.study.add_trial(other)

    def _sampler(self) -> Any:
        import optuna

        # A search that goes on, and one on another machine, draws other numbers.
        drawn = [
            self.tuning.seed, self.number, len(self.study.get_trials(deepcopy=False)),
            zlib.crc32(place_of(self.folder).encode()),
        ]  # fmt: skip
        points = 1 + len(self.tuning.alphas) if ALPHA in self.space else 1
        return optuna.samplers.TPESampler(
            seed=int(np.random.SeedSequence(drawn).generate_state(1)[0]),
            multivariate=True,
            n_startup_trials=points * max(4, self.tuning.trials // 4),
        )

    def _median_loss(self) -> float | None:
        """The median loss of the training data; None if the model has a new head."""
        model = self.worker.load()
        if self.worker.new:
            return None
        if "median_loss" not in self.study.user_attrs:  # one for all processes, to the last digit
            samples = self.worker.samples(model, self.plan.training.max_length)
            scores = score(model, samples, progress=False)
            median = float(np.median(scores.losses[scores.counts > 0].numpy()))
            self.study.set_user_attr("median_loss", median)
        return float(self.study.user_attrs["median_loss"])


class _Hopeless(Exception):  # noqa: N818 (no error)
    """A training that leads nowhere."""


class _Look(Watch):
    """The two goals in mid-training, on a few samples: at each quarter of the run."""

    def __init__(
        self,
        model: nn.Module,
        total: int,
        plan: Plan,
        tokenizer: Any,
        seen: Callable[[int, Sequence[float]], None],
    ) -> None:
        given = inputs_of(plan)
        super().__init__(
            model,
            every=max(1, total // 4),
            text={name: words[:LOOK_TEXT] for name, words in given["text"].items()},
            data=given["data"],
            target=given["target"],
            similarity=given["similarity"],
            limit=LOOK_ROWS,
            kl_samples=0,
            loader=Loader(max_length=plan.measuring.max_length, tokenizer=tokenizer),
        )
        self.total, self.seen = total, seen

    def __call__(self, update: int, model: nn.Module) -> dict[str, float]:
        """The goals of this moment; what is said of them may end the training."""
        if update % self.every or update in (0, self.total):
            return {}
        devices = [p.device for p in list(model.parameters())[:1] if p.device.type == "cuda"]
        with preserve_rng(devices), self.loader.open(model) as loaded:
            scores = [
                score
                for probe, before in zip(self.probes, self.before, strict=True)
                for score in probe.scores(before, probe.run(loaded, progress=False))
            ]
        target = next(measured(s) for s in scores if s.role == "target")
        retained = [measured(s) for s in scores if s.role != "target"]
        moved = 0.0 if retained else effective_distance(model, self.reference)
        goals = goals_of(target, retained, moved)
        self.seen(update, goals)
        return {f"{PREFIX}distance": effective_distance(model, self.reference)}


def goals_of(target: Measured, retained: Sequence[Measured], moved: float) -> tuple[float, float]:
    """The target, and the mean of what the tests lost, or else how far it moved: less is better."""
    lost = [max(0.0, -test.relative) for test in retained]
    sign = 1 if target.lower_is_better else -1
    return sign * target.after, sum(lost) / len(lost) if lost else moved


def goals_in(result: RunResult) -> tuple[float, float]:
    """The same of a run."""
    far = 0.0 if result.drift is None else result.drift.relative
    moved = result.kl.get("context-free", next(iter(result.kl.values()), far))
    return goals_of(result.target, result.retained, moved)
