"""Search the settings of a recipe with Optuna: the best on the target that forgets little.
Without --model and --config, it runs on a small model that comes with holdfast, offline.

examples:
  holdfast tune
  holdfast tune --model DIR --data train.jsonl --target dev.jsonl --text wiki.txt \\
      --recipe recadam+flow+wise-ft --trials 50 --out tuned
  holdfast tune --config plan.yaml --space update.pull 0.01 0.5 --space lr 1e-5 1e-3
  holdfast finetune --model DIR --data train.jsonl --recipe tuned/recipe.yaml --out final

The search varies the learning rate and the settings of the recipe's methods. It chooses settings on
one half of the tests and reports them on the other half. The same command continues a stopped
search; machines that share --storage work on one search.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from holdfast.cli._guard import check_page
from holdfast.cli._options import (
    Parser,
    add,
    add_settings,
    config_input,
    config_text,
    settings_from,
)
from holdfast.cli._progress import Progress
from holdfast.cli.compare import add_plan_options, demo_settings, jobs_of
from holdfast.comparison.inputs import check_inputs, paths_of
from holdfast.comparison.plan import Plan
from holdfast.comparison.search import Tuning
from holdfast.comparison.tuning import Tuned, tune_in
from holdfast.hosts.tracking import Tracking
from holdfast.io.outputs import claim, output_name
from holdfast.io.storage import Place
from holdfast.report.printing import tell, tell_line


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, needed=("model", "data", "target"))
    parser.demo = demo_settings
    add(parser, "config", "print_config")
    add_plan_options(parser, skip=("half",))  # which the search chooses
    search = parser.add_argument_group("search")
    add(search, "recipe", default=Tuning.recipe)
    add_settings(search, Tuning, skip=("recipe", "seed"))
    add(search, "set", "seed")
    storage = "journal file or database URL that machines share (default: study.log in --out)"
    search.add_argument("--storage", help=storage)
    search.add_argument("--name", default="holdfast", help="name of the study in the storage")
    output = parser.add_argument_group("output and running")
    add(output, "out", default="runs/tune")
    add(output, "json", "jobs")
    add_settings(output, Tracking)


def run(options: argparse.Namespace) -> None:
    tuning = settings_from(Tuning, options)
    plan = settings_from(Plan, options, recipes=(tuning.recipe,), seeds=(tuning.seed,))
    out = Place.at(Path(output_name(options.out)))
    check_page()
    settings_from(Tracking, options).check()
    with claim(out, "tune", [*paths_of(plan), *config_input(options)]):
        check_inputs(plan)
        show(search_all(plan, tuning, out, options), plan, out, options)


def search_all(plan: Plan, tuning: Tuning, out: Place, options: argparse.Namespace) -> Tuned:
    """Search, with the progress on the terminal."""
    names: dict[int, str] = {}
    ended: set[int] = set()
    with Progress(tuning.trials, "trials") as progress:

        def on_trials(trials: list[Any]) -> None:
            for order, trial in enumerate(trials, 1):
                name = names.setdefault(trial.number, f"trial {order}")
                if trial.state.is_finished() and trial.number not in ended:
                    ended.add(trial.number)
                    progress.finished(name, _words(trial))

        def under_way(number: int, doing: str, done: int, total: int) -> None:
            if number in names and number not in ended:
                progress.update(names[number], done, total, doing)

        return tune_in(
            out.folder, plan, tuning, storage=options.storage, name=options.name,
            jobs=jobs_of(options), config=config_text(options),
            tracking=settings_from(Tracking, options), on_trials=on_trials, on_progress=under_way,
        )  # fmt: skip


def show(found: Tuned, plan: Plan, out: Place, options: argparse.Namespace) -> None:
    """Write the results of a search, and print them."""
    results = found.results(plan)
    for file, text in {
        "recipe.yaml": found.to_yaml(),
        "tune.json": found.to_json(),
        "results.json": results.to_json(),
        "report.md": results.to_markdown(),
        "report.html": results.to_html(),
    }.items():
        (out / file).write_text(text)
    if options.json:
        tell(found.to_json(), end="")
    else:
        results.to_terminal()
        tell("\n".join(["", *found.sentences()]))
    recipe, page = out / "recipe.yaml", out / "report.html"
    tell_line(f"Recipe: {recipe.name}; report: {page.name}", file=sys.stderr)


def _words(trial: Any) -> str:
    if trial.state.name == "PRUNED":
        return "stopped early"
    if trial.state.name == "FAIL":
        return f"failed: {str(trial.user_attrs['error']).strip().rpartition(chr(10))[2][:200]}"
    settings = " ".join(f"{name}={value:.3g}" for name, value in trial.params.items())
    return f"target {abs(trial.values[0]):.4g}, lost {100 * trial.values[1]:.3g} % ({settings})"
