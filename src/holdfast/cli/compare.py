"""``holdfast compare``: which method, for my model and my data?"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.cli._config import make_parser, parsed
from holdfast.cli._default import default_jobs, with_default
from holdfast.cli._progress import Progress
from holdfast.cli.measure import check_out
from holdfast.io.storage import Place

if TYPE_CHECKING:
    from holdfast.comparison.plan import Plan, RunSpec
    from holdfast.comparison.scheduler import Finished

EXAMPLES = """
Without a model it compares on a small one that comes with holdfast: a first look, offline.

  holdfast compare
  holdfast compare --model DIR --data train.jsonl --target dev.jsonl \\
      --measuring.text '[wiki.txt]' --recipes '[standard, recadam, flow]' --training.lr 1e-4
  holdfast compare --config plan.yaml --out results      # goes on where it was stopped
  holdfast compare --config plan.yaml --out s3://bucket/results --engine ray --gpus 1
"""


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand."""
    from holdfast.comparison.plan import Plan

    parser = make_parser(
        "compare", "Fine-tune by many recipes and compare them.", EXAMPLES, example=True
    )
    parser.add_class_arguments(Plan, None)
    parser.add_argument(
        "--out",
        type=str,
        default="runs/compare",
        help="where the results go: a folder, or s3://… (fsspec)",
    )
    parser.add_argument(
        "--jobs", type=int, default=None, help="runs at a time (default: one a GPU, or a core)"
    )
    parser.add_argument("--engine", type=str, default="local", help="local, or ray for a cluster")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs that a run asks of Ray")
    parser.add_argument("--address", type=str, default=None, help="of the Ray cluster")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    # EWC looks at 1000 samples by default: for a first look fewer do.
    chosen = parsed(parser, with_default(arguments, "--options={penalties.samples: 64}"))
    made = parser.instantiate(chosen)
    plan = Plan(**{name: made[name] for name in Plan.__dataclass_fields__})
    run(plan, Place.at(chosen.out), chosen, parser.dump(chosen))


def run(plan: Plan, out: Place, chosen: Any, config: str) -> None:
    """Do the runs, and show what came of them."""
    from holdfast.comparison.check import check_inputs
    from holdfast.comparison.scheduler import compare, finished_runs

    check_out(out.folder)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # there is a bar for all of it
    jobs = default_jobs() if chosen.jobs is None else chosen.jobs
    done, total = len(finished_runs(plan, out)), len(list(plan.runs()))
    if done < total:
        check_inputs(plan)
    with Progress(total, "runs", done) as progress:

        def under_way(spec: RunSpec, doing: str, done: int, total: int) -> None:
            progress.update(_name(spec), done, total, doing)

        def finished(run: Finished) -> None:
            last = (run.error or "").strip().rpartition("\n")[2]
            progress.finished(_name(run.spec), f"failed: {last[:200]}" if run.error else "done")

        results = compare(
            plan, out.name, jobs=jobs, engine=chosen.engine, gpus=chosen.gpus,
            address=chosen.address, config=config, on_finished=finished, on_progress=under_way,
        )  # fmt: skip
    if not results.runs:
        reason = next(iter(results.failed.values()), "")
        raise ValueError(f"every run failed, the first by {reason} ({(out / 'failed').name})")
    (out / "report.md").write_text(results.to_markdown())
    (out / "report.html").write_text(results.to_html())
    if chosen.json:
        print(results.to_json())
    else:
        results.to_terminal()
    print(f"The report: {(out / 'report.html').name}", file=sys.stderr)


def _name(spec: RunSpec) -> str:
    values = "".join(f" {name}={value}" for name, value in spec.values.items())
    return f"{spec.recipe}{values}, seed {spec.seed}"
