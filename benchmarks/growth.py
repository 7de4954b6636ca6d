"""How the time of every part grows: with the weights, the tensors, the data and the ranks.

    python benchmarks/growth.py --out benchmarks/results/growth_h200.json    # 3 minutes on a GPU
    python benchmarks/growth.py --small                                      # a CPU, a minute

Each part is called several times in this process, and its median counts. Models are Llamas with
random weights. A line log(time) = a + b·log(size) is fitted: b = 1 is linear growth, 0 is none, and
work that ranks share has b = −1 at best. b of the last two sizes is where the part is going;
"linear from" is the first size from which every further step has an exponent of at least 0.85.
Steps of one optimizer are in step_growth.py, with the limits of memory. Ranks are processes of the
CPU, with one thread each.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from _common import default_device, describe, make_parameters, synchronize, write_results
from torch import nn
from torch.utils.data import TensorDataset

from holdfast import RecAdam, Reference, Run, SelfReplay, WiseFT, measure, pad_collate, score
from holdfast.anneal import Constant
from holdfast.evaluate.drift import drift
from holdfast.hosts import _checkpoints
from holdfast.recipe import Recipe
from holdfast.scoring.pool import draw_pool
from holdfast.scoring.starts import default_starts

VOCABULARY, LENGTH, TEXT = 8192, 128, 32
LINEAR = 0.85  # the least exponent that counts as linear
#: Weights → (hidden, layers) of a Llama with a vocabulary of 8192.
MODELS = {
    1_000_000: (64, 7), 3_000_000: (128, 7), 10_000_000: (256, 8), 30_000_000: (512, 6),
    100_000_000: (768, 10), 300_000_000: (1152, 14), 1_200_000_000: (2048, 18),
}  # fmt: skip


class Sizes(NamedTuple):
    """The sizes of a run: of the models, and the numbers of tensors, samples and ranks."""

    weights: Sequence[int]
    tensors: Sequence[int]
    tensor_weights: int
    samples: Sequence[int]
    ranks: Sequence[int]
    fixed: int  # the weights of the model whose data grows
    data: int  # the samples of the models that grow


FULL = Sizes(
    weights=[10_000_000, 30_000_000, 100_000_000, 300_000_000, 1_200_000_000],
    tensors=[10, 100, 1000, 4000], tensor_weights=10_000_000,
    samples=[64, 256, 1024], ranks=[1, 2, 4], fixed=30_000_000, data=128,
)  # fmt: skip
SMALL = Sizes(
    weights=[1_000_000, 3_000_000, 10_000_000], tensors=[10, 100, 1000], tensor_weights=1_000_000,
    samples=[16, 64, 256], ranks=[1, 2], fixed=1_000_000, data=16,
)  # fmt: skip
#: The largest model whose checkpoints are written: 12 bytes per weight.
MOST_SAVED = 300_000_000


def make_model(weights: int, device: torch.device) -> nn.Module:
    """A Llama of about this size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers = MODELS[weights]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=4 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 32, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    with device:
        model: nn.Module = LlamaForCausalLM(config)
    return model.eval()


def make_samples(count: int) -> list[dict[str, Any]]:
    rows = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows.tolist()]


def seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of a call, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


# --- The parts -----------------------------------------------------------------------------------


def draw(model: nn.Module, texts: int) -> Callable[[], object]:
    starts = default_starts(model)
    return lambda: draw_pool(
        model, texts, starts=starts, length=TEXT, cache=False, progress=False, top=16
    )


def scoring(model: nn.Module, samples: int) -> Callable[[], object]:
    rows = make_samples(samples)
    return lambda: score(model, rows, collate=pad_collate, cache=False, progress=False)


def measuring(model: nn.Module, tuned: nn.Module, samples: int) -> Callable[[], object]:
    """Perplexity is not measured: random models have no tokenizer."""
    return lambda: measure(
        model, tuned, context_free=samples, kl_samples=samples, drift=False, progress=False
    )


def step(params: list[nn.Parameter]) -> Callable[[], object]:
    named = ((f"p{i}", p) for i, p in enumerate(params))
    return RecAdam(named, lr=2e-5, anneal=Constant(0.5), fused=True).step


def update(run: Run, batch: dict[str, Any], count: Iterator[int]) -> None:
    """An update without its step."""
    run.loss(batch, float(batch["labels"].numel()), next(count)).backward()
    run.model.zero_grad()


def replay(run: Run, samples: int, count: Iterator[int]) -> None:
    """The recall of an update, in a call of its own."""
    run.recall.plan(run.model, next(count), samples, 1)
    with run.recall.beside(run.model) as recalled:
        cast(torch.Tensor, recalled()).backward()
    run.model.zero_grad()


def updated(model: nn.Module, device: torch.device, repeats: int) -> dict[str, float]:
    """The seconds of an update of 16 samples, and of the texts that are replayed beside it."""
    recall = SelfReplay(share=0.25, fewest=1, length=TEXT, top=16)
    rows = make_samples(16)
    batch = {name: values.to(device) for name, values in pad_collate(rows).items()}
    with tempfile.TemporaryDirectory() as cache:
        plain, replaying = (
            Run(
                recipe, model, rows, lr=1e-5, collate=pad_collate, update_size=16, visits=16,
                cache=cache, progress=False,
            )
            for recipe in (Recipe(), Recipe(recall=recall))
        )  # fmt: skip
        return {
            "update": seconds(partial(update, plain, batch, itertools.count(1)), device, repeats),
            "replay": seconds(partial(replay, replaying, 16, itertools.count(1)), device, repeats),
        }


def starting(model: nn.Module) -> Callable[[], Run]:
    """The start of a run: a copy of θ*, its fingerprint, and stage 1."""
    data = TensorDataset(torch.zeros(2, 1))  # no method reads it
    options: Any = {"lr": 1e-5, "new": (), "task": "classification", "progress": False}
    return lambda: Run("recadam", model, data, **options)


def compared(model: nn.Module, device: torch.device, repeats: int) -> dict[str, float]:
    """The seconds of parts that compare or merge two models."""
    tuned, reference = copy.deepcopy(model), Reference.of(model)
    with torch.no_grad():
        for p in tuned.parameters():
            p.mul_(1.01)
    return {
        "measure": seconds(measuring(model, tuned, 16), device, repeats),
        "drift": seconds(lambda: drift(model, tuned), device, repeats),
        "merge": seconds(lambda: WiseFT(0.9).merge(tuned, reference), device, repeats),
    }


def of_model(weights: int, sizes: Sizes, device: torch.device, repeats: int) -> dict[str, float]:
    """The seconds of every part for a model of one size."""
    model = make_model(weights, device)
    few = max(2, repeats // 2)
    found = {"score": seconds(scoring(model, sizes.data), device, repeats)}
    found["draw"] = seconds(draw(model, 64), device, few)
    found |= updated(model, device, repeats)

    found |= compared(model, device, few)
    gc.collect()
    start = starting(model)
    found["start"] = seconds(start, device, few)
    run = start()
    optimizer = run.make_optimizer(100)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    found["step"] = seconds(optimizer.step, device, repeats)
    if weights <= MOST_SAVED:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "run.pt"
            found["save"] = seconds(lambda: _checkpoints.save(file, run, 1, {}), device, few)
            found["resume"] = seconds(lambda: _checkpoints.load(file, run, {}), device, few)
    return found


class Many(nn.Module):
    """Many vectors."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.all = nn.ParameterList(params)


def of_tensors(number: int, sizes: Sizes, device: torch.device, repeats: int) -> dict[str, float]:
    """The seconds of parts that treat every tensor by itself."""
    shape = (sizes.tensor_weights // number,)
    model = Many(make_parameters([shape] * number, device, torch.float32))

    tuned, run = copy.deepcopy(model), starting(model)()
    found = {
        "start": seconds(starting(model), device, repeats),
        "drift": seconds(lambda: drift(model, tuned), device, repeats),
        "step": seconds(step([*model.parameters()]), device, repeats),
    }
    run.make_optimizer(100).step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.pt"
        found["save"] = seconds(lambda: _checkpoints.save(file, run, 1, {}), device, repeats)
        found["resume"] = seconds(lambda: _checkpoints.load(file, run, {}), device, repeats)
    return found


def of_samples(number: int, sizes: Sizes, device: torch.device, repeats: int) -> dict[str, float]:
    """The seconds of parts that read or make data."""
    model = make_model(sizes.fixed, device)
    few = max(2, repeats // 2)
    return {
        "score": seconds(scoring(model, number), device, few),
        "draw": seconds(draw(model, number), device, few),
        "measure": seconds(measuring(model, copy.deepcopy(model), number), device, few),
    }


def of_ranks(number: int, sizes: Sizes, device: torch.device, repeats: int) -> dict[str, float]:
    """The seconds of parts that share their work among ranks, which are processes of the CPU."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, __file__, "--rank", "--repeats", str(repeats)]
    common = {"WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **{n: str(x) for n, x in {**common, "RANK": rank}.items()}},
        )
        for rank in range(number)
    ]  # fmt: skip
    said = [process.communicate(timeout=600)[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"a rank of {number} failed")
    found: dict[str, float] = json.loads(said[0].splitlines()[-1])
    return found


def on_rank(repeats: int) -> None:
    """Measure one rank; the first one prints the times."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    cpu, model = torch.device("cpu"), make_model(1_000_000, torch.device("cpu"))
    found = {
        "score": seconds(scoring(model, 64), cpu, repeats),
        "draw": seconds(draw(model, 256), cpu, repeats),
    }
    run = starting(model)()
    optimizer = run.make_optimizer(100)
    if torch.distributed.get_world_size() > 1:
        fully_shard(model)
        named = dict(model.named_parameters())  # which are sharded now, as Accelerate does it
        for group in optimizer.param_groups:
            group["params"] = [named[name] for name in group["param_names"]]
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    found["step, sharded"] = seconds(optimizer.step, cpu, 3 * repeats)
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort the interpreter's own shutdown


# --- The fit -------------------------------------------------------------------------------------


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """b of time = a·size^b, by least squares of the logarithms."""
    x, y = zip(*((math.log(size), math.log(spent)) for size, spent in points), strict=True)
    return statistics.linear_regression(x, y).slope


def fitted(points: Sequence[tuple[float, float]], grows: bool = True) -> dict[str, Any]:
    """The exponent of all points and of the last two, and from where growth is linear."""
    slopes = [exponent(pair) for pair in itertools.pairwise(points)]
    linear = None
    for (size, _), slope in reversed([*zip(points, slopes, strict=False)]):
        if slope < LINEAR:
            break
        linear = size
    return {
        "exponent": round(exponent(points), 3),
        "last_exponent": round(slopes[-1], 3),
        "linear_from": linear if grows else None,
        "steepest": round(max(slopes), 3),
    }


AXES: dict[str, Callable[[int, Sizes, torch.device, int], dict[str, float]]] = {
    "weights": of_model, "tensors": of_tensors, "samples": of_samples, "ranks": of_ranks,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=[*AXES])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    if args.rank:
        on_rank(args.repeats)
    sizes: Any = SMALL if args.small else FULL
    print(f"{describe(args.device)}, torch {torch.__version__}", flush=True)
    rows: list[dict[str, Any]] = []
    for axis in args.axes:
        points: dict[str, list[tuple[float, float]]] = {}
        for size in getattr(sizes, axis):
            for part, spent in AXES[axis](size, sizes, args.device, args.repeats).items():
                points.setdefault(part, []).append((size, spent))
            gc.collect()
            if args.device.type == "cuda":
                torch.cuda.empty_cache()
        print(f"\n{axis + ', ms':14}" + "".join(f"{s:>14,}" for s in getattr(sizes, axis)), end="")
        print(f"{'exponent':>10}{'last':>7}{'linear from':>15}")
        for part, found in points.items():
            row = {"axis": axis, "part": part, **fitted(found, axis != "ranks")}
            row["points"] = [{"size": s, "ms": round(1e3 * t, 4)} for s, t in found]
            rows.append(row)
            cells = "".join(f"{1e3 * t:14.3f}" for _, t in found)
            cells += " " * 14 * (len(getattr(sizes, axis)) - len(found))
            begin = "—" if row["linear_from"] is None else f"{row['linear_from']:,}"
            print(f"{part:14}{cells}{row['exponent']:10.2f}{row['last_exponent']:7.2f}{begin:>15}")
        sys.stdout.flush()
    if args.out:
        protocol = {
            "repeats": args.repeats, "time": "median of the repeats after one call",
            "samples": f"{sizes.data} of {LENGTH} tokens", "texts": f"64 of {TEXT} tokens",
            "update": f"16 samples; replay: 4 texts of {TEXT} tokens beside them",
            "tensors": f"{sizes.tensor_weights:,} weights in all",
            "data": f"a model of {sizes.fixed:,} weights",
            "ranks": "processes of the CPU with one thread, 1,000,000 weights",
            "dtype": "float32",
        }  # fmt: skip
        write_results(args.out, args.device, protocol, rows=rows)


if __name__ == "__main__":
    main()
