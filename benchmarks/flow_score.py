"""How fast FLOW's scoring is: beside a naive two-pass version and one epoch of training.

    python benchmarks/flow_score.py --data gsm8k-train.jsonl.gz --samples 400
    python benchmarks/flow_score.py --data gsm8k-train.jsonl.gz --model smollm2-135m --device cuda

The naive version does what research code does: it pads every sample to the longest of the dataset,
computes the logits of all positions in float32, and passes over the data twice, for τ and for the
weights. It and the epoch have ``--batch-size`` samples at a time; ``score`` chooses by itself. The
data is JSON lines with ``question`` and ``answer``; words and marks stand for tokens, the answers
are the targets. Weights are random: they do not matter for time.

The limit is the forward pass over the batches that ``score`` makes, with the logits of the targets:
no losses, and nothing kept.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import re
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import torch
from _common import default_device, describe, write_results
from torch import nn
from torch.nn import functional as F  # noqa: N812

from holdfast import score
from holdfast.data import as_source, pad_collate
from holdfast.scoring.scorer import TOKENS

VOCABULARY = 49152
MODELS = {
    "llama-12m": {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 6},
    "smollm2-135m": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9},
}
Row = dict[str, list[int]]


class Figure(TypedDict):
    case: str
    impl: str
    ms: float
    x_limit: float
    seconds: float
    samples_per_s: float
    x_score: float
    x_epoch: float


def make_model(name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")  # its types are not of use here
    torch.manual_seed(0)
    sizes = MODELS[name]
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        intermediate_size=sizes["hidden_size"] * 8 // 3,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        **sizes,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.to(device=device, dtype=dtype)


def read_rows(path: Path, most: int) -> list[Row]:
    def ids(text: str) -> list[int]:
        words = re.findall(r"\w+|[^\w\s]", text)
        return [zlib.crc32(w.encode()) % VOCABULARY for w in words]

    opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)  # noqa: SIM115
    with opened as lines:
        texts = [json.loads(line) for _, line in zip(range(most), lines, strict=False)]
    pairs = [(ids(t["question"]), ids(t["answer"])) for t in texts]
    return [{"input_ids": q + a, "labels": [-100] * len(q) + a} for q, a in pairs]


def to(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


@torch.no_grad()
def naive(model: nn.Module, rows: list[Row], batch_size: int, device: torch.device) -> torch.Tensor:
    longest = max(len(row["input_ids"]) for row in rows)
    padding = {"input_ids": [0] * longest, "labels": [-100] * longest}
    model.eval()

    def one_pass() -> torch.Tensor:
        losses = []
        for start in range(0, len(rows), batch_size):
            batch = pad_collate([*rows[start : start + batch_size], padding])
            batch = to({name: value[:-1] for name, value in batch.items()}, device)
            labels = batch.pop("labels")[:, 1:]
            logits = model(**batch).logits[:, :-1].float()
            nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            losses.append(nll.view_as(labels).sum(1) / (labels != -100).sum(1))
        return torch.cat(losses).cpu()

    tau = one_pass().median()
    weights: torch.Tensor = torch.exp(-one_pass() / tau)
    return weights


@torch.no_grad()
def forward_alone(model: nn.Module, rows: list[Row], device: torch.device) -> None:
    """The batches of ``score``, as far as the logits of their targets."""
    body: Any = model.base_model
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    model.eval()
    source: Any = as_source(rows, pad_collate, 16)
    source.tokens = 0 if device.type == "cpu" else TOKENS
    for _, read in source:
        batch = to(read(), device)
        labels = batch.pop("labels")
        states = body(**batch, use_cache=False).last_hidden_state[:, :-1]
        head(states[labels[:, 1:] != -100])


def train_epoch(model: nn.Module, rows: list[Row], batch_size: int, device: torch.device) -> None:
    """One epoch as a host runs it: shuffled, padded by batch, AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    for start in range(0, len(rows), batch_size):
        batch = to(pad_collate([rows[i] for i in order[start : start + batch_size]]), device)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    begin = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="JSON lines, .gz or not")
    parser.add_argument("--samples", type=int, default=10**9, help="take the first N")
    parser.add_argument("--model", choices=MODELS, default="llama-12m")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()

    rows = read_rows(args.data, args.samples)
    model = make_model(args.model, args.device, getattr(torch, args.dtype))
    lengths = sorted(len(row["input_ids"]) for row in rows)
    case = f"{args.model}, {len(rows)} samples of {lengths[len(rows) // 2]} (at most {lengths[-1]})"
    print(f"{describe(args.device)}, torch {torch.__version__}, {args.dtype}\n{case}")

    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:

        def run_score(cache: str | bool) -> Callable[[], Any]:
            return lambda: score(model, rows, collate=pad_collate, cache=cache, progress=False)

        run_score(False)()  # warms up
        for repeat in range(args.repeats):
            fresh = f"{folder}/{repeat}"
            for impl, function in (
                ("score", run_score(fresh)),
                ("score_cached", run_score(fresh)),
                ("forward_alone", lambda: forward_alone(model, rows, args.device)),
                ("naive_two_pass", lambda: naive(model, rows, args.batch_size, args.device)),
                ("train_epoch", lambda: train_epoch(model, rows, args.batch_size, args.device)),
            ):
                took = seconds(function, args.device)
                best[impl] = min(took, best.get(impl, took))
                print(f"  {impl:16}{took:9.2f} s", flush=True)

    figures: list[Figure] = [
        {
            "case": case,
            "impl": impl,
            "ms": round(1e3 * s, 2),
            "x_limit": round(s / best["forward_alone"], 4),
            "seconds": round(s, 4),
            "samples_per_s": round(len(rows) / s, 2),
            "x_score": round(s / best["score"], 4),
            "x_epoch": round(s / best["train_epoch"], 4),
        }
        for impl, s in best.items()
    ]
    print(f"{'':18}{'seconds':>10}{'samples/s':>12}{'× score':>10}{'× limit':>10}")
    for row in figures:
        print(f"{row['impl']:18}{row['seconds']:10.2f}{row['samples_per_s']:12.1f}", end="")
        print(f"{row['x_score']:10.3f}{row['x_limit']:10.3f}")
    print(f"score takes {best['score'] / best['train_epoch']:.2f} of a training epoch")
    if args.out:
        protocol = (
            f"{args.dtype}, batch size {args.batch_size} for naive_two_pass and train_epoch, the "
            f"default of score for score, best of {args.repeats} interleaved rounds; limit = "
            "forward_alone, the batches of score as far as the logits of their targets, without "
            "losses"
        )
        write_results(args.out, args.device, protocol, rows=figures)


if __name__ == "__main__":
    main()
