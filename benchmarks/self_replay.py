"""What self-replay costs: the time and memory of an update beside plain fine-tuning, and drawing.

    python benchmarks/self_replay.py --smollm2 DIR --gsm8k gsm8k-train.jsonl.gz --out results.json

SmolLM2-135M learns GSM8K, eagerly in :func:`holdfast.train_loop`, where the host launches kernels
more slowly than the GPU runs them, and in the loop of papers/language.py, where a forward and
backward pass is one CUDA graph and nothing but the GPU takes time. The runs take turns, an update
of each on the same samples, in another order each time. ``adamw`` is plain fine-tuning,
``self_replay`` replays a text per four samples, ``self_replay_share_0.5`` (the default) and
``self_replay_share_1`` more, and ``self_replay_full`` compares the whole vocabulary with that of a
frozen copy of the model. A run's peak memory is what it holds between its updates plus the most
that an update adds; with CUDA graphs, all of its memory.

DIR may hold the configuration and the tokenizer only. The weights are then random: the times are
the same, but no text ends before its last token.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Runs that take turns in one process would otherwise free and reserve memory again and again.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from _common import default_device, describe, synchronize, write_results
from additivity_lm import answers, read
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent / "papers"))

from _lm_replay import replayed
from _lm_tests import attention_without_mask
from _lm_train import loss_of, make_batches, weights_of
from _loop import Batch, Gradient

from holdfast import LoopSettings, Recipe, Run, SelfReplay, pad_collate, train_loop
from holdfast.scoring.pool import Pool, draw_pool
from holdfast.scoring.starts import Start, default_starts

RECIPES = {
    "adamw": Recipe(),
    "self_replay": Recipe(recall=SelfReplay(share=0.25)),
    "self_replay_share_0.5": Recipe(recall=SelfReplay(share=0.5)),
    "self_replay_share_1": Recipe(recall=SelfReplay(share=1.0)),
    "self_replay_full": Recipe(recall=SelfReplay(share=0.25, top=None)),
}
BATCH, WARM_UP = 32, 5
CASE = "smollm2, gsm8k"
PARTS = ("graphed", "eager", "draw")
Loops = dict[str, Callable[[], None]]


class Loop(threading.Thread):
    """A run in :func:`holdfast.train_loop`, which makes one update whenever it is called."""

    def __init__(self, prepared: Run, updates: int) -> None:
        super().__init__(daemon=True)
        self.prepared, self.updates = prepared, updates
        self.turn, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.error: BaseException | None = None
        self.start()
        self._wait()

    def __call__(self) -> None:
        self.turn.release()
        self._wait()

    def run(self) -> None:
        settings = LoopSettings(
            max_updates=self.updates, autocast=torch.bfloat16, log_every=self.updates
        )
        try:
            train_loop(
                self.prepared, batch_size=BATCH, settings=settings, log=lambda _: None,
                watch=self._after_update,
            )  # fmt: skip
        except Exception as error:
            self.error = error
        self.done.release()

    def _after_update(self, update: int, model: nn.Module) -> dict[str, float]:
        if update < self.updates:
            self.done.release()
            self.turn.acquire()
        return {}

    def _wait(self) -> None:
        self.done.acquire()
        if self.error is not None:
            raise self.error


class Graphed:
    """A run whose forward and backward pass are CUDA graphs, which makes one update per call."""

    def __init__(self, prepared: Run, updates: int, device: torch.device) -> None:
        batches = make_batches(prepared.data, weights_of(prepared), 0, device)[:updates]
        loss = loss_of(prepared.model, *replayed(prepared, batches, device))
        self.step = prepared.make_optimizer(updates).step
        self.gradient = Gradient(loss, prepared.model.train().parameters())
        shapes: dict[Any, Batch] = {batch["input_ids"].shape: batch for batch in batches}
        for batch in sorted(shapes.values(), key=lambda batch: -batch["input_ids"].numel()):
            self.gradient(batch)  # captures a graph; the largest makes the room for all
        self.batches = iter(batches)

    def __call__(self) -> None:
        self.gradient(next(self.batches))
        self.step()


class Bench:
    """The model, the samples, and what is measured."""

    def __init__(self, args: argparse.Namespace, cache: str) -> None:
        from transformers import AutoTokenizer

        self.args, self.device, self.cache = args, args.device, cache
        self.tokenizer = AutoTokenizer.from_pretrained(args.smollm2)
        self.samples = answers(self.tokenizer, read(args.gsm8k)[:2000])

    def model(self, **options: Any) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        options |= {"dtype": torch.float32}
        if any(self.args.smollm2.glob("*.safetensors")):
            model = AutoModelForCausalLM.from_pretrained(self.args.smollm2, **options)
        else:
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(self.args.smollm2)
            model = AutoModelForCausalLM.from_config(config, **options)
        return model.to(self.device)

    def prepared(self, name: str, **options: Any) -> Run:
        return Run(
            RECIPES[name], self.model(**options), self.samples, lr=2e-5, collate=pad_collate,
            tokenizer=self.tokenizer, visits=self.total * BATCH, autocast=torch.bfloat16,
            cache=self.cache, progress=False,
        )  # fmt: skip

    @property
    def total(self) -> int:
        return WARM_UP + int(self.args.updates)

    def draw(self) -> list[dict[str, Any]]:
        """The seconds of a whole draw, with the capture of its CUDA graphs, and of its parts."""
        model = self.model()
        chats = default_starts(model, self.tokenizer)
        cases: dict[str, tuple[list[Start], int | None]] = {
            "draw_tokens": (default_starts(model), None),  # without predictions
            "draw_bos": (default_starts(model), 64),
            "draw_chats": (chats, 64),
        }

        def drawn(texts: int, starts: list[Start], top: int | None) -> Pool:
            # In the precision of the training below.
            with torch.autocast(self.device.type, torch.bfloat16):
                return draw_pool(model, texts, starts=starts, top=top, cache=False, progress=False)

        drawn(64, chats, 64)  # warm up
        rows = []
        for name, case in cases.items():
            before, begin = self.allocated(), time.perf_counter()
            pool = drawn(self.args.texts, *case)
            seconds = round(time.perf_counter() - begin, 2)
            row = {
                "case": f"{len(pool)} texts of 128 tokens", "impl": name, "seconds": seconds,
                "peak_gb": round(self.peak(before) / 1e9, 3),
                "drawn_tokens": int(pool.counts.sum()),
            }  # fmt: skip
            rows.append(row)
            print(*(f"{key} {value}" for key, value in row.items()), sep=", ", flush=True)
        return rows

    def allocated(self) -> int:
        """Bytes that are in use; the peak is counted anew."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self, before: int) -> int:
        """How many bytes more were in use at most."""
        return torch.cuda.max_memory_allocated() - before if self.device.type == "cuda" else 0

    def eager(self) -> list[dict[str, Any]]:
        loops, held = Loops(), {}
        for name in RECIPES:
            gc.collect()
            before = self.allocated()
            loops[name] = Loop(self.prepared(name), self.total)
            loops[name]()  # makes the optimizer's state
            gc.collect()
            held[name] = self.allocated() - before
        times, most = self.in_turn(loops)
        return rows_of(f"{CASE}, eager", times, {name: held[name] + most[name] for name in loops})

    def graphed(self) -> list[dict[str, Any]]:
        attention = attention_without_mask()
        loops, held = Loops(), {}
        for name in RECIPES:
            before = self.reserved()
            run = self.prepared(name, attn_implementation=attention)
            loops[name] = Graphed(run, self.total, self.device)
            loops[name]()  # makes the optimizer's state
            held[name] = self.reserved() - before
        return rows_of(f"{CASE}, CUDA graphs", self.in_turn(loops)[0], held)

    def reserved(self) -> int:
        """Bytes that are in use, or kept for CUDA graphs."""
        gc.collect()
        if self.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def in_turn(self, loops: Loops) -> tuple[dict[str, list[float]], dict[str, int]]:
        """Milliseconds of the updates, and the most bytes that one adds."""
        times: dict[str, list[float]] = {name: [] for name in loops}
        most = dict.fromkeys(loops, 0)
        order, shuffle = list(loops), random.Random(0).shuffle
        for update in range(1, self.total):
            shuffle(order)
            for name in order:
                synchronize(self.device)
                before, begin = self.allocated(), time.perf_counter()
                loops[name]()
                synchronize(self.device)
                if update >= WARM_UP:
                    times[name].append(1e3 * (time.perf_counter() - begin))
                    most[name] = max(most[name], self.peak(before))
        return times, most


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as cache:
        bench = Bench(args, cache)
        return [row for part in args.parts for row in getattr(bench, part)()]


def rows_of(case: str, times: dict[str, list[float]], most: dict[str, int]) -> list[dict[str, Any]]:
    rows, peaks = [], {name: round(size / 1e9, 3) for name, size in most.items()}
    for name, found in times.items():
        # Of the same samples each: what differs between batches does not count.
        ratios = [a / b for a, b in zip(found, times["adamw"], strict=True)]
        rows.append(
            {
                "case": case,
                "impl": name,
                "ms": round(statistics.median(found), 3),
                "x_adamw": round(statistics.median(ratios), 4),
                "x_adamw_mean": round(statistics.mean(found) / statistics.mean(times["adamw"]), 4),
                "peak_gb": peaks[name],
                "x_adamw_memory": round(peaks[name] / (peaks["adamw"] or 1.0), 4),
            }
        )
        print(*(f"{key} {value}" for key, value in rows[-1].items()), sep=", ", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--texts", type=int, default=4096, help="to draw")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    print(f"{describe(args.device)}, torch {torch.__version__}", flush=True)
    rows = measure(args)
    if args.out:
        protocol = (
            f"SmolLM2-135M on GSM8K, {BATCH} samples per update, float32 weights, bfloat16 "
            f"autocast; {args.updates} updates after {WARM_UP}, one of each in turn, until the GPU "
            "is done, eager ones with the making of batches; ms: median; x_adamw: median of the "
            "ratios on the same samples; peak_gb: what the run holds between updates and the most "
            "that one adds, with CUDA graphs all memory of the run; draws with everything that a "
            "call does"
        )
        write_results(args.out, args.device, protocol, rows=rows)


if __name__ == "__main__":
    main()
