"""RecAdam's step on a CPU by a kernel in C: it reads every weight, moment and anchor once.

torch's fused AdamW followed by the pull reads and writes the weights twice. See ``recadam_cpu.c``.
"""

import ctypes
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from holdfast._torch.layout import is_dense
from holdfast.kernels.compiled import library

_KIND = attrgetter("__class__", "dtype", "is_cpu")
_FULL = {(cls, torch.float32, True) for cls in (Tensor, Parameter)}
_HALF = {(cls, torch.bfloat16, True) for cls in (Tensor, Parameter)}

#: The struct ``Row``.
_ROW = np.dtype(
    [(name, np.int64) for name in ("p", "g", "m", "v", "t", "anchor", "weight", "size", "half")]
)


class _Settings(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "lam", "gamma", "weight_decay")),
        *((name, ctypes.c_double) for name in ("beta1", "beta2", "eps")),
        ("maximize", ctypes.c_int64),
    )


def takes(columns: Sequence[Sequence[Any]]) -> bool:
    """Whether the kernel can update parameters: it knows the dtypes, and the layouts agree.

    The columns are parameters, first and second moments, step counts, anchors, and importances.
    An importance may be None, which is 1. So may an anchor, which the kernel does not support.
    """
    params, exp_avgs, exp_avg_sqs, steps, anchors, weights = columns
    given = [(p, w) for p, w in zip(params, weights, strict=True) if w is not None]
    full = chain(params, exp_avgs, exp_avg_sqs, steps, (w for _, w in given))
    if any(anchor is None for anchor in anchors) or not {*map(_KIND, full)} <= _FULL:
        return False
    pairs = [*zip([*params] * 3, chain(exp_avgs, exp_avg_sqs, anchors), strict=True), *given]
    alike = all(t.shape == p.shape and t.stride() == p.stride() for p, t in pairs)
    return alike and {*map(_KIND, anchors)} <= _FULL | _HALF and all(map(is_dense, params))


class RecAdamStep:
    """Updates parameters by the kernel, as long as their tensors stay where they are."""

    def __init__(self, columns: Sequence[Sequence[Any]]) -> None:
        """Take columns as in :func:`takes`."""
        params, _, _, _, anchors, weights = self._kept = columns
        self._params = params
        self._strides = [*map(Tensor.stride, params)]
        self._table = np.zeros(len(params), _ROW)
        for name, column in zip(("p", "m", "v", "t", "anchor"), columns[:5], strict=True):
            self._table[name] = [t.data_ptr() for t in column]
        self._table["weight"] = [0 if t is None else t.data_ptr() for t in weights]
        self._table["size"] = [p.numel() for p in params]
        self._table["half"] = [anchor.dtype == torch.bfloat16 for anchor in anchors]

    def __call__(self, grads: Sequence[Tensor], settings: Mapping[str, Any]) -> bool:
        """Make one update and advance the step counts. Return False if the kernel cannot do it.

        It cannot if settings are tensors, if the gradients have another dtype or layout than the
        parameters, or without a C compiler. Without a pull the step is torch's, to the last bit.
        """
        numbers = {name: settings[name] for name, *_ in _Settings._fields_}
        if any(isinstance(number, Tensor) for number in numbers.values()):
            return False
        if numbers["lr"] * (1 - numbers["lam"]) * numbers["gamma"] == 0:
            return False
        if not {*map(_KIND, grads)} <= _FULL or [*map(Tensor.stride, grads)] != self._strides:
            return False
        kernel = library("recadam_cpu")
        if kernel is None:
            return False
        self._table["g"] = [*map(Tensor.data_ptr, grads)]
        kernel.recadam_step(
            ctypes.c_void_p(self._table.ctypes.data), ctypes.c_int64(len(grads)),
            ctypes.byref(_Settings(**numbers)), ctypes.c_int(torch.get_num_threads()),
        )  # fmt: skip
        for p in self._params:  # autograd does not see what the kernel writes
            torch.autograd.graph.increment_version(p)
        return True
