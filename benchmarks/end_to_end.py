"""What an update of a whole fine-tuning run takes: RecAdam and FLOW beside AdamW.

    python benchmarks/end_to_end.py --minilm DIR --rte rte-train.jsonl.gz \
        --smollm2 DIR --gsm8k gsm8k-train.jsonl.gz --out results.json

Models and tokenizers come from directories as transformers saves them. Where one holds no weights
they are random, which does not matter for time; the data does, and is real. The recipes
run in the loop of :func:`holdfast.finetune_loop`, an update of each in turn on the same batch, in
another order each time; ``adamw`` is torch's fused one. ``plain_adamw`` is a loop without holdfast
around the same optimizer, with the model's own loss. FLOW scores the data once, before:
``score_s``.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import importlib
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import default_device, describe, synchronize, write_results
from torch import nn

from holdfast import Recipe, score
from holdfast._torch.batch import to_device
from holdfast.data import pad_collate
from holdfast.hosts._updates import Updates, labels_of, order_of, source_of
from holdfast.losses import count_all
from holdfast.run import Run

Sample = dict[str, Any]
RECIPES = {
    "adamw": "standard",
    "recadam": "recadam",
    "flow": "flow",
    "recadam+flow": "recadam+flow",
}
WARM_UP = 10


def lines(path: Path, most: int) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for _, line in zip(range(most), file, strict=False)]


def minilm(where: Path, data: Path) -> tuple[Callable[[], nn.Module], list[Sample], int]:
    """MiniLM with a head of two classes, on pairs of sentences, 32 at a time."""
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    config = transformers.AutoConfig.from_pretrained(where, num_labels=2)
    rows = lines(data, 2490)
    samples = [
        {
            "input_ids": tokenizer(r["sentence1"], r["sentence2"], truncation=True, max_length=128)[
                "input_ids"
            ],
            "labels": int(r["label"]),
        }
        for r in rows
    ]
    return lambda: transformers.BertForSequenceClassification(config), samples, 32


def smollm2(where: Path, data: Path) -> tuple[Callable[[], nn.Module], list[Sample], int]:
    """SmolLM2-135M on questions and answers, 16 at a time; the answers are the targets."""
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    config = transformers.AutoConfig.from_pretrained(where)
    config.dtype = torch.float32
    samples = []
    for row in lines(data, 2000):
        asked = tokenizer(row["question"] + "\n")["input_ids"]
        told = tokenizer(row["answer"])["input_ids"]
        samples.append({"input_ids": asked + told, "labels": [-100] * len(asked) + told})
    return lambda: transformers.AutoModelForCausalLM.from_config(config), samples, 16


class ByRecipe:
    """The loop of :func:`holdfast.finetune_loop`, an update at a time."""

    def __init__(self, model: nn.Module, name: str, samples: list[Sample], batch: int) -> None:
        self.run = Run(
            Recipe.preset(RECIPES[name]), model, samples, lr=2e-5, collate=pad_collate, cache=False,
            progress=False,
        )  # fmt: skip
        self.updates = Updates(source_of(self.run, batch), 1, 0)
        self.optimizer = self.run.make_optimizer(10_000)
        self.device = next(model.parameters()).device
        self.run.model.train()

    def __call__(self, update: int) -> None:
        self.run.advance(update)
        batches = list(self.updates.batches(update))
        task = self.run.task
        targets = count_all([labels_of(batch, task) for batch in batches], task)
        for batch in (to_device(batch, self.device) for batch in batches):
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = self.run.loss(batch, targets, update)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class ByHand:
    """The same without holdfast, but for the collate function."""

    def __init__(self, model: nn.Module, samples: list[Sample], batch: int) -> None:
        self.model, self.samples, self.batch = model.train(), samples, batch
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=2e-5, weight_decay=0.0, fused=True
        )
        self.order = torch.cat([order_of(epoch, len(samples), 0) for epoch in range(50)])

    def __call__(self, update: int) -> None:
        indices = self.order[(update - 1) * self.batch : update * self.batch].tolist()
        given = pad_collate([self.samples[i] for i in indices])
        inputs = {name: value.to(self.device, non_blocking=True) for name, value in given.items()}
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self.model(**inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(
    case: str, make: Callable[[], nn.Module], samples: list[Sample], batch: int, args: Any
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = make().to(args.device)
    begin = time.perf_counter()
    score(model, samples, collate=pad_collate, batch_size=batch, cache=False, progress=False)
    score_s = time.perf_counter() - begin
    names = dict.fromkeys(["adamw", *args.recipes])
    loops: dict[str, Callable[[int], None]] = {
        "plain_adamw": ByHand(copy.deepcopy(model), samples, batch),
        **{name: ByRecipe(copy.deepcopy(model), name, samples, batch) for name in names},
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    order, shuffle = list(loops), random.Random(0).shuffle
    for update in range(1, WARM_UP + args.updates + 1):
        shuffle(order)
        for name in order:
            synchronize(args.device)
            begin = time.perf_counter()
            loops[name](update)
            synchronize(args.device)
            if update > WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - begin))
    ms = {name: statistics.median(found) for name, found in times.items()}
    # Of the same batch each: what differs between batches does not count.
    ratios = {
        other: {
            name: statistics.median(a / b for a, b in zip(found, times[other], strict=True))
            for name, found in times.items()
        }
        for other in ("adamw", "plain_adamw")
    }
    return [
        {
            "case": case,
            "impl": name,
            "ms": round(ms[name], 3),
            "x_adamw": round(ratios["adamw"][name], 4),
            "x_plain": round(ratios["plain_adamw"][name], 4),
            "score_s": round(score_s, 2) if "flow" in name else 0.0,
        }
        for name in loops
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("minilm", "rte", "smollm2", "gsm8k"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES, default=[*RECIPES], help="beside adamw"
    )
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    print(f"{describe(args.device)}, torch {torch.__version__}", flush=True)
    cases: dict[str, Any] = {}
    if args.minilm:
        cases["minilm, rte"] = minilm(args.minilm, args.rte)
    if args.smollm2:
        cases["smollm2, gsm8k"] = smollm2(args.smollm2, args.gsm8k)
    rows = []
    for case, (make, samples, batch) in cases.items():
        found = measure(case, make, samples, batch, args)
        rows += found
        for row in found:
            ratios = f"{row['x_adamw']:8.3f} × adamw{row['x_plain']:8.3f} × plain_adamw"
            print(f"{case:18}{row['impl']:16}{row['ms']:9.2f} ms{ratios}", flush=True)
    if args.out:
        protocol = (
            f"{args.updates} updates after {WARM_UP} in bfloat16 autocast, MiniLM-L6 on RTE 32 at "
            "a time, SmolLM2-135M on GSM8K 16 at a time, float32 weights (random: only shapes "
            "matter); an update of each in turn, with batch making, until the GPU is done; ms: "
            "median; x_adamw, x_plain: median of the ratios on the same batch"
        )
        write_results(args.out, args.device, protocol, rows=rows)


if __name__ == "__main__":
    main()
