"""The memory and time of an update of a causal language model, beside transformers' own loss.

    python benchmarks/loss_memory.py --model DIR --out results.json

``transformers`` is ``model(..., labels=labels).loss``, which keeps the logits of the whole batch.
``holdfast`` is plain fine-tuning by a recipe, which computes a chunk of logits at a time.
``holdfast_talr`` weighs each token by all losses of the batch, so that the output layer runs twice,
and ``holdfast_tmkl`` also compares the whole vocabulary with that of a frozen copy of the model.
``body`` has no output layer: its memory is the part that no loss can avoid. An update is a forward
and a backward pass and a step of AdamW. The updates take turns on one batch.

Without a DIR, the model has the shapes of SmolLM2-135M and random weights. A DIR may also hold the
configuration only. On a CPU, the peak is that of a process of its own, without what it needs before
the model is built: --layers, --rows and --length make it small.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from _common import default_device, describe, interleaved_medians, synchronize, write_results
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from holdfast import TALR, TMKL, Recipe, Run

IMPLEMENTATIONS = ("transformers", "holdfast", "body", "holdfast_talr", "holdfast_tmkl")
RECIPES = {
    "holdfast": Recipe(),
    "holdfast_talr": Recipe(objective=TALR()),
    "holdfast_tmkl": Recipe(recall=TMKL(cache=False)),
}
LR = 0.0  # all see the same weights, so that their losses can be compared
Batch = dict[str, Tensor]


def make_model(args: argparse.Namespace) -> nn.Module:
    """A model of DIR, or one with the shapes of SmolLM2-135M."""
    torch.manual_seed(0)
    more = {} if args.layers is None else {"num_hidden_layers": args.layers}
    if args.model is None:
        config: Any = LlamaConfig(
            **{"num_hidden_layers": 30, **more}, vocab_size=49152, hidden_size=576,
            intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
            max_position_embeddings=8192, tie_word_embeddings=True,
        )  # fmt: skip
    else:
        config = AutoConfig.from_pretrained(args.model, **more)
        if [*args.model.glob("*.safetensors")]:
            model: Any = AutoModelForCausalLM.from_pretrained(
                args.model, config=config, dtype=torch.float32
            )
            return cast(nn.Module, model.to(args.device).train())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return cast(nn.Module, model.to(args.device).train())


def make_batch(model: Any, args: argparse.Namespace) -> Batch:
    """Random tokens. The first ones of each row are a prompt, without labels."""
    generator = torch.Generator().manual_seed(0)
    shape = (args.rows, args.length)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=generator).to(args.device)
    labels = ids.clone()
    labels[:, : args.prompt] = -100
    return {"input_ids": ids, "labels": labels}


def loss_of(name: str, model: Any, batch: Batch) -> Callable[[], Tensor]:
    """What computes the loss of the batch."""
    if name == "transformers":
        return lambda: model(**batch, use_cache=False).loss
    if name == "body":
        body = model.base_model
        return lambda: (
            body(batch["input_ids"], use_cache=False).last_hidden_state.float().square().mean()
        )
    run = Run(RECIPES[name], model, [batch], lr=LR, collate=lambda rows: rows[0], progress=False)
    targets = (batch["labels"][:, 1:] != -100).sum()
    return lambda: run.loss(batch, targets, 1)


class Update:
    """An update by one implementation. The model and the optimizer are those of all of them."""

    def __init__(
        self, name: str, model: nn.Module, optimizer: Any, batch: Batch, args: argparse.Namespace
    ) -> None:
        self.name, self.model, self.optimizer, self.batch = name, model, optimizer, batch
        kind, dtype = args.device.type, args.autocast
        self.precision = nullcontext if dtype is None else lambda: torch.autocast(kind, dtype)
        self.device, self.loss = args.device, loss_of(name, model, batch)

    def __call__(self) -> Tensor:
        with self.precision():
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def wall_ms(function: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    function()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begin)


def resident(field: str) -> int:
    """The resident memory of this process in bytes: now (VmRSS), or its peak (VmHWM).

    The peak that ``getrusage`` returns may be that of the parent.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def run_alone(name: str, args: argparse.Namespace) -> None:
    """Two updates in a process of their own, which prints the memory that they needed."""
    before = resident("VmRSS")
    model = make_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    update = Update(name, model, optimizer, make_batch(model, args), args)
    update(), update()
    print(resident("VmHWM") - before)


def peak_bytes(update: Update, args: argparse.Namespace) -> int:
    """The most memory of an update, with the weights and the state of the optimizer."""
    if args.device.type == "cuda":
        gc.collect()
        synchronize(args.device)
        torch.cuda.reset_peak_memory_stats(args.device)
        update()
        return torch.cuda.max_memory_allocated(args.device)
    command = [sys.executable, *sys.argv, "--alone", update.name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="DIR")
    parser.add_argument("--layers", type=int, help="instead of those of the model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=0, help="tokens per row without labels")
    parser.add_argument("--float32", action="store_true", help="no autocast to bfloat16 on a GPU")
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--alone", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.autocast = None if args.float32 or args.device.type == "cpu" else torch.bfloat16
    if args.alone:
        run_alone(args.alone, args)
        return

    print(f"{describe(args.device)}, torch {torch.__version__}")
    peaks, losses, updates = {}, {}, {}
    model = make_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    batch = make_batch(model, args)
    for name in args.only:  # the one with a frozen copy of the model comes last
        updates[name] = Update(name, model, optimizer, batch, args)
        losses[name] = float(updates[name]())
        peaks[name] = peak_bytes(updates[name], args)
    ms = interleaved_medians(updates, args.device, wall_ms, repeats=args.repeats, warmup=1)

    case = f"{args.rows} rows of {args.length} tokens, {args.prompt} of them a prompt"
    case += ", float32" if args.autocast is None else ", autocast to bfloat16"
    print(f"\n{case}\n{'':16}{'loss':>10}{'peak GB':>10}{'×':>8}{'ms':>10}{'×':>8}")
    rows = []
    for name in args.only:
        base = "transformers" if "transformers" in args.only else name
        row = {
            "case": case, "impl": name, "loss": round(losses[name], 5),
            "peak_gb": round(peaks[name] / 1e9, 3), "x_memory": round(peaks[name] / peaks[base], 3),
            "ms": round(ms[name], 2), "x_time": round(ms[name] / ms[base], 3),
        }  # fmt: skip
        rows.append(row)
        print(f"{name:16}{row['loss']:10.5f}{row['peak_gb']:10.3f}{row['x_memory']:8.3f}", end="")
        print(f"{row['ms']:10.1f}{row['x_time']:8.3f}")
    if args.out:
        layers: Any = model.config
        protocol = (
            f"one update with AdamW, {layers.num_hidden_layers} layers, vocabulary "
            f"{layers.vocab_size}, hidden size {layers.hidden_size}; median of {args.repeats} "
            "interleaved rounds after 1 of warm-up, wall clock; memory: the peak with weights, "
            "gradients and the state of the optimizer"
        )
        write_results(args.out, args.device, protocol, rows=rows)


if __name__ == "__main__":
    main()
