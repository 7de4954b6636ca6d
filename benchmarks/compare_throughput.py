"""How much sooner a comparison ends if several of its runs share a GPU, as ``--per-gpu auto`` does.

    python benchmarks/compare_throughput.py --out results.json

The runs fine-tune a language model with the sizes of SmolLM2-135M and random weights on the data
that comes with holdfast, first one at a time and then as many as ``compare`` chooses. ``wall_s`` is
the time of the whole call, and ``work_s`` is without the start of the processes: from the first
training to the last result. The results of both must agree within ``TOLERANCE``: some kernels of a
GPU add numbers in any order. Without a GPU, one process with all cores is compared with one process
per core; ``--embedded`` takes the small model inside holdfast.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _common import default_device, write_results

from holdfast import Measuring, Plan, Training, builtin, compare
from holdfast.comparison.crew import PerGpu
from holdfast.comparison.results import Results

#: The largest relative difference of a score between a run alone and beside others.
TOLERANCE = 0.01
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """A comparison and its time."""

    results: Results
    wall_s: float
    work_s: float

    @property
    def at_a_time(self) -> int:
        return max(run.at_a_time or 1 for run in self.results.runs)

    def row(self, name: str) -> dict[str, Any]:
        runs = self.results.runs
        return {
            "impl": name,
            "at_a_time": self.at_a_time,
            "wall_s": round(self.wall_s, 1),
            "work_s": round(self.work_s, 1),
            "run_s": round(statistics.median(run.seconds for run in runs), 2),
            "peak_gb": round(max(run.peak_memory for run in runs) / 1e9, 2),
            "losses": {run.id: run.target.after for run in runs},
        }


def save_model(folder: Path) -> None:
    """Save a model with random weights, and the tokenizer of the embedded one."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMOLLM2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(builtin.MODEL).save_pretrained(folder)


def plan_for(model: Path, options: argparse.Namespace) -> Plan:
    seeds = options.runs // len(options.recipes)
    return Plan(
        model=str(model),
        data=str(builtin.TRAIN),
        target=str(builtin.DEV),
        measuring=Measuring(
            text=(str(builtin.RETAINED["prose"]),), limit=32, context_free=0, max_length=256
        ),
        recipes=tuple(options.recipes),
        seeds=tuple(range(seeds)),
        training=Training(
            lr=1e-4, max_updates=options.updates, batch_size=options.batch_size, max_length=256
        ),
    )


def timed(plan: Plan, out: Path, *, jobs: int | None, per_gpu: PerGpu) -> Timed:
    """Do all runs of a plan."""
    begin, first = time.monotonic(), 0.0

    def under_way(*_: Any) -> None:
        nonlocal first
        first = first or time.monotonic()

    results = compare(plan, out, jobs=jobs, per_gpu=per_gpu, on_progress=under_way)
    if results.failed:
        raise SystemExit(
            f"{len(results.failed)} runs failed: {next(iter(results.failed.values()))}"
        )
    end = time.monotonic()
    return Timed(results, end - begin, end - first)


def largest_difference(one: Results, other: Results) -> float:
    """The largest relative difference between the scores of the same runs."""
    theirs = {run.id: run for run in other.runs}
    pairs = [
        (mine.after, yours.after)
        for run in one.runs
        for mine, yours in zip(
            (run.target, *run.retained),
            (theirs[run.id].target, *theirs[run.id].retained),
            strict=True,
        )
    ]
    return max(abs(mine - yours) / abs(mine) for mine, yours in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=["standard", "recadam"])
    parser.add_argument("--runs", type=int, default=10, help="over all recipes and seeds")
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--per-gpu", default="auto", help="runs at a time in the second comparison")
    parser.add_argument("--embedded", action="store_true", help="the small model inside holdfast")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = default_device()
    per_gpu: PerGpu = "auto" if options.per_gpu == "auto" else int(options.per_gpu)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = builtin.MODEL if options.embedded else folder / "model"
        if not options.embedded:
            save_model(model)
        plan = plan_for(model, options)
        one = 1 if device.type == "cpu" else None
        alone = timed(plan, folder / "alone", jobs=one, per_gpu=1)
        beside = timed(plan, folder / "beside", jobs=None, per_gpu=per_gpu)
    difference = largest_difference(alone.results, beside.results)
    ratio, work = alone.wall_s / beside.wall_s, alone.work_s / beside.work_s
    rows = [alone.row("one at a time"), beside.row("side by side")]
    for row in rows:
        print({key: value for key, value in row.items() if key != "losses"})
    print(f"{ratio:.2f} times the runs per hour ({work:.2f} without the start of the processes)")
    print(f"largest relative difference of a score: {difference:.2e}")
    protocol = {
        "model": "the embedded model" if options.embedded else "SmolLM2-135M, random weights",
        "runs": len(plan.runs), "recipes": options.recipes, "updates": options.updates,
        "batch_size": options.batch_size, "max_length": 256, "cores": os.cpu_count(),
    }  # fmt: skip
    found = {"x_runs": round(ratio, 3), "x_runs_without_start": round(work, 3)}
    write_results(options.out, device, protocol, **found, difference=difference, rows=rows)
    if difference > TOLERANCE:
        sys.exit(f"the results differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
