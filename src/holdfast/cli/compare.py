"""Fine-tune with many recipes and compare what they learn and forget.
Without --model and --config, it runs on a small model that comes with holdfast, offline.

examples:
  holdfast compare
  holdfast compare --model DIR --data train.jsonl --target dev.jsonl --text wiki.txt \\
      --recipes standard recadam flow --seeds 0 1 2 --lr 1e-4 --grid merging.alpha 0.3 0.5
  holdfast compare --config plan.yaml --out s3://bucket/results --engine ray --gpus 1

The same command continues a stopped comparison. --out may be an address that fsspec can write.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from holdfast.cli import _options
from holdfast.cli._guard import Failed, check_page, show
from holdfast.cli._options import (
    Parser,
    add,
    add_settings,
    config_input,
    config_text,
    settings_from,
)
from holdfast.cli._progress import Progress
from holdfast.comparison.crew import crew_for
from holdfast.comparison.estimate import overview
from holdfast.comparison.inputs import check_inputs, paths_of
from holdfast.comparison.plan import Measuring, Plan, RunSpec
from holdfast.comparison.processes import reason
from holdfast.comparison.rates import with_rates
from holdfast.comparison.results import Results
from holdfast.comparison.scheduler import compare_in, finished_runs
from holdfast.hosts.job import Training
from holdfast.hosts.tracking import Tracking
from holdfast.io.outputs import claim, output_name
from holdfast.io.storage import Place
from holdfast.report.printing import tell_line


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, needed=("model", "data", "target"))
    parser.demo = lambda: {**demo_settings(), "set": {"penalties.samples": 64}}  # 1000 takes long
    add(parser, "config", "print_config")
    add_plan_options(parser, skip=())
    recipes = parser.add_argument_group("recipes")
    add_settings(recipes, Plan, only=("recipes", "seeds", "grid"))
    add(recipes, "set", "learn_at_least")
    output = parser.add_argument_group("output and running")
    add(output, "out", default="runs/compare")
    add(output, "json", "jobs", "per_gpu")
    add_settings(output, Tracking)
    engine = "run in local processes, or on a Ray cluster"
    output.add_argument("--engine", **_options.one_of("local", "ray"), default="local", help=engine)
    _options.add(output, "gpus", default=0.0)
    output.add_argument("--address", help="address of the Ray cluster")


def add_plan_options(parser: Parser, skip: Sequence[str]) -> None:
    add(parser.add_argument_group("model and data"), *_options.DATA)
    training = parser.add_argument_group("training")
    add_settings(training, Training)
    add(training, "device")
    tests = parser.add_argument_group("tests")
    add(tests, "target")
    add_settings(tests, Measuring, skip=skip)


def demo_settings() -> dict[str, Any]:
    """Return options for a small model, math problems to learn, and texts to retain."""
    return {
        "model": "builtin", "data": "builtin", "target": "builtin:dev", "text": ["builtin"],
        "test_max_length": 256,
        "limit": 100, "context_free": 8, "lr": 1e-3, "max_updates": 40, "batch_size": 8,
        "max_length": 176,
    }  # fmt: skip


def run(options: argparse.Namespace) -> None:
    plan, out = settings_from(Plan, options), Place.at(output_name(options.out))
    check_page()
    settings_from(Tracking, options).check()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # Progress shows all of it
    with claim(out, "compare", [*paths_of(plan), *config_input(options)]):
        results = run_all(plan, out, options)
        if not results.runs:
            raise ValueError(failure(results, out))
        results = replace(results, learn_at_least=options.learn_at_least)
        show(results, options, out, "results.json", "report.md", "report.html")
        if results.failed:
            raise Failed(failure(results, out))


def run_all(plan: Plan, out: Place, options: argparse.Namespace) -> Results:
    """Do the runs of a plan, with their progress on the terminal."""
    plan = with_rates(plan)
    finished_before, total = finished_runs(plan, out), len(plan.runs)
    if left := [spec for spec in plan.runs if spec.id not in finished_before]:
        check_inputs(plan)
    else:
        tell_line(f"All {total} runs are finished, nothing is left to run.", file=sys.stderr)
    works = bool(left) and options.engine == "local"
    crew = crew_for(plan, options.jobs, options.per_gpu, works=works)
    if works:
        for line in overview(plan, left, crew):
            tell_line(line, file=sys.stderr)
    with Progress(total, "runs", total - len(left)) as progress:

        def under_way(spec: RunSpec, doing: str, done: int, total: int) -> None:
            progress.update(_name(spec), done, total, doing)

        def finished(spec: RunSpec, result: object, error: str | None) -> None:
            progress.finished(_name(spec), f"failed: {reason(error)[:200]}" if error else "done")

        return compare_in(
            out, plan, crew=crew, engine=options.engine, gpus=options.gpus,
            address=options.address, config=config_text(options),
            tracking=settings_from(Tracking, options), on_finished=finished, on_progress=under_way,
        )  # fmt: skip


def failure(results: Results, out: Place) -> str:
    first, total = next(iter(results.failed.values()), ""), len(results.runs) + len(results.failed)
    runs = f"{len(results.failed)} of {total} runs failed" if results.runs else "all runs failed"
    return f"{runs}; the first: {first} ({(out / 'failed').name})"


def _name(spec: RunSpec) -> str:
    values = "".join(f" {name}={value}" for name, value in spec.values.items())
    return f"{spec.recipe}{values}, seed {spec.seed}"
