"""The smallest kernel, to see whether kernels can be compiled and run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["try_it"]


@triton.jit
def _one(place):
    tl.store(place, 1)


def try_it(device: torch.device) -> None:
    """Raises what Triton raises."""
    place = torch.zeros(1, dtype=torch.int32, device=device)
    with torch.cuda.device_of(place):
        _one[(1,)](place)
