"""Drift and merging of checkpoints on disk, against reading and copying the same files.

    python benchmarks/merge_and_drift.py

Makes three sharded bfloat16 checkpoints of Llama's shapes in a temporary directory, and runs each
of the following as a process of its own: the drift between two of them, and their merge by every
method (Model Stock merges the third one too). Right before each of them it runs ``cat`` of two
checkpoints, which reads what the drift reads, and ``cp -r`` of one, which writes what a merge
writes. The ratios ``× cat`` and ``× cp`` are medians over the repeats of ratios to these two.

A process measures the seconds of its own work. Starting Python and importing holdfast has its own
row and is not part of the ratios and of the seconds per GB of one checkpoint. The work of ``cp``
and of a merge ends when the output is on disk (``fsync``). Peak memory is the largest resident set
of the process. Files that fit into the machine's memory are read from there. Five checkpoints must
fit, or the system makes room for each page that is written, which takes longer than the merge.
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
from typing import Any, NamedTuple, TypedDict

import torch
from _common import write_results

from holdfast import registry
from holdfast.io.safetensors_files import header_for
from holdfast.io.weights import Spec

Shapes = dict[str, tuple[int, ...]]
RESULTS = Path(__file__).parent / "results" / "merge_and_drift.json"
IMPORT = "import time, holdfast as h; from holdfast.io.merge import merge_on_disk as merge; "
IMPORT += "from holdfast.evaluate.drift import drift; method = h.{method}(); "
IMPORT += "begin = time.perf_counter()"
DRIFT = "; drift({base!r}, {tuned!r})"
MERGE = "; merge({base!r}, {models!r}, {out!r}, method)"
# What getrusage says of a child is at least what its parent had, so it tells of itself.
REPORT = "; print('work', time.perf_counter() - begin)"
REPORT += "; print(*(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"


class Measured(NamedTuple):
    """Seconds of a process until its output is on disk, of its work alone and on processors.

    ``peak`` is its peak memory in GB.
    """

    wall: float
    work: float
    processor: float
    peak: float


class Row(TypedDict):
    case: str
    impl: str
    ms: float
    x_cat: float | None
    x_cp: float | None
    seconds_per_gb: float | None
    processor_s: float
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


def timed(command: list[str], out: Path) -> Measured:
    """Run a process without an output directory, and wait until its output is on disk."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    for file in out.glob("*"):
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    work, peak = re.search(r"work (\S+)", done.stdout), re.search(r"VmHWM:\s+(\d+)", done.stdout)
    return Measured(
        wall,
        float(work[1]) if work else wall,
        processor,
        int(peak[1]) * 1024 / 1e9 if peak else math.nan,
    )


def commands_for(places: dict[str, str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The commands to compare with, and those to measure, by name."""
    references = {
        "cat": ["sh", "-c", "cat {base}/* {tuned}/* > /dev/null".format(**places)],
        "cp": ["cp", "-r", places["tuned"], places["out"]],
    }
    code = {name: IMPORT.format(method="Keep") for name in ("import", "drift")}
    code["drift"] += DRIFT.format(**places)
    for entry in registry.methods("merging"):
        method: Any = entry.cls()
        models = [places[name] for name in ("tuned", "other")[: method.least_models]]
        if method.tensorwise:
            imported = IMPORT.format(method=entry.cls.__name__)
            code[f"merge-{entry.name}"] = imported + MERGE.format(**places, models=models)
    measured = {name: [sys.executable, "-c", text + REPORT] for name, text in code.items()}
    return references, measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=3.0, help="size of one checkpoint")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--where", default=None, help="directory for the temporary files")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()

    runs: dict[str, list[Measured]] = {}
    ratios: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.where) as temporary:
        root = Path(temporary)
        if shutil.disk_usage(root).free < 4.2e9 * options.gb:
            raise SystemExit(f"{root} has no room for four checkpoints of {options.gb} GB")
        places = {name: str(root / name) for name in ("base", "tuned", "other", "out")}
        shapes = llama_shapes(options.gb)
        for seed, name in enumerate(("base", "tuned", "other")):
            size = write_checkpoint(root / name, shapes, seed)
        references, measured = commands_for(places)
        order = list(measured)
        for repeat in range(options.repeats):
            random.Random(repeat).shuffle(order)
            for name in order:
                beside = {key: timed(command, root / "out") for key, command in references.items()}
                found = timed(measured[name], root / "out")
                for key, run in (beside | {name: found}).items():
                    runs.setdefault(key, []).append(run)
                for key, run in beside.items():
                    each = ratios.setdefault(name, {}).setdefault(key, [])
                    each.append(found.work / run.work)

    rows: list[Row] = []
    for name, found_here in runs.items():
        medians = Measured(*map(statistics.median, zip(*found_here, strict=True)))
        x = {key: round(statistics.median(each), 3) for key, each in ratios.get(name, {}).items()}
        works = name != "import"
        rows.append(
            {
                "case": f"{size / 1e9:.1f} GB, bfloat16",
                "impl": name,
                "ms": round(1e3 * medians.wall, 1),
                "x_cat": x.get("cat") if works else None,
                "x_cp": x.get("cp") if works else None,
                "seconds_per_gb": round(1e9 * medians.work / size, 3) if works else None,
                "processor_s": round(medians.processor, 2),
                "peak_gb": None
                if math.isnan(medians.peak)
                else round(max(r.peak for r in found_here), 3),
                "each_s": [round(run.work if works else run.wall, 2) for run in found_here],
            }
        )
    protocol = {"checkpoint, GB": round(size / 1e9, 2), "repeats": options.repeats}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    protocol["memory of the machine, GB"] = round(memory / 1e9, 1)
    protocol["load average in the last 5 minutes"] = round(os.getloadavg()[1], 1)
    write_results(options.results, torch.device("cpu"), protocol, rows=rows)
    print(f"{'':<18}{'seconds':>9}{'× cat':>8}{'× cp':>7}{'s/GB':>7}{'CPU s':>8}{'peak GB':>9}")
    for row in rows:
        print(f"{row['impl']:<18}{row['ms'] / 1e3:>9.2f}{row['x_cat'] or '':>8}", end="")
        print(f"{row['x_cp'] or '':>7}{row['seconds_per_gb'] or '':>7}", end="")
        print(f"{row['processor_s']:>8.2f}{row['peak_gb'] or '':>9}")


if __name__ == "__main__":
    main()
