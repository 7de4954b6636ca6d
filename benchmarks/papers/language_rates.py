"""The defaults of self-replay and of the learning rate, chosen on data that no table reports.

SmolLM2-135M-Instruct learns the source of Python's standard library (200 updates of 32 windows of
256 tokens, less than an epoch) with the schedule of language.py. Learned: the loss on modules that
it was not trained on. Kept: the losses on Shakespeare, on WikiText-2's validation split, and on
answers of GSM8K's training split.

    python benchmarks/papers/language_rates.py --model SMOLLM2 --data DATA --runs RUNS
    python benchmarks/papers/language_rates.py --runs RUNS --collect language_rates.json

DATA holds lm/tinyshakespeare.txt.gz, lm/wikitext2-valid.txt.gz and lm/gsm8k-train.jsonl.gz.
Processes that are started side by side with the same RUNS share the work.
"""

from __future__ import annotations

import functools
import gzip
import random
import sysconfig
from pathlib import Path
from typing import Any

import _jobs
import torch
from _lm_tests import Test, Tests, load, split_answer
from _lm_train import BATCH
from _summary import comparison, mean_points
from additivity_lm import answers, read
from language import TRAINING, Bench, Plan
from torch import nn

from holdfast import LoRA, Recipe, SelfReplay
from holdfast.io.encoding import tokenize, windows
from holdfast.io.models import Loaded

WINDOW = 256
RATES = (2.5e-4, 5e-4, 1e-3)
LORA_RATES = (1.5e-3, 3e-3, 6e-3)
LR = 5e-4  # of the variants
FIELDS = ("python_nll", "shakespeare_nll", "wikitext_valid_nll", "gsm8k_train_nll")
#: Not trained on; together a little more than 120,000 tokens.
TESTED = (
    "heapq", "textwrap", "bisect", "fractions", "statistics", "argparse", "calendar", "dataclasses",
    "difflib", "configparser", "shutil", "csv", "tarfile",
)  # fmt: skip
#: Tests, data in the form of code, and programs of their own.
LEFT_OUT = (
    "test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo", "pydoc_data", "site-packages",
    "dist-packages",
)  # fmt: skip


def plans() -> dict[str, Plan]:
    """Their learning rates are the rates themselves, not multiples."""

    def replay(**settings: Any) -> Plan:
        return Plan(Recipe(recall=SelfReplay(**{"share": 0.25, **settings})), LR)

    both = Recipe(trainable=LoRA(r=16), recall=SelfReplay(share=0.25))
    return {
        **{f"self-replay-{lr:g}": replay()._replace(lr=lr) for lr in RATES},
        **{f"standard-{lr:g}": Plan(Recipe(), lr) for lr in RATES},
        "self-replay-strength-3": replay(strength=3.0),
        "self-replay-share-0.5": replay(share=0.5),
        "self-replay-length-64": replay(share=0.5, length=64),
        "self-replay-no-chats": replay()._replace(chats=False),
        **{f"lora+self-replay-{lr:g}": Plan(both, lr) for lr in LORA_RATES},
    }


class RatesBench(Bench):
    """The bench of language.py with other data and tests."""

    alphas: tuple[float, ...] = (0.5, 0.7)

    def tokens(self, name: str) -> list[int]:
        with gzip.open(self.folder / f"{name}.txt.gz", "rt", encoding="utf-8") as file:
            return tokenize(self.tokenizer, file.read())

    @property
    def samples(self) -> list[dict[str, list[int]]]:
        return self.python_windows

    @functools.cached_property
    def python_windows(self) -> list[dict[str, list[int]]]:
        """Windows to learn, from all over the library."""
        text = self.python(learned=True)
        generator = torch.Generator().manual_seed(0)
        places = torch.randperm(len(text) // WINDOW, generator=generator) * WINDOW
        rows = [text[place : place + WINDOW] for place in places.tolist()]
        return [{"input_ids": row, "labels": row} for row in rows[: self.args.updates * BATCH]]

    def python(self, learned: bool) -> list[int]:
        """Modules of the standard library: those to learn, or those to test."""
        name = "python-learned" if learned else "python"
        found: list[int] = self.kept(name, lambda: tokenize(self.tokenizer, source(learned)))
        return found

    @functools.cached_property
    def tests(self) -> Tests:
        limit, model = self.args.limit, load(self.args.model, self.device)
        python = text_test(self, "python", self.python(learned=False))
        drawn = self.drawn(model, min(64, limit))
        return Tests([python, *retained(self)], drawn, model, self.tokenizer)


def retained(bench: RatesBench) -> list[Test]:
    """What the model should keep."""
    limit = bench.args.limit
    shakespeare = bench.kept("shakespeare", lambda: bench.tokens("tinyshakespeare"))
    wikitext = bench.kept("wikitext2-valid", lambda: bench.tokens("wikitext2-valid"))
    rows = random.Random(0).sample(read(bench.folder / "gsm8k-train.jsonl.gz"), limit)
    solved = [split_answer(sample) for sample in answers(bench.tokenizer, rows)]
    return [
        text_test(bench, "shakespeare", shakespeare),
        text_test(bench, "wikitext_valid", wikitext),
        {"name": "gsm8k_train", "kind": "text", "requests": solved},
    ]


def text_test(bench: RatesBench, name: str, tokens: list[int]) -> Test:
    """The beginning of a text, in windows."""
    first = Loaded(nn.Identity(), "causal_lm", bench.tokenizer, WINDOW).first_token()
    requests = windows(tokens[: 240 * bench.args.limit], first, WINDOW)
    return {"name": name, "kind": "text", "requests": requests}


def source(learned: bool) -> str:
    """Modules of the running Python's standard library, one after another, in their own order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in sorted(folder.rglob("*.py"))
        if not {*file.relative_to(folder).parts} & {*LEFT_OUT}
        and (file.parent == folder and file.stem in TESTED) != learned
    ]
    return "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


def run_jobs(bench: RatesBench, jobs: dict[str, Any], **protocol: Any) -> None:
    """Run the jobs of a table and exit, or put the finished ones together and show them."""
    args = bench.args
    protocol = {
        "model": "SmolLM2-135M-Instruct (Q4_1, dequantised)",
        "target": f"Python's standard library; tested on {', '.join(TESTED)}",
        "kept": {
            "shakespeare": "tinyshakespeare",
            "wikitext_valid": "WikiText-2, validation split",
            "gsm8k_train": "answers of GSM8K's training split, as chats",
        },
        **protocol,
        "batch_size": BATCH, "window": WINDOW, "rows_a_test": args.limit, "seed": 0,
        "training": TRAINING,
    }  # fmt: skip
    jobs = _jobs.work_or_collect(jobs, args, protocol)
    done = _jobs.records(args.runs)
    print(comparison(mean_points(done[name] for name in jobs if name in done), FIELDS))


def make_parser(about: str | None) -> _jobs.Parser:
    parser = _jobs.Parser(about)
    parser.add_input("--model")
    parser.add_input("--data")
    parser.add_argument(
        "--limit", type=int, default=500, help="240 tokens of a text, or answers, of a test"
    )
    return parser


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--updates", type=int, default=200)
    parser.set_defaults(lr=1.0)
    bench = RatesBench(parser.parse_args())
    torch.set_float32_matmul_precision("high")
    jobs: dict[str, Any] = {"rates-pretrained": bench.pretrained}
    for name, plan in plans().items():
        jobs[f"rates-{name}"] = functools.partial(bench.run, name, plan, 0)
    run_jobs(bench, jobs, updates=bench.args.updates)


if __name__ == "__main__":
    main()
