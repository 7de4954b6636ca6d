"""Random number generators: seed them within a block, or restore their states."""

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch


@contextlib.contextmanager
def preserve_rng(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's generators on all devices, and restore them on exit. No effect if None."""
    kinds = [kind for kind in ("cuda", "xpu", "mps") if getattr(torch, kind).is_available()]
    devices = range(getattr(torch, kinds[0]).device_count() if kinds else 0)
    kind = kinds[0] if kinds else "cuda"
    with torch.random.fork_rng(devices, enabled=seed is not None, device_type=kind):
        if seed is not None:
            torch.manual_seed(seed)
        yield
