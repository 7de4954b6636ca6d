"""Kernels in Triton. Each does with one pass over memory what torch's operations need several for.

They are an implementation, not an interface: optimizers take them where they can, and torch's own
operations elsewhere. Triton's interpreter (``TRITON_INTERPRET=1``) runs them on the CPU, for tests.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from typing import Any

import torch

__all__ = ["available", "wanted"]


def wanted(group: dict[str, Any], device: torch.device) -> bool:
    """Whether a group is updated by a kernel: asked for by ``fused``, the default on a GPU."""
    if group["foreach"] or group["fused"] is False or torch.compiler.is_compiling():
        return False
    return (bool(group["fused"]) or device.type == "cuda") and available(device)


def available(device: torch.device) -> bool:
    """Whether kernels run there: Triton is installed and works on this GPU, or is interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return _installed()
    return device.type == "cuda" and _works(device.index)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _works(index: int | None) -> bool:
    """Try it: Triton comes with torch, but needs a compiler, and not every GPU will do."""
    if not _installed():
        return False
    try:
        from holdfast.kernels.tables import try_it

        try_it(torch.device("cuda" if index is None else f"cuda:{index}"))
    except Exception as error:
        warnings.warn(
            f"Triton is installed but does not work here ({type(error).__name__}: {error}): steps "
            "are made by torch's own operations, which takes up to twice as long",
            stacklevel=2,
        )
        return False
    return True
