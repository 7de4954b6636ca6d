"""What an update of a whole fine-tuning run takes: RecAdam and FLOW beside AdamW.

    python benchmarks/end_to_end.py --minilm DIR --rte rte-train.jsonl.gz \
        --smollm2 DIR --gsm8k gsm8k-train.jsonl.gz --out results.json

Models and tokenizers come from directories as transformers saves them. Where one holds no weights
they are random, which does not matter for time; the data does, and is real. All recipes run in
:func:`holdfast.finetune_loop`, in turns, whose ``adamw`` is torch's fused one; ``plain_adamw`` is a
loop without holdfast around the same optimizer, with batches made ahead and the model's own loss.
FLOW scores the data once, before: ``score_s``.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import default_device, describe, write_results
from torch import nn

from holdfast import Recipe, finetune_loop, score
from holdfast.data import pad_collate
from holdfast.hosts._updates import order_of

Sample = dict[str, Any]
RECIPES = {
    "adamw": "standard",
    "recadam": "recadam",
    "flow": "flow",
    "recadam+flow": "recadam+flow",
}
EVERY = 10


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


def by_recipe(
    model: nn.Module, name: str, samples: list[Sample], batch: int, updates: int
) -> list[float]:
    """Milliseconds of an update, over every EVERY of them."""
    seen: list[float] = []

    def log(_: dict[str, float]) -> None:  # the loss was read: all is done up to here
        seen.append(time.perf_counter())

    finetune_loop(
        model, Recipe.preset(RECIPES[name]), samples, lr=2e-5, max_updates=updates,
        batch_size=batch, autocast=torch.bfloat16, log=log, log_every=EVERY, collate=pad_collate,
        progress=False,
    )  # fmt: skip
    return [1e3 * (b - a) / EVERY for a, b in itertools.pairwise(seen)]


def by_hand(model: nn.Module, samples: list[Sample], batch: int, updates: int) -> list[float]:
    """The same without holdfast."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0, fused=True)
    model.train()
    indices = torch.cat([order_of(epoch, len(samples), 0) for epoch in range(20)])
    batches = [
        pad_collate([samples[i] for i in part.tolist()])
        for part in indices[: batch * updates].split(batch)
    ]
    seen = []
    for update, given in enumerate(batches, 1):
        inputs = {name: value.to(device) for name, value in given.items()}
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if update % EVERY == 0:
            loss.item()
            seen.append(time.perf_counter())
    return [1e3 * (b - a) / EVERY for a, b in itertools.pairwise(seen)]


def measure(
    case: str, make: Callable[[], nn.Module], samples: list[Sample], batch: int, args: Any
) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {"plain_adamw": [], **{name: [] for name in RECIPES}}
    torch.manual_seed(0)
    model = make().to(args.device)
    kept = {name: p.detach().clone() for name, p in model.state_dict().items()}
    begin = time.perf_counter()
    score(model, samples, collate=pad_collate, batch_size=batch, cache=False, progress=False)
    score_s = time.perf_counter() - begin
    for turn in range(args.turns + 1):
        for name in times:
            model.load_state_dict(kept)
            if name == "plain_adamw":
                found = by_hand(model, samples, batch, args.updates)
            else:
                found = by_recipe(model, name, samples, batch, args.updates)
            if turn:  # the first is for warming up
                times[name] += found
    ms = {name: statistics.median(found) for name, found in times.items()}
    return [
        {
            "case": case,
            "impl": name,
            "ms": round(value, 3),
            "x_adamw": round(value / ms["adamw"], 4),
            "score_s": round(score_s, 2) if "flow" in name else 0.0,
        }
        for name, value in ms.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("minilm", "rte", "smollm2", "gsm8k"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--updates", type=int, default=40, help=f"a multiple of {EVERY}")
    parser.add_argument("--turns", type=int, default=8)
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
            print(f"{case:18}{row['impl']:16}{row['ms']:9.2f} ms{row['x_adamw']:8.3f} × adamw")
    if args.out:
        protocol = (
            f"{args.updates} updates in bfloat16 autocast, MiniLM-L6 on RTE 32 at a time, SmolLM2 "
            "(135 M, float32 weights, random) on GSM8K 16 at a time; ms: median over every "
            f"{EVERY} updates of {args.turns} turns after one of warm-up, recipes in turns; the "
            "loss is read at their ends"
        )
        write_results(args.out, args.device, protocol, rows=rows)


if __name__ == "__main__":
    main()
