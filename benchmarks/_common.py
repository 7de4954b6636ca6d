"""What the benchmark scripts share: model shapes, interleaved timing, the record of a run."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn import Parameter

if importlib.util.find_spec("holdfast") is None:  # not installed: take the checkout's
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

Shape = tuple[int, ...]


def bert_shapes(layers: int, hidden: int, vocabulary: int = 30522) -> list[Shape]:
    """Parameter shapes of a BERT encoder with its pooler; the FFN is 4 × hidden wide."""
    norm: list[Shape] = [(hidden,), (hidden,)]
    dense: list[Shape] = [(hidden, hidden), (hidden,)]
    ffn: list[Shape] = [(4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,)]
    embeddings: list[Shape] = [(vocabulary, hidden), (512, hidden), (2, hidden), *norm]
    return [*embeddings, *layers * [*4 * dense, *norm, *ffn, *norm], *dense]


def llama_shapes(
    layers: int = 16, hidden: int = 2048, ffn: int = 8192, keys: int = 512, vocabulary: int = 128256
) -> list[Shape]:
    """Parameter shapes of a Llama decoder, embeddings and head tied; as it is, of 1.24 G."""
    layer: list[Shape] = [
        (hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden),
        (ffn, hidden), (ffn, hidden), (hidden, ffn), (hidden,), (hidden,),
    ]  # fmt: skip
    return [(vocabulary, hidden), *layers * layer, (hidden,)]


#: What optimizers' steps are measured on. ``small-2000`` is many tensors of 1 to 4 k elements.
SHAPES: dict[str, list[Shape]] = {
    "minilm-l6": bert_shapes(layers=6, hidden=384),
    "bert-base": bert_shapes(layers=12, hidden=768),
    "llama-1b": llama_shapes(),
    "small-2000": [(1000 + 37 * i % 3097,) for i in range(2000)],
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class StepRow(TypedDict):
    """What a step costs. The limit is its bytes over the bandwidth of a copy in the same rounds."""

    case: str
    impl: str
    ms: float
    x_limit: float
    x_fused_adamw: float
    bytes_per_param: float
    host_ms: float
    x_host: float
    kept_bytes_per_param: float


def make_parameters(
    shapes: Sequence[Shape], device: torch.device, dtype: torch.dtype
) -> list[Parameter]:
    """Parameters with gradients."""
    torch.manual_seed(0)
    params = []
    for shape in shapes:
        p = Parameter(0.02 * torch.randn(shape, device=device, dtype=dtype))
        p.grad = 0.02 * torch.randn_like(p)
        params.append(p)
    return params


class Step(NamedTuple):
    """A step to measure: what makes it, and the bytes that one pass moves for each parameter."""

    make: Callable[[list[Parameter]], Any]
    bytes: float


def measure_steps(
    case: str,
    params: list[Parameter],
    steps: Mapping[str, Step],
    device: torch.device,
    repeats: int,
    at_once: int = 3,
) -> tuple[list[StepRow], float]:
    """The rows of one case, and the copy bandwidth (GB/s) that their limits come from.

    Each round times all of a few implementations, torch's fused AdamW and a large copy among them:
    ratios are of the same rounds.
    """
    size = sum(p.numel() for p in params)
    names, copy = list(steps), Copy(device)
    rows: list[StepRow] = []
    bandwidths = []
    for begin in range(0, len(names), at_once):
        made = {name: steps[name].make(params) for name in names[begin : begin + at_once]}
        base = made.get("torch_fused_adamw") or steps["torch_fused_adamw"].make(params)
        calls = {name: optimizer.step for name, optimizer in made.items()}
        timed = {**calls, "copy": copy, "torch_fused_adamw": base.step}
        ms = interleaved_medians(timed, device, device_ms, repeats=repeats)
        on_host = ms
        if device.type == "cuda":
            both = {**calls, "torch_fused_adamw": base.step}
            on_host = interleaved_medians(both, device, host_ms, repeats=repeats)
        bandwidth = copy.bytes / ms["copy"]  # bytes a millisecond
        bandwidths.append(bandwidth / 1e6)
        for name, optimizer in made.items():
            limit = steps[name].bytes * size / bandwidth
            rows.append(
                {
                    "case": case,
                    "impl": name,
                    "ms": round(ms[name], 4),
                    "x_limit": round(ms[name] / limit, 3),
                    "x_fused_adamw": round(ms[name] / ms["torch_fused_adamw"], 3),
                    "bytes_per_param": round(steps[name].bytes, 2),
                    "host_ms": round(on_host[name], 4),
                    "x_host": round(on_host[name] / on_host["torch_fused_adamw"], 3),
                    "kept_bytes_per_param": round(kept_bytes(optimizer, device) / size, 2),
                }
            )
        del made, base, calls, timed
        gc.collect()
    return rows, statistics.median(bandwidths)


def kept_bytes(optimizer: Any, device: torch.device) -> int:
    """Bytes on the device of an optimizer's state and anchors."""
    state = getattr(optimizer, "state", {})
    tensors = [t for values in state.values() for t in values.values() if isinstance(t, Tensor)]
    if anchors := getattr(optimizer, "_anchors", None):
        tensors += [a for found in anchors.values for a in found if a is not None]
    tensors += getattr(optimizer, "kept", [])
    parts = [part for t in tensors for part in _parts(t) if part.device.type == device.type]
    return sum(part.numel() * part.element_size() for part in parts)


def _parts(tensor: Tensor) -> list[Tensor]:
    """What a tensor is made of, if it is one of others (torchao's)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def print_steps(title: str, rows: Sequence[StepRow]) -> None:
    """A table."""
    print(f"\n{title}")
    print(f"{'':28}{'ms':>10}{'× limit':>9}{'× fused AdamW':>15}{'host ms':>9}{'kept B':>8}")
    for row in rows:
        print(f"{row['impl']:28}{row['ms']:10.3f}{row['x_limit']:9.2f}", end="")
        print(f"{row['x_fused_adamw']:15.2f}{row['host_ms']:9.3f}", end="")
        print(f"{row['kept_bytes_per_param']:8.2f}", flush=True)


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def host_ms(function: Callable[[], object], device: torch.device) -> float:
    """How long a call keeps the host: on CUDA, to launch its work; on the CPU, to do it."""
    synchronize(device)
    begin = time.perf_counter()
    function()
    elapsed = time.perf_counter() - begin
    synchronize(device)
    return 1e3 * elapsed


def device_ms(function: Callable[[], object], device: torch.device) -> float:
    """How long a call keeps the device. The host launches it ahead, as behind a backward pass."""
    if device.type != "cuda":
        return host_ms(function, device)
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        torch.cuda._sleep(100_000_000)  # cycles, about 50 ms: the lead of the host
    start.record(stream)
    function()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved_medians(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    clock: Callable[[Callable[[], object], torch.device], float],
    *,
    repeats: int,
    warmup: int = 3,
) -> dict[str, float]:
    """Median time of each function. Every round calls all of them, each time in another order,
    so that noise and whatever the one before left in the caches hit all alike.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    shuffle = random.Random(0).shuffle
    for round_ in range(warmup + repeats):
        shuffle(order)
        for name in order:
            elapsed = clock(functions[name], device)
            if round_ >= warmup:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


class Copy:
    """A copy too large for any cache: a call moves ``bytes``, read and written."""

    def __init__(self, device: torch.device) -> None:
        self.source = torch.ones(2**28, device=device)
        self.target = torch.zeros_like(self.source)
        self.bytes = 2 * self.source.numel() * self.source.element_size()

    def __call__(self) -> None:
        self.target.copy_(self.source)


def spent(command: Sequence[str], source: Path, compiled: str) -> tuple[float, float]:
    """Run a process with a version of holdfast; return its seconds, and those on processors.

    ``compiled`` is a folder for compiled modules.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(source), "PYTHONPYCACHEPREFIX": compiled}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        f"{platform.machine()} CPU, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(*packages: str) -> dict[str, str | None]:
    """Of Python, torch, Triton, holdfast with its commit, and others that matter.

    The commit is that of the clone, or what HOLDFAST_COMMIT says.
    """
    import holdfast

    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = (
        os.environ.get("HOLDFAST_COMMIT")
        or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    )
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "holdfast": holdfast.__version__,
        **({"commit": commit} if commit else {}),
        **{name: _version(name) for name in packages},
    }


def write_results(path: Path, device: torch.device, protocol: Any, **results: Any) -> None:
    """Write results with what is needed to judge them: device, versions, protocol and date."""
    record = {
        "device": describe(device),
        "versions": versions(),
        "protocol": protocol,
        "date": datetime.now(timezone.utc).date().isoformat(),
        **results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
