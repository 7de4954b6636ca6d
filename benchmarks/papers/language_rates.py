"""The learning rate of a language model, chosen on data that no results table reports.

SmolLM2-135M-Instruct learns Shakespeare (200 updates of 32 windows of 256 tokens, at random places
of the first 90 % of the text) with the schedule of language.py. Learned: the loss on the last 10 %.
Kept: the loss on WikiText-2's validation split.

    python benchmarks/papers/language_rates.py --model SMOLLM2 --data DATA --runs RUNS
    python benchmarks/papers/language_rates.py --runs RUNS --collect language_rates.json

DATA holds lm/tinyshakespeare.txt.gz and lm/wikitext2-valid.txt.gz. Processes that are started side
by side with the same RUNS share the work.
"""

from __future__ import annotations

import functools
import gzip
import sys
from typing import Any

import _jobs
import torch
from _lm_tests import Test, Tests, draw, load
from _lm_train import BATCH
from language import Bench, Plan
from torch import nn

from holdfast import LoRA, Recipe, SelfReplay
from holdfast.io.encoding import tokenize, windows
from holdfast.io.models import Loaded

WINDOW = 256
RATES = (2.5e-4, 5e-4, 1e-3)
LORA_RATES = (1.5e-3, 3e-3, 6e-3)


def plans() -> dict[str, Plan]:
    """Their learning rates are the rates themselves, not multiples."""
    replay, adapters = Recipe(recall=SelfReplay()), LoRA(r=16)
    found = {f"standard-{lr:g}": Plan(Recipe(), lr) for lr in RATES}
    found |= {f"self-replay-{lr:g}": Plan(replay, lr) for lr in RATES}
    both = Recipe(trainable=adapters, recall=SelfReplay())
    return found | {f"lora+self-replay-{lr:g}": Plan(both, lr) for lr in LORA_RATES}


class RatesBench(Bench):
    """The bench of language.py with other data and tests."""

    def tokens(self, name: str) -> list[int]:
        with gzip.open(self.folder / f"{name}.txt.gz", "rt", encoding="utf-8") as file:
            return tokenize(self.tokenizer, file.read())

    @functools.cached_property
    def text(self) -> tuple[list[int], list[int]]:
        """Shakespeare: the tokens to learn, and the held-out ones."""
        tokens = self.kept("shakespeare", lambda: self.tokens("tinyshakespeare"))
        cut = len(tokens) * 9 // 10
        return tokens[:cut], tokens[cut:]

    @functools.cached_property
    def samples(self) -> list[dict[str, list[int]]]:
        text, _ = self.text
        generator = torch.Generator().manual_seed(0)
        places = torch.randint(len(text) - WINDOW, (self.args.samples,), generator=generator)
        rows = [text[place : place + WINDOW] for place in places.tolist()]
        return [{"input_ids": row, "labels": row} for row in rows]

    @functools.cached_property
    def tests(self) -> Tests:
        limit, model = self.args.limit, load(self.args.model, self.device)
        first = Loaded(nn.Identity(), "causal_lm", self.tokenizer, WINDOW).first_token()

        def test(name: str, tokens: list[int]) -> Test:
            some = tokens[: 240 * limit]
            return {"name": name, "kind": "text", "requests": windows(some, first, WINDOW)}

        wikitext = self.kept("wikitext2-valid", lambda: self.tokens("wikitext2-valid"))
        drawn = self.kept("drawn", lambda: draw(model, self.tokenizer, min(64, limit)))
        tests = [test("shakespeare", self.text[1]), test("wikitext_valid", wikitext)]
        return Tests(tests, drawn, model, self.tokenizer)


def table(runs: list[_jobs.Record]) -> str:
    lines = [f"{'':26}{'α':>5}{'Shakespeare':>13}{'WikiText-2':>12}{'KL':>8}"]
    for run in runs:
        for alpha, point in run["points"].items():
            figures = f"{point['shakespeare_nll']:13.4f}{point['wikitext_valid_nll']:12.4f}"
            lines.append(f"{run['run']:26}{alpha:>5}{figures}{point['kl_context_free']:8.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = _jobs.Parser(__doc__)
    parser.add_input("--model")
    parser.add_input("--data")
    parser.add_argument("--samples", type=int, default=200 * BATCH, help="windows to learn")
    parser.add_argument("--limit", type=int, default=500, help="240 tokens each, of a test")
    parser.set_defaults(lr=1.0)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    bench = RatesBench(args)
    jobs: dict[str, Any] = {"pretrained": bench.pretrained}
    jobs |= {name: functools.partial(bench.run, name, plan, 0) for name, plan in plans().items()}
    jobs = _jobs.selected(jobs, args.only)
    if args.collect is None:
        sys.exit(1 if _jobs.work(jobs, args.runs, args.seconds) else 0)
    protocol = {
        "model": "SmolLM2-135M-Instruct (Q4_1, dequantised)", "target": "tinyshakespeare",
        "kept": "WikiText-2, validation", "updates": args.samples // BATCH, "batch_size": BATCH,
        "window": WINDOW, "seed": 0,
        "training": "float32 weights, bfloat16 autocast, 3 % warm-up, linear to 0, clipped to 1",
    }  # fmt: skip
    _jobs.collect(args.runs, jobs, args.collect, protocol)
    done = _jobs.records(args.runs)
    print(table([done[name] for name in jobs if name in done]))


if __name__ == "__main__":
    main()
