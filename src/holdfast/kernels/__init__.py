"""Kernels: steps that need one pass over memory instead of several.

They are written in Triton for GPUs, and in C for the CPU. Optimizers use them where they can, and
torch's own operations elsewhere. Triton's interpreter (``TRITON_INTERPRET=1``) runs Triton's
kernels on the CPU, for tests.
"""

import functools
import importlib.util
import os
import warnings
from typing import Any

import torch


def wanted(group: dict[str, Any], device: torch.device) -> bool:
    """Whether to update a group by Triton: with ``fused=True``, and by default on a GPU."""
    if group["foreach"] or group["fused"] is False or torch.compiler.is_compiling():
        return False
    return (bool(group["fused"]) or device.type == "cuda") and available(device)


def available(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device: it works on this GPU, or is interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return _installed()
    return device.type == "cuda" and _works(device.index)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _works(index: int | None) -> bool:
    """Try a kernel: Triton comes with torch, but needs a compiler and a supported GPU."""
    if not _installed():
        return False
    try:
        from holdfast.kernels.tables import try_it

        try_it(torch.device("cuda" if index is None else f"cuda:{index}"))
    except Exception as error:
        warnings.warn(
            f"Triton is installed but does not work here ({type(error).__name__}: {error}): "
            "optimizers use torch's own operations, which take up to twice as long",
            stacklevel=2,
        )
        return False
    return True
