"""The GPUs that runs may use, and how much of their memory is free.

The driver's own tool is asked: torch would need a context on each GPU, which takes memory there.
"""

import contextlib
import shutil
import subprocess
from dataclasses import dataclass

import torch

_QUERY = ("--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Gpu:
    """A GPU by torch's index.

    Attributes:
        free: bytes of memory that no process has taken; 0 if the driver's tool does not list it, as
            a part of a GPU, or one that is not NVIDIA's.
    """

    index: int
    free: int = 0


def gpus_for(device: str | None) -> tuple[Gpu, ...]:
    """The GPUs of runs on a device, such as ``cuda:1``: all that torch sees if it names none."""
    kind, _, number = (device or "cuda").partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 0
    indices = [i for i in range(count) if number in ("", str(i))]
    free = free_memory() if indices else {}
    if not free:
        return tuple(map(Gpu, indices))
    # Not by index: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER make torch's differ from the tool's.
    uuids = (f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in indices)
    return tuple(Gpu(i, free.get(uuid, 0)) for i, uuid in zip(indices, uuids, strict=True))


def free_memory() -> dict[str, int]:
    """The free bytes of all NVIDIA GPUs by UUID; empty if the driver's tool does not say."""
    found: dict[str, int] = {}
    if (tool := shutil.which("nvidia-smi")) is None:
        return found
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        asked = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=30)
        for line in asked.stdout.splitlines():
            uuid, mebibytes = line.split(",")
            found[uuid.strip()] = int(mebibytes) << 20
    return found
