"""The learning rate of ``holdfast`` for a larger language model, on tasks that no table reports.

Qwen2.5-Coder-0.5B-Instruct learns solutions of MATH and letters of MedMCQA's answers, as SmolLM2
does in language_epochs.py, with the same tests. The learning rate of a case follows from that for
many samples and one epoch by the rule that was chosen there. :func:`_sizes.chosen` takes the one
with the highest sum of what is learned and what is kept. LoRA is run beside it on one case; its
learning rate is not chosen here.

    cd benchmarks/papers
    python language_sizes.py --model QWEN --data DATA --tasks TASKS --runs RUNS
    python language_sizes.py --runs RUNS --collect results/language_sizes.json
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import _jobs
import torch
from _epochs import KEPT
from _lm_train import BATCH
from _sizes import CASES, RATES, chosen, figures, lr_of, name_of
from language import TRAINING, Plan
from language_epochs import TESTED, EpochsBench
from language_rates import make_parser

from holdfast import LoRA, Recipe, SelfReplay

LORA_RATES = (8.7e-4, 3e-4, 1e-4)


def table(done: dict[str, _jobs.Record]) -> Iterable[str]:
    """What each run learned, and what it kept, in percent; then the choice."""
    found = {case: figures(done, case) for case in CASES}
    yield "run | learned, % of the best | kept, %"
    for case, rates in found.items():
        for rate, (learned, kept) in rates.items():
            yield f"{name_of(case, rate)} | {learned:.1f} | {kept:.1f}"
    if all(len(rates) == len(RATES) for rates in found.values()):
        yield f"chosen: {chosen(found):g}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_input("--tasks")
    parser.set_defaults(lr=1.0, updates=100)
    args = parser.parse_args()
    bench = EpochsBench(args)
    torch.set_float32_matmul_precision("high")
    jobs: dict[str, Any] = {"sizes-pretrained": bench.pretrained}
    for rate in RATES:
        for case in CASES:
            name, plan = name_of(case, rate), Plan(Recipe.preset("holdfast"), lr_of(case, rate))
            jobs[name] = functools.partial(bench.run_case, name, plan, case)
    lora = Recipe(trainable=LoRA(r=16), recall=SelfReplay())
    for rate in LORA_RATES:
        name, plan = f"sizes-lora-{rate:g}", Plan(lora, rate)
        jobs[name] = functools.partial(bench.run_case, name, plan, CASES[0])
    protocol = {
        "model": "Qwen2.5-Coder-0.5B-Instruct (Q4_K_M, dequantized)", "rates": RATES,
        "batch_size": BATCH, "cases": CASES, "tested": TESTED, "kept": KEPT, "seed": 0,
        "training": TRAINING,
    }  # fmt: skip
    _jobs.work_or_collect(jobs, args, protocol)
    print("\n".join(table(_jobs.records(args.runs))))


if __name__ == "__main__":
    main()
