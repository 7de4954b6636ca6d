"""``holdfast tune``: a recipe's settings, by a search with two goals."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.cli._config import make_parser, parsed
from holdfast.cli._default import default_jobs, with_default
from holdfast.cli._progress import Progress
from holdfast.cli.measure import check_out

EXAMPLES = """
It searches the learning rate and what the methods of the recipe have: RecAdam's pull (lr·γ), t0 and
width (1/k) as fractions of the run, FLOW's τ, MoFO's fraction, LoRA's rank, strengths of penalties,
WiSE-FT's α, which costs no training. Settings are chosen on one half of the tests and reported on
the other. Without a model it takes the small one that comes with holdfast.

  holdfast tune
  holdfast tune --model DIR --data train.jsonl --target dev.jsonl --measuring.text '[wiki.txt]' \\
      --recipe recadam+flow+wise-ft --trials 50 --out tuned
  holdfast tune --config tuned/config.yaml               # goes on where it was stopped
  holdfast tune … --storage postgresql://host/db         # on several machines, as one search
  holdfast finetune … --recipe tuned/recipe.yaml         # with what was found
"""


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand."""
    from holdfast.comparison.plan import Plan
    from holdfast.comparison.search import Tuning

    parser = make_parser(
        "tune", "Find the settings of a recipe: target against retained.", EXAMPLES, example=True
    )
    parser.add_class_arguments(Tuning, None)
    parser.add_class_arguments(Plan, None, skip={"recipes", "seeds", "grid"})
    parser.add_argument("--out", type=str, default="runs/tune", help="the folder to write")
    parser.add_argument(
        "--storage", type=str, default=None,
        help="a journal file, or a database's URL, that machines share (default: OUT/study.log)",
    )  # fmt: skip
    parser.add_argument("--name", type=str, default="holdfast", help="of the study in the storage")
    parser.add_argument(
        "--jobs", type=int, default=None, help="trainings at a time (default: one a GPU, or a core)"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    chosen = parsed(parser, with_default(arguments))
    made = parser.instantiate(chosen)
    tuning = Tuning(**{name: made[name] for name in Tuning.__dataclass_fields__})
    known = {name: made[name] for name in Plan.__dataclass_fields__ if name in made}
    plan = Plan(**known, recipes=(tuning.recipe,), seeds=(tuning.seed,))
    run(plan, tuning, chosen, parser.dump(chosen))


def run(plan: Any, tuning: Any, chosen: Any, config: str) -> None:
    """Search, and show what was found."""
    from holdfast.comparison.check import check_inputs
    from holdfast.comparison.tuning import tune
    from holdfast.io.files import write_whole

    out = Path(chosen.out)
    check_out(out)
    check_inputs(plan)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "config.yaml", lambda path: path.write_text(config))
    jobs = default_jobs() if chosen.jobs is None else chosen.jobs
    ended: set[int] = set()
    with Progress(tuning.trials, "trials") as progress:

        def on_trials(trials: list[Any]) -> None:
            for number, trial in enumerate(trials, 1):
                if trial.state.name == "RUNNING" and "at" in trial.user_attrs:
                    progress.update(f"trial {number}", *trial.user_attrs["at"])
                if trial.state.is_finished() and trial.number not in ended:
                    ended.add(trial.number)
                    progress.finished(f"trial {number}", _words(trial))

        found = tune(
            plan, tuning, out, storage=chosen.storage, name=chosen.name, jobs=jobs,
            on_trials=on_trials,
        )  # fmt: skip
    results = found.results(plan)
    for file, text in (
        ("recipe.yaml", found.to_yaml()),
        ("tune.json", found.to_json() + "\n"),
        ("results.json", results.to_json() + "\n"),
        ("report.md", results.to_markdown()),
        ("report.html", results.to_html()),
    ):
        write_whole(out / file, lambda path, text=text: path.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    if chosen.json:
        print(found.to_json())
    else:
        results.to_terminal()
        print("\n".join(["", *found.sentences()]))
    print(f"The recipe: {out / 'recipe.yaml'}; the report: {out / 'report.html'}", file=sys.stderr)


def _words(trial: Any) -> str:
    if trial.state.name == "PRUNED":
        return "given up"
    if trial.state.name == "FAIL":
        return f"failed: {str(trial.user_attrs['error']).strip().rpartition(chr(10))[2][:200]}"
    settings = " ".join(f"{name}={value:.3g}" for name, value in trial.params.items())
    return f"target {abs(trial.values[0]):.4g}, lost {100 * trial.values[1]:.3g} % ({settings})"
