"""Kernels in Triton. Each does with one pass over memory what torch's operations need several for.

They are an implementation, not an interface: optimizers take them where they can, and torch's own
operations elsewhere. Triton's interpreter (``TRITON_INTERPRET=1``) runs them on the CPU, for tests.
"""

from __future__ import annotations

import importlib.util
import os

import torch

__all__ = ["available"]


def available(device: torch.device) -> bool:
    """Whether kernels run there: Triton is installed, and it is a GPU, or they are interpreted."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
