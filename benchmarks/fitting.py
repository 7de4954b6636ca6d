"""What the options that fit a model into memory save: the peak memory and the time of an update.

    python benchmarks/fitting.py --size 1.5b --results fitting.json

A language model with random weights, which change neither time nor memory, is trained on sequences
of random tokens: half of the sequences are short, so that packing has padding to save. Each row is
a process of its own. The time is the median of the updates after the first two.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import default_device, describe, write_results

from holdfast import Recipe
from holdfast.hosts.job import Training, train

RESULTS = Path(__file__).parent / "results" / "fitting_h200.json"
#: (hidden, intermediate, layers, heads, key-value heads, vocabulary)
SIZES = {"tiny": (64, 128, 2, 4, 2, 512), "1.5b": (1536, 8960, 28, 12, 2, 151936)}
LENGTH = 512
ADAPTERS = {"trainable": {"name": "lora"}}
ROUNDED = {"update": {"name": "recadam", "stochastic_rounding": True, "eight_bit": True}}
#: For each row: the recipe and the settings of the training.
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fit_full": ({}, {}),
    "fit_accumulate": ({}, {"batch_size": 4, "accumulate": 4}),
    "fit_checkpointing": ({}, {"gradient_checkpointing": True}),
    "fit_packing": ({}, {"packing": True, "batch_size": 9}),
    "fit_bfloat16": ({}, {"dtype": "bfloat16"}),
    "fit_rounded": (ROUNDED, {"dtype": "bfloat16"}),
    "fit_lora": (ADAPTERS, {}),
    "fit_lora_8bit": (ADAPTERS, {"load_in_8bit": True}),
    "fit_lora_4bit": (ADAPTERS, {"load_in_4bit": True}),
    "fit_lora_4bit_checkpointing": (
        ADAPTERS,
        {"load_in_4bit": True, "gradient_checkpointing": True, "batch_size": 4, "accumulate": 4},
    ),
}


def save_model(folder: str, size: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, layers, heads, keys, vocabulary = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=keys,
        max_position_embeddings=LENGTH, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    with default_device():
        model: Any = LlamaForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(folder)


def run_row(folder: str, name: str, updates: int, vocabulary: int) -> dict[str, Any]:
    """Train for a few updates; return the peak memory and the time of an update."""
    recipe, settings = ROWS[name]
    training = Training(
        lr=1e-5, max_updates=updates, max_length=LENGTH, save_seconds=1e9,
        **{"batch_size": 16, **settings},
    )  # fmt: skip
    draw = random.Random(0)
    lengths = [draw.choice((LENGTH, draw.randrange(16, 128))) for _ in range(16 * updates)]
    rows = [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]
    samples = [{"input_ids": ids, "labels": list(ids)} for ids in rows]
    model = training.loader(default_device()).load(folder)
    ends: list[float] = []

    def clock(update: int, model: Any) -> dict[str, float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
        return {"clock": ends[-1]}

    with tempfile.TemporaryDirectory() as out:
        train(
            model, Recipe.from_dict(recipe), samples, training, Path(out),
            watch=lambda model, total: clock,
        )  # fmt: skip
    seconds = [end - start for start, end in itertools.pairwise(ends[2:])]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"update_ms": round(1e3 * statistics.median(seconds), 1), "peak_gb": peak / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--row", choices=ROWS, help="only this row, of the model in --model")
    parser.add_argument("--model", help="directory of the model")
    options = parser.parse_args()
    if options.row:
        found = run_row(options.model, options.row, options.updates, SIZES[options.size][-1])
        print(json.dumps(found))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, options.size)
        for name in ROWS:
            words = [sys.executable, __file__, "--row", name, "--model", folder]
            words += ["--size", options.size, "--updates", str(options.updates)]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                print(f"{name}: {done.stderr[-2000:]}", file=sys.stderr)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            first = rows[0] if rows else found
            row = {"case": f"{options.size}, {LENGTH} tokens", "impl": name}
            row |= {"update_ms": found["update_ms"], "peak_gb": round(found["peak_gb"], 3)}
            row |= {"x_adamw": round(found["update_ms"] / first["update_ms"], 3)}
            row |= {"x_adamw_memory": round(found["peak_gb"] / max(first["peak_gb"], 1e-9), 3)}
            rows.append(row)
            print(row, flush=True)
    protocol = {
        "update": "16 sequences of 16 to 512 tokens, 9 packed ones",
        "time": f"median of {options.updates - 2} updates",
        "memory": "most memory that tensors held, with loading",
        "precision": "bfloat16 autocast",
    }
    write_results(options.results, default_device(), protocol, rows=rows)
    print(describe(default_device()))


if __name__ == "__main__":
    main()
