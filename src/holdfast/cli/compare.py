"""``holdfast compare``: which method, for my model and my data?"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.cli._config import make_parser, parsed
from holdfast.cli.measure import check_out

EXAMPLES = """
Without a model it compares on a small one that comes with holdfast: a first look, offline.

  holdfast compare
  holdfast compare --model DIR --data train.jsonl --target dev.jsonl \\
      --measuring.text '[wiki.txt]' --recipes '[standard, recadam, flow]' --training.lr 1e-4
  holdfast compare --config plan.yaml --out results      # goes on where it was stopped
"""


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand."""
    from holdfast.compare.plan import Plan

    parser = make_parser("compare", "Fine-tune by many recipes and compare them.", EXAMPLES)
    parser.add_class_arguments(Plan, None)
    parser.add_argument("--out", type=str, default="runs/compare", help="where the results go")
    parser.add_argument(
        "--jobs", type=int, default=None, help="runs at a time (default: one a GPU, or a core)"
    )
    parser.add_argument("--engine", type=str, default="local", help="local, or ray for a cluster")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs that a run asks of Ray")
    parser.add_argument("--address", type=str, default=None, help="of the Ray cluster")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    given = list(arguments)
    names = {word.split("=")[0] for word in given}
    if not names & {"--model", "--config", "-h", "--help"}:
        given = [*_embedded(), *given]
    chosen = parsed(parser, given)
    made = parser.instantiate(chosen)
    plan = Plan(**{name: made[name] for name in Plan.__dataclass_fields__})
    run(plan, Path(chosen.out), chosen, parser.dump(chosen))


def run(plan: Any, out: Path, chosen: Any, config: str) -> None:
    """Do the runs, and show what came of them."""
    from holdfast._files import write_whole
    from holdfast.compare.compare import compare

    check_out(out)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "config.yaml", lambda path: path.write_text(config))
    jobs = _jobs() if chosen.jobs is None else chosen.jobs
    begin = time.monotonic()

    def tell(finished: Any, done: int, total: int) -> None:
        spent = time.monotonic() - begin
        here = sum(1 for _ in told) + 1
        told.append(finished)
        left = spent / here * (total - done)
        what = "failed: " + finished.error.strip().rpartition("\n")[2] if finished.error else "done"
        print(
            f"[{done}/{total}] {finished.spec.recipe}, seed {finished.spec.seed}: {what[:200]}"
            + (f" (about {left:.0f} s left)" if done < total else ""),
            file=sys.stderr,
        )

    told: list[Any] = []
    results = compare(
        plan, out, jobs=jobs, engine=chosen.engine, gpus=chosen.gpus, address=chosen.address,
        on_finished=tell,
    )  # fmt: skip
    if not results.runs:
        raise ValueError(f"every run failed: see {out / 'failed'}")
    results.save(out / "report.md")
    results.save(out / "report.html")
    if chosen.json:
        print(results.to_json())
    else:
        results.to_terminal()
    print(f"The report: {out / 'report.html'}", file=sys.stderr)


def _jobs() -> int:
    import torch

    return torch.cuda.device_count() or max(1, (os.cpu_count() or 1))


def _embedded() -> list[str]:
    """The settings of a first look: a small model, maths problems, and what it knew before."""
    import json

    from holdfast.compare.default import paths

    here = paths()
    texts = [str(path) for path in here.retained.values()]
    return [
        f"--model={here.model}", f"--data={here.train}", f"--target={here.dev}",
        f"--measuring.text={json.dumps(texts)}", "--measuring.max_length=256",
        "--measuring.limit=100", "--measuring.context_free=8", "--training.lr=3e-3",
        "--training.max_updates=40", "--training.batch_size=8", "--training.max_length=176",
    ]  # fmt: skip
