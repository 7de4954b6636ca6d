"""Search a recipe and its settings with Optuna: of those that learn enough, what forgets least.
Without --model and --config, it runs on a small model that comes with holdfast, offline.

examples:
  holdfast tune
  holdfast tune --recipes all --budget 1h
  holdfast tune --model DIR --data train.jsonl --target dev.jsonl --text wiki.txt \\
      --recipe recadam+flow+wise-ft --trials 50 --out tuned
  holdfast tune --config plan.yaml --space update.pull 0.01 0.5 --space lr 1e-5 1e-3
  holdfast finetune --model DIR --data train.jsonl --recipe tuned/recipe.yaml --out final

The search varies the learning rate and the settings of the recipe's methods. It chooses settings on
one half of the tests and reports them on the other half. --recipes all stands for every recipe that
fits the model and the data. With several recipes or a budget, the search uses successive halving:
two thirds of the trainings stop at 1/9 of the updates, and two thirds of the others at 1/3. The
same command continues a stopped search; machines that share --storage work on one search.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.cli._guard import check_page, show
from holdfast.cli._options import (
    Only,
    Parser,
    add,
    add_settings,
    config_input,
    config_text,
    settings_from,
)
from holdfast.cli._progress import Progress
from holdfast.cli.compare import add_plan_options, demo_settings
from holdfast.comparison.contenders import ALL, RECIPE
from holdfast.comparison.crew import crew_for
from holdfast.comparison.goals import merit_in
from holdfast.comparison.halving import RUNGS
from holdfast.comparison.inputs import check_inputs, paths_of
from holdfast.comparison.plan import Plan
from holdfast.comparison.results import RunResult
from holdfast.comparison.search import Tuning
from holdfast.comparison.study import rung_attribute, rungs_reached
from holdfast.comparison.tuning import Begun, Tuned, tune_in
from holdfast.hosts.tracking import Tracking
from holdfast.io import codec as _codec
from holdfast.io.outputs import claim, output_name
from holdfast.io.storage import Place
from holdfast.report.printing import tell_line
from holdfast.report.recommend import lost
from holdfast.report.words import listed, score_text, seconds


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, needed=("model", "data", "target"))
    parser.demo = lambda: {**demo_settings(), "set": {"penalties.samples": 64}}  # 1000 takes long
    add(parser, "config", "print_config")
    add_plan_options(parser, skip=("half",))  # which the search chooses
    search = parser.add_argument_group("search")
    either = search.add_mutually_exclusive_group()
    add(either, "recipe", dest="recipes", action=Only, default=argparse.SUPPRESS)
    add_settings(either, Plan, only=("recipes",), recipes=Tuning.recipes)
    add_settings(search, Tuning, skip=("recipes", "learn_at_least", "seed"))
    add(search, "set", "learn_at_least", "seed")
    storage = "journal file or database URL that machines share (default: study.log in --out)"
    search.add_argument("--storage", help=storage)
    search.add_argument("--name", default="holdfast", help="name of the study in the storage")
    output = parser.add_argument_group("output and running")
    add(output, "out", default="runs/tune")
    add(output, "json", "jobs", "per_gpu")
    add_settings(output, Tracking)


def run(options: argparse.Namespace) -> None:
    tuning = settings_from(Tuning, options)
    named = tuple(name for name in tuning.recipes if name != ALL)
    plan = settings_from(Plan, options, recipes=named or Plan.recipes, seeds=(tuning.seed,))
    out = Place.at(Path(output_name(options.out)))
    check_page()
    settings_from(Tracking, options).check()
    with claim(out, "tune", [*paths_of(plan), *config_input(options)]):
        check_inputs(plan, named)
        found = search_all(plan, tuning, out, options)
        (out / "recipe.yaml").write_text(found.to_yaml())
        (out / "results.json").write_text(found.results().to_json())
        show(found, options, out, "tune.json", "report.md", "report.html")
        tell_line(f"Recipe: {(out / 'recipe.yaml').name}", file=sys.stderr)


def search_all(plan: Plan, tuning: Tuning, out: Place, options: argparse.Namespace) -> Tuned:
    """Search, with the progress on the terminal."""
    shown = Trials(tuning)
    try:
        return tune_in(
            out.folder, plan, tuning, storage=options.storage, name=options.name,
            crew=crew_for(plan, options.jobs, options.per_gpu), config=config_text(options),
            tracking=settings_from(Tracking, options), on_begin=shown.begin,
            on_trials=shown.see, on_progress=shown.update,
        )  # fmt: skip
    finally:
        shown.close()


class Trials:
    """The trials of a search on the terminal: their recipes, how far they are, the best so far."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.names: dict[int, str] = {}
        self.ended: set[int] = set()
        self.rungs: dict[int, int] = {}
        self.best: tuple[float, str] = (-math.inf, "")
        self.since, self.several, self.has_seen = 0.0, False, False
        self.progress: Progress | None = None

    def begin(self, begun: Begun) -> None:
        """Say what is searched and what is left out, before the first training."""
        (done, most), clock = begun.trials, begun.clock
        self.since, self.several = clock.begin, len(begun.recipes) > 1
        if self.several:
            names = listed(begun.recipes, most=len(begun.recipes))
            tell_line(f"{len(begun.recipes)} recipes: {names}", file=sys.stderr)
        for name, why in begun.left_out.items():
            tell_line(f"left out: {name}: {why}", file=sys.stderr)
        if self.tuning.seconds is not None:
            left = max(0.0, self.tuning.seconds - clock.before)
            said = f"budget {seconds(self.tuning.seconds)}, {seconds(left)} left"
            before = f" ({seconds(clock.before)} in earlier sessions)" if clock.before else ""
            tell_line(f"{said}{before}; {done} trials so far", file=sys.stderr)
        limit = None if math.isinf(most) else int(most)
        self.progress = Progress(limit, "trials", done, until=clock.end).__enter__()

    def close(self) -> None:
        if self.progress:
            self.progress.__exit__()

    def see(self, trials: Sequence[Any]) -> None:
        """Called with all trials that count."""
        assert self.progress is not None
        for order, trial in enumerate(trials, 1):
            recipe = trial.params.get(RECIPE)
            if trial.number in self.ended or (self.several and recipe is None):
                continue
            self.names[trial.number] = f"trial {order}" + (f", {recipe}" if recipe else "")
            reached = rungs_reached(trial)
            if trial.state.is_finished():
                self.ended.add(trial.number)
                said = self._words(trial)  # also of an earlier session: it may be the best
                if trial.datetime_complete.timestamp() >= self.since:
                    self.progress.finished(self.names[trial.number], said)
            elif reached > self.rungs.get(trial.number, 0):
                self.rungs[trial.number] = reached
                if self.has_seen:  # else it was reached in an earlier session
                    self.progress.note(self.names[trial.number], self._words(trial))
        self.has_seen = True

    def update(self, number: int, doing: str, done: int, total: int) -> None:
        if self.progress and number in self.names and number not in self.ended:
            self.progress.update(self.names[number], done, total, doing)

    def _words(self, trial: Any) -> str:
        if "error" in trial.user_attrs:
            return f"failed: {str(trial.user_attrs['error']).strip().rpartition(chr(10))[2][:200]}"
        reached = rungs_reached(trial)
        if trial.state.name == "COMPLETE":
            said, halves = "", trial.user_attrs["halves"]
        elif reached:
            stopped = "stopped " * trial.state.is_finished()
            said = f"{stopped}at {RUNGS[reached - 1]} of the updates, "
            halves = trial.user_attrs[rung_attribute(reached - 1)]["halves"]
        else:
            return "stopped early"
        result = _codec.decode(RunResult, halves["chosen"])
        score = score_text(result.target.metric, result.target.after)
        less = f", lost {lost(result.loss)}" if result.retained else ""
        values = trial.params.items()
        settings = " ".join(
            f"{n.rpartition(':')[2]}={v:.3g}" for n, v in values if isinstance(v, int | float)
        )
        text = f"{said}target {score}{less} ({settings})"
        return text + self._leader(trial, result) if self.tuning.halves else text

    def _leader(self, trial: Any, result: RunResult) -> str:
        """The best complete training so far, by merit."""
        if trial.state.name == "COMPLETE":
            name = self.names[trial.number]
            self.best = max(self.best, (merit_in(result), name))
            if self.best[1] == name:
                return "; the best so far"
        return f"; best so far: {self.best[1]}" if self.best[1] else ""
