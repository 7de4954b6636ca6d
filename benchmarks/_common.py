"""What the benchmark scripts share: model shapes, interleaved timing, the record of a run."""

from __future__ import annotations

import importlib.util
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

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


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def host_ms(function: Callable[[], object], device: torch.device) -> float:
    """How long a call keeps the host: on CUDA, to launch its work; on the CPU, to do it."""
    _synchronize(device)
    begin = time.perf_counter()
    function()
    elapsed = time.perf_counter() - begin
    _synchronize(device)
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


def _synchronize(device: torch.device) -> None:
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


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        f"{platform.machine()} CPU, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}"
    )


def write_results(path: Path, device: torch.device, protocol: Any, **results: Any) -> None:
    """Write results with what is needed to judge them: device, versions, protocol and date."""
    import holdfast

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "holdfast": holdfast.__version__,
    }
    record = {
        "device": describe(device),
        "versions": versions,
        "protocol": protocol,
        "date": datetime.now(timezone.utc).date().isoformat(),
        **results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
