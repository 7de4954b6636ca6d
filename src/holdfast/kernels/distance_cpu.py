"""The distance of two tensors on a CPU by a kernel in C, which reads each of them once.

torch's operations convert half precision, subtract and sum up in passes of their own. See
``distance_cpu.c``.
"""

import ctypes

import torch
from torch import Tensor, nn

from holdfast.kernels.compiled import library

#: The dtypes that the kernel reads, and whether they are bfloat16.
_IS_BFLOAT16 = {torch.float32: False, torch.bfloat16: True}


class _Sums(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("moved", "norm")),
        *((name, ctypes.c_int64) for name in ("any_moved", "any_norm")),
    )


def square_sums(before: Tensor, after: Tensor) -> tuple[float, float] | None:
    """Return ‖after − before‖² and ‖before‖² of flat tensors.

    None if the kernel cannot compute them: without a C compiler, for other dtypes, devices and
    kinds of tensors, and for squares that float32 cannot represent.
    """
    both = (before, after)
    if before.dim() != 1 or before.shape != after.shape:
        return None
    # Tensors of other classes may have no memory of their own, such as sharded ones.
    plain = all(type(t) in (Tensor, nn.Parameter) and t.is_contiguous() for t in both)
    if not plain or not all(t.is_cpu and t.dtype in _IS_BFLOAT16 for t in both):
        return None
    kernel = library("distance_cpu")
    if kernel is None:
        return None
    sums = _Sums()
    kernel.square_sums(
        ctypes.c_void_p(before.data_ptr()), ctypes.c_void_p(after.data_ptr()),
        ctypes.c_int64(len(before)), *(ctypes.c_int(_IS_BFLOAT16[t.dtype]) for t in both),
        ctypes.byref(sums),
    )  # fmt: skip
    totals = (sums.moved, sums.any_moved), (sums.norm, sums.any_norm)
    if not all(1e-30 < total < 1e30 or not some for total, some in totals):
        return None
    return float(sums.moved), float(sums.norm)
