"""Drift and merging of checkpoints on disk, against reading and copying the same files.

    python benchmarks/merge_and_drift.py --gb 8

Makes a pair of sharded bfloat16 checkpoints of Llama's shapes in a temporary directory, and runs
each of the following as a process of its own, in turns: ``cat`` of both (reads their size twice),
``cp -r`` of one (reads and writes its size), the drift between the two (reads as ``cat``) and their
merge by every method (reads twice, writes once; Model Stock merges a third one too). The limit of
the drift is the time of ``cat``, that of a merge the time of ``cp`` and half of that of ``cat``.
Starting Python and importing holdfast is part of drift and merge, and timed by itself: ``× cp`` and
``s/GB`` are without it. The time of each runs until what it wrote is on disk
(``fsync``); the time of its threads on processors is less troubled by what else the machine does.
Peak memory is the largest resident set of the process, mapped pages of files included. Files that
fit into the machine's memory are read from there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TypedDict

import torch
from _common import write_results

from holdfast import registry
from holdfast.io.safetensors_files import header_for
from holdfast.io.weights import Spec

Shapes = dict[str, tuple[int, ...]]
RESULTS = Path(__file__).parent / "results" / "merge_and_drift.json"
IMPORT = "from holdfast.evaluate.drift import drift"
DRIFT = "from holdfast.evaluate.drift import drift; drift({base!r}, {tuned!r})"
MERGE = (
    "import holdfast as h; from holdfast.io.merge import merge_on_disk as m; "
    "m({base!r}, {models!r}, {out!r}, h.{method}())"
)
# What getrusage says of a child is at least what its parent had, so it tells of itself.
PEAK = "; print(*(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"


class Row(TypedDict):
    case: str
    impl: str
    ms: float
    x_limit: float | None
    x_cp: float
    seconds_per_gb: float | None
    processor_s: float
    x_cp_processor: float
    peak_gb: float | None
    each_s: list[float]


def llama_shapes(gigabytes: float) -> Shapes:
    """As many layers of Llama-3-8B as fill the size in bfloat16, with its embedding and head."""
    hidden, ffn, keys, vocabulary = 4096, 14336, 1024, 128256
    layer: Shapes = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    ends = 2 * 2 * vocabulary * hidden
    each = sum(2 * torch.Size(shape).numel() for shape in layer.values())
    layers = max(1, round((gigabytes * 1e9 - ends) / each))
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def write_checkpoint(directory: Path, shapes: Shapes, seed: int, shard: float = 5e9) -> int:
    """Write random weights in shards as Hugging Face does; returns the number of bytes."""
    directory.mkdir()
    shards: list[Shapes] = [{}]
    room = shard
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if size > room:
            shards.append({})
            room = shard
        shards[-1][name] = shape
        room -= size
    noise = torch.randn(2**24, generator=torch.Generator().manual_seed(seed)).mul_(0.02)
    values = noise.bfloat16().view(torch.uint8).numpy().data
    weight_map: dict[str, str] = {}
    for number, here in enumerate(shards, 1):
        file = directory / f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, _ = header_for({n: Spec(shape, torch.bfloat16) for n, shape in here.items()})
        with open(file, "wb") as out:
            out.write(header)
            left = sum(2 * torch.Size(shape).numel() for shape in here.values())
            while left:
                left -= out.write(values[:left])
        weight_map |= dict.fromkeys(here, file.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(file.stat().st_size for file in directory.iterdir())


def timed(command: list[str], out: Path) -> tuple[float, float, float]:
    """Seconds until a process has ended and its output is on disk, its seconds on processors, and
    its peak memory in GB.
    """
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    for file in out.glob("*"):
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    elapsed = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak = re.search(r"VmHWM:\s+(\d+) kB", done.stdout)
    return elapsed, processor, int(peak[1]) * 1024 / 1e9 if peak else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=8.0, help="size of one checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--where", default=None, help="directory for the temporary files")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=options.where) as temporary:
        root = Path(temporary)
        if shutil.disk_usage(root).free < 4.2e9 * options.gb:
            raise SystemExit(f"{root} has no room for four checkpoints of {options.gb} GB")
        shapes = llama_shapes(options.gb)
        size = write_checkpoint(root / "base", shapes, seed=0)
        write_checkpoint(root / "tuned", shapes, seed=1)
        write_checkpoint(root / "other", shapes, seed=2)
        places = {name: str(root / name) for name in ("base", "tuned", "other", "out")}
        commands = {
            "cat": ["sh", "-c", "cat {base}/* {tuned}/* > /dev/null".format(**places)],
            "cp": ["cp", "-r", places["tuned"], places["out"]],
            "import": [sys.executable, "-c", IMPORT + PEAK],
            "drift": [sys.executable, "-c", DRIFT.format(**places) + PEAK],
        }
        for entry in registry.methods("merging"):
            method: Any = entry.cls()
            models = [places[name] for name in ("tuned", "other")[: method.least_models]]
            if method.tensorwise:
                code = MERGE.format(**places, models=models, method=entry.cls.__name__)
                commands[f"merge-{entry.name}"] = [sys.executable, "-c", code + PEAK]
        runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
        order = list(commands)
        for repeat in range(options.repeats):  # what runs after a pause pays for fresh memory
            random.Random(repeat).shuffle(order)
            for name in order:
                runs[name].append(timed(commands[name], root / "out"))

    medians = {
        name: [statistics.median(column) for column in zip(*found, strict=True)]
        for name, found in runs.items()
    }
    read, copied, start = medians["cat"][0], medians["cp"][0], medians["import"][0]
    limits = {"cat": read, "cp": copied, "drift": read}
    limits |= {name: read / 2 + copied for name in commands if name.startswith("merge")}
    work = {name: medians[name][0] - start for name in commands if name.startswith(("drift", "m"))}
    case = f"{size / 1e9:.1f} GB, bfloat16"
    rows: list[Row] = [
        {
            "case": case,
            "impl": name,
            "ms": round(1e3 * wall, 1),
            "x_limit": round(wall / limits[name], 3) if name in limits else None,
            "x_cp": round(work.get(name, wall) / copied, 3),
            "seconds_per_gb": round(1e9 * work[name] / size, 3) if name in work else None,
            "processor_s": round(processor, 2),
            "x_cp_processor": round(processor / medians["cp"][1], 2),
            "peak_gb": None if math.isnan(peak) else round(max(run[2] for run in runs[name]), 3),
            "each_s": [round(run[0], 2) for run in runs[name]],
        }
        for name, (wall, processor, peak) in medians.items()
    ]
    protocol = {"checkpoint, GB": round(size / 1e9, 2), "repeats": options.repeats}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    protocol["memory of the machine, GB"] = round(memory / 1e9, 1)
    protocol["load average in the last 5 minutes"] = round(os.getloadavg()[1], 1)
    write_results(options.results, torch.device("cpu"), protocol, rows=rows)
    print(f"{'':<18}{'seconds':>9}{'× limit':>9}{'× cp':>7}{'s/GB':>7}{'CPU s':>8}{'peak GB':>9}")
    for row in rows:
        print(f"{row['impl']:<18}{row['ms'] / 1e3:>9.2f}{row['x_limit'] or '':>9}", end="")
        print(f"{row['x_cp']:>7.2f}{row['seconds_per_gb'] or '':>7}", end="")
        print(f"{row['processor_s']:>8.2f}{row['peak_gb'] or '':>9}")


if __name__ == "__main__":
    main()
