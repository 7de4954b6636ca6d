"""Random number generators: make them from a key, seed them within a block, restore them."""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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


def rewind_to_here(device: torch.device) -> Callable[[], None]:
    """A function that sets torch's generators, of the CPU and a device, to their states of now."""
    cpu = torch.get_rng_state()
    module: Any = getattr(torch, device.type, None)
    has_own = device.type != "cpu" and hasattr(module, "get_rng_state")
    own = module.get_rng_state(device) if has_own else None

    def rewind() -> None:
        torch.set_rng_state(cpu)
        if has_own:
            module.set_rng_state(own, device)

    return rewind
