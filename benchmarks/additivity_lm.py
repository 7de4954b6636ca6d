"""Do methods add up on a language model? FLOW beside and together with L2-SP, LoRA and WiSE-FT.

SmolLM2-135M-Instruct learns grade-school math (GSM8K); what it retains is its loss on WikiText-2.
Every recipe of a seed sees the same batches; a pair is compared with its method alone.

    python benchmarks/additivity_lm.py --model SMOLLM2 --data DATA --seeds 0 1 2 --json FILE

DATA holds lm/gsm8k-{train,test}.jsonl.gz and lm/wikitext2-test.txt.gz; SMOLLM2 is a directory that
transformers reads. One seed takes some minutes on a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from _common import default_device, write_results
from torch import nn

from holdfast import (
    L2SP,
    Flow,
    LoopSettings,
    LoRA,
    Recipe,
    Reference,
    WiseFT,
    finetune_loop,
    pad_collate,
)
from holdfast.losses import token_losses

ALPHA = 0.5
LENGTH = 512
END = "<|im_end|>"  # of a turn; the tokenizer of a GGUF file may name another token as its end
RECIPES = {
    "standard": Recipe(),
    "FLOW": Recipe(objective=Flow()),
    "L2-SP": Recipe(penalties=[L2SP()]),
    "FLOW + L2-SP": Recipe(objective=Flow(), penalties=[L2SP()]),
    "LoRA": Recipe(trainable=LoRA(r=16)),
    "FLOW + LoRA": Recipe(trainable=LoRA(r=16), objective=Flow()),
}
PAIRS = {"FLOW + L2-SP": "L2-SP", "FLOW + LoRA": "LoRA", "FLOW + WiSE-FT": "WiSE-FT"}


def read(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def answers(tokenizer: Any, rows: Sequence[dict[str, str]]) -> list[dict[str, list[int]]]:
    """Questions and answers in the model's chat form; the answer is the target."""
    samples = []
    for row in rows:
        question = f"<|im_start|>user\n{row['question']}{END}\n<|im_start|>assistant\n"
        prompt = tokenizer(question)["input_ids"]
        answer = tokenizer(f"{row['answer']}{END}\n")["input_ids"]
        samples.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return [{k: v[:LENGTH] for k, v in sample.items()} for sample in samples]


def end_of_answer(tokenizer: Any) -> int:
    """The token that ends an answer."""
    ids: list[int] = tokenizer(END, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"{END} must be one token of the tokenizer, but it is {len(ids)}")
    return ids[0]


def windows(tokenizer: Any, path: Path) -> list[dict[str, list[int]]]:
    """Running text in pieces that do not overlap."""
    with gzip.open(path, "rt") as text:
        ids = tokenizer(text.read())["input_ids"]
    pieces = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH, LENGTH)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


@torch.no_grad()
def nll(model: nn.Module, samples: list[dict[str, list[int]]], batch_size: int = 32) -> float:
    """The mean loss of a target token."""
    model.eval()
    device, total, count = next(model.parameters()).device, 0.0, 0
    for i in range(0, len(samples), batch_size):
        batch = {n: t.to(device) for n, t in pad_collate(samples[i : i + batch_size]).items()}
        labels = batch.pop("labels")
        losses = token_losses(model(**batch).logits, labels, "causal_lm").values
        total, count = total + float(losses.double().sum()), count + len(losses)
    return total / count


def run(seed: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    folder = args.data / "lm"
    train = answers(tokenizer, read(folder / "gsm8k-train.jsonl.gz")[: args.samples])
    test = answers(tokenizer, read(folder / "gsm8k-test.jsonl.gz")[: args.test_samples])
    text = windows(tokenizer, folder / "wikitext2-test.txt.gz")[: args.test_samples]
    device = default_device()

    def load() -> nn.Module:
        model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        return cast(nn.Module, model.to(device))

    def measure(model: nn.Module) -> dict[str, float]:
        return {"target": nll(model, test), "retained": nll(model, text)}

    def warm_up_and_decay(update: int, total: int) -> float:
        return min((update + 1) / (0.03 * total), 1 - update / total)

    reference = Reference.of(pretrained := load())
    results = {"pretrained": measure(pretrained)}
    for name in args.only or RECIPES:
        recipe = RECIPES[name]
        lr = args.lora_lr if isinstance(recipe.trainable, LoRA) else args.lr
        model = finetune_loop(
            load(), recipe, train, lr=lr, epochs=args.epochs, batch_size=args.batch_size,
            seed=seed, progress=False, settings=LoopSettings(
                schedule=warm_up_and_decay, clip_norm=1.0,
                autocast=torch.bfloat16 if device.type == "cuda" else None,
            ),
        )  # fmt: skip
        results[name] = measure(model)
        if name in ("standard", "FLOW"):
            merged = WiseFT(ALPHA).merge(model, reference)
            results["WiSE-FT" if name == "standard" else "FLOW + WiSE-FT"] = measure(merged)
        print(f"seed {seed}: {name} {results[name]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lora-lr", type=float, default=5e-3)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=2500, help="of the training data")
    parser.add_argument("--test-samples", type=int, default=500, help="of the test data")
    parser.add_argument("--only", nargs="+", choices=RECIPES, help="some of the recipes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=Path, nargs="+", help="only put these files together")
    args = parser.parse_args()
    if not args.runs and not (args.model and args.data):
        parser.error("--model and --data are needed")

    torch.set_float32_matmul_precision("high")
    if args.runs:
        by_seed: dict[int, dict[str, dict[str, float]]] = {}
        for path in args.runs:  # a later file has the last word
            report = json.loads(path.read_text())
            for seed, figures in zip(report["protocol"]["seeds"], report["runs"], strict=True):
                by_seed.setdefault(seed, {}).update(figures)
        args.seeds, runs = list(by_seed), list(by_seed.values())
    else:
        runs = [run(seed, args) for seed in args.seeds]
    before = runs[0]["pretrained"]
    medians = {
        name: {kind: median(r[name][kind] for r in runs) for kind in ("target", "retained")}
        for name in runs[0]
    }
    print(f"{'median of ' + str(len(runs)) + ' seeds':24}{'GSM8K NLL':>10}{'WikiText NLL':>14}")
    for name, figures in medians.items():
        change = figures["retained"] - before["retained"]
        print(f"{name:24}{figures['target']:10.4f}{figures['retained']:10.4f} ({change:+.4f})")
    for pair, alone in PAIRS.items():
        if pair not in medians or alone not in medians:
            continue
        gains = [r[alone]["retained"] - r[pair]["retained"] for r in runs]
        print(f"{pair} retains more than {alone}, by seed: {[round(g, 4) for g in gains]}")
    if args.json and args.runs:
        report["protocol"]["seeds"] = args.seeds
        report |= {"medians": medians, "runs": runs}
        args.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    elif args.json:
        protocol = {
            "model": "SmolLM2-135M-Instruct (Q4_1, dequantised)", "target": "GSM8K",
            "retained": "WikiText-2 test, windows of 512", "lr": args.lr, "lora_lr": args.lora_lr,
            "epochs": args.epochs, "batch_size": args.batch_size, "samples": args.samples,
            "test_samples": args.test_samples, "wise_ft_alpha": ALPHA,
            "precision": "float32 weights, bfloat16 autocast",
            "schedule": "3 % warm-up, linear to 0", "seeds": args.seeds,
            "recipes": {name: recipe.to_dict() for name, recipe in RECIPES.items()},
        }  # fmt: skip
        write_results(args.json, default_device(), protocol, medians=medians, runs=runs)


if __name__ == "__main__":
    main()
