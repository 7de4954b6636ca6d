"""Random number generators: make them from a key, seed them within a block, restore them."""

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch


def generator_of(*key: str | int) -> torch.Generator:
    """A generator on the CPU that depends on plain values only.

    >>> int(torch.randint(1000, (), generator=generator_of("texts", 0)))
    5
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@contextlib.contextmanager
def preserve_rng(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        kind = devices[0].type if devices else "cuda"
        with torch.random.fork_rng(list(devices), device_type=kind):
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
