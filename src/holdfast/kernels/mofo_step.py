"""MoFO's step over many tensors by its kernels: the same few launches for one and for thousands.

Tables, counts of steps and where the searches ended are kept from one step to the next. Nothing is
read from the device but, once, the counts of steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from holdfast._torch.layout import dense, is_sharded
from holdfast.kernels import available
from holdfast.kernels.mofo import learn_kernel, move_kernel
from holdfast.kernels.mofo_search import BINS, narrow_kernel, ties_kernel
from holdfast.kernels.tables import TYPES, Table, on_device

__all__ = ["MoFOStep", "takes"]

#: Elements of a block, blocks of a program, and its warps: the best of six on an H200 at 1.2 G.
BLOCK, LOOPS, WARPS = 1024, 16, 4

#: Before Triton 3.4 a histogram has no mask.
_MASKED = "mask" in inspect.signature(tl.histogram).parameters

#: The distance of two values, in bits of a float32, and in how many rounds 2³¹ is narrowed to it.
_GRAINS = {torch.float32: (1, 4), torch.bfloat16: (1 << 16, 2), torch.float16: (1 << 13, 3)}


def takes(p: Tensor) -> bool:
    """Whether the kernels can update a parameter: in row-major order, of a dtype they know."""
    known = _MASKED and p.dtype in TYPES and not is_sharded(p)
    return known and p.is_contiguous() and 0 < p.numel() <= 1 << 30 and available(p.device)


class MoFOStep:
    """Updates parameters by MoFO's kernels; made for one list of them, called at each step."""

    def __init__(self) -> None:
        self._known: list[Any] = []
        self._held: list[Any] = []
        self._launches: list[_Launch] = []
        self._rest: list[int] = []

    def __call__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        state_steps: Sequence[Tensor],
        *,
        fraction: float,
        **adam: Any,
    ) -> list[int]:
        """One update, with the counts of steps; returns which parameters are left to others.

        ``adam`` are lr, beta1, beta2, eps, weight_decay, maximize and capturable.
        """
        columns = (params, exp_avgs, exp_avg_sqs, state_steps)
        known: list[Any] = [fraction, *(id(t) for column in columns for t in column)]
        # ``Module.to`` keeps the parameter.
        known += [(p.dtype, p.device, p.stride()) for p in params]
        if known != self._known:  # with the tensors, so that no other has their id
            self._known, self._held = known, [list(column) for column in columns]
            self._look(fraction)
        for launch in self._launches:
            launch([grads[i] for i in launch.rows], **adam)
        return self._rest

    def _look(self, fraction: float) -> None:
        """Part the parameters by device, dtype and count of steps."""
        kinds: dict[Any, list[int]] = {}
        self._rest = []
        for i, (p, m, v, step) in enumerate(zip(*self._held, strict=True)):
            if takes(p) and all(t.dtype == p.dtype and t.is_contiguous() for t in (m, v)):
                kinds.setdefault((p.device, p.dtype, float(step)), []).append(i)
            else:
                self._rest.append(i)
        self._launches = [
            _Launch(rows, [[column[i] for i in rows] for column in self._held], fraction, count)
            for (_, _, count), rows in kinds.items()
        ]


class _Launch:
    """Parameters of one kind: the same device and dtype, the same count of steps."""

    def __init__(
        self, rows: list[int], columns: list[list[Tensor]], fraction: float, count: float
    ) -> None:
        self.rows, self.count = rows, count
        self.params, ms, vs, self.steps = columns
        self.kept = [self.params, ms, vs]
        self.table = Table([self.params, *self.kept], BLOCK * LOOPS)
        self.dtype, device = self.params[0].dtype, self.params[0].device
        sizes = [p.numel() for p in self.params]
        wanted = [
            max(1, round(fraction * size)) if p.dim() > 1 else size
            for p, size in zip(self.params, sizes, strict=True)
        ]
        self.searched = wanted != sizes
        # A first search begins at −1. One that wants all has ended: all is in its interval.
        search = [
            [0 if k == size else -1, 1 << 31, k, k, 0, size]
            for k, size in zip(wanted, sizes, strict=True)
        ]
        self.wanted = torch.tensor(wanted, dtype=torch.int32, device=device)
        self.search = torch.tensor(search, dtype=torch.int64, device=device)
        self.counts, self.ticket, self.tallies = (
            torch.zeros(n, dtype=torch.int32, device=device)
            for n in (len(rows) * BINS.value, len(rows), self.table.programs)
        )
        self.shape = {"BLOCK": BLOCK, "LOOPS": LOOPS, "num_warps": WARPS}

    def __call__(
        self, grads: list[Tensor], *, lr: float | Tensor, beta1: float, beta2: float, eps: float,
        weight_decay: float, maximize: bool, capturable: bool,
    ) -> None:  # fmt: skip
        """One update."""
        self.count += 1
        torch._foreach_add_(self.steps, 1)
        # Held until the launch: a copy may be among them.
        grads = [
            dense(g if g.dtype == self.dtype else g.to(self.dtype), p)
            for g, p in zip(grads, self.params, strict=True)
        ]
        table, search, kind = self.table, self.search, TYPES[self.dtype]
        with torch.cuda.device_of(search):
            table.find([grads, *self.kept])
        g_aligned, *others = table.aligned
        shape, aligned = {"S": kind, **self.shape}, all(others)
        where = (table.addresses, table.sizes, table.owner, table.part, table.count)
        there = capturable or (isinstance(lr, Tensor) and not lr.is_cpu)
        rates: Any = table.sizes  # which are not read then
        numbers = [0.0] * 3
        if there:
            # In float64: near 0, 1 − βᵗ has few digits left in float32.
            given = _rates(lr, beta1, beta2, weight_decay, self.steps[0].double())
            rates = on_device(given, table.device)
        else:
            numbers = _rates(float(lr), beta1, beta2, weight_decay, self.count)
        grid = (table.programs,)
        with torch.cuda.device_of(search):
            learn_kernel[grid](
                *where, self.wanted, search, self.counts, self.ticket, 1 - beta1, beta2, 1 - beta2,
                P=kind, ALIGNED=aligned, G_ALIGNED=g_aligned, MAXIMIZE=maximize, **shape,
            )  # fmt: skip
            if self.searched:
                grain, rounds = _GRAINS[self.dtype]
                for _ in range(rounds):
                    narrow_kernel[grid](
                        *where, search, self.counts, self.ticket, GRAIN=grain, **shape
                    )
                ties_kernel[grid](
                    *where, search, self.tallies, self.ticket, ALIGNED=aligned, **shape
                )
            move_kernel[grid](
                *where, search, rates, *numbers, eps,
                P=kind, ALIGNED=aligned, ON_DEVICE=there, **shape,
            )  # fmt: skip


def _rates(lr: Any, beta1: float, beta2: float, weight_decay: float, t: Any) -> list[Any]:
    """step, r and keep at step ``t``: see :mod:`holdfast.kernels.mofo`."""
    return [lr / (1 - beta1**t), 1 / (1 - beta2**t) ** 0.5, 1 - lr * weight_decay]
