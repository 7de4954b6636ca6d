"""RecAdam's step over many tensors by its kernel: one launch for each kind of tensors.

Tables and counts of steps are kept from one step to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from holdfast._sharding import is_sharded, like
from holdfast.kernels.recadam import BLOCK, WARPS, recadam_kernel
from holdfast.kernels.tables import Table, dense
from holdfast.optim._recadam import Row

__all__ = ["Rates", "RecAdamStep", "takes"]

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def takes(row: Row) -> bool:
    """Whether the kernel can update a parameter: its tensors lie alike, in dtypes that it knows."""
    p, m, v = (_local(t) for t in (row.p, row.m, row.v))
    known = all(t is None or t.dtype in _TYPES for t in (p, m, v, row.anchor, row.weight))
    alike = p.numel() < 2 or p.stride() == m.stride() == v.stride()
    return known and m.dtype == v.dtype and alike and _is_dense(p)


@dataclass
class Rates:
    """What a step does, as numbers or as tensors on the device.

    Attributes:
        lr, lam, gamma, weight_decay: of RecAdam; the first two may be tensors.
        beta1, beta2, eps, maximize: Adam's.
        grad_scale, found_inf: of a GradScaler, on the device.
        seed: of stochastic rounding of bfloat16 weights; None rounds to the nearest value.
    """

    lr: float | Tensor
    lam: float | Tensor
    gamma: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    maximize: bool = False
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    seed: int | None = None

    def at(self, t: float | Tensor) -> list[Any]:
        """c, step, r and keep at step ``t``: see :mod:`holdfast.kernels.recadam`."""
        return [
            self.lr * (1 - self.lam) * self.gamma,
            self.lr * self.lam / (1 - self.beta1**t),
            1 / (1 - self.beta2**t) ** 0.5,
            1 - self.lr * self.weight_decay,
        ]


class RecAdamStep:
    """Updates parameters by RecAdam's kernel; made for one list of them, called at each step."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._held: list[Any] = []
        self._launches: list[_Launch] = []

    def __call__(self, rows: Sequence[Row], rates: Rates) -> None:
        """One update; the counts of steps are advanced."""
        known = [id(t) for row in rows for t in (row.p, row.m, row.step, row.anchor)]
        if known != self._known:  # with the tensors, so that no other has their id
            self._known, self._held = known, [(r.p, r.m, r.step, r.anchor) for r in rows]
            self._launches = _launches(rows)
        steps = [row.step for row in rows]
        torch._foreach_add_(steps, 1)
        if rates.found_inf is not None:
            torch._foreach_sub_(steps, [rates.found_inf.to(steps[0].device)] * len(steps))
        for launch in self._launches:
            launch([rows[i] for i in launch.rows], rates)

    def forget(self) -> None:
        """Look at everything anew at the next step: counts may have been changed."""
        self._known, self._launches = [], []


class _Launch:
    """Parameters of one kind: the same device and dtypes, the same count of steps."""

    def __init__(self, rows: Sequence[Row], numbers: Sequence[int], count: float) -> None:
        self.rows, self.count = list(numbers), count
        first = rows[0]
        anchored, weighted = first.anchor is not None, first.weight is not None
        self.table = Table(_columns(rows), BLOCK)
        self.options = {
            "P": _TYPES[first.p.dtype],
            "S": _TYPES[first.m.dtype],
            "A": _TYPES[first.anchor.dtype if first.anchor is not None else first.p.dtype],
            "F": _TYPES[first.weight.dtype if first.weight is not None else first.p.dtype],
            "BLOCK": BLOCK,
            "PULLED": anchored,
            "WEIGHTED": weighted and anchored,
            "num_warps": WARPS,
        }

    def __call__(self, rows: Sequence[Row], rates: Rates) -> None:
        self.count += 1
        columns = _columns(rows)  # held until the launch: a copy of a gradient may be among them
        self.table.find(columns)
        table, none = self.table, self.table.sizes
        on_device = isinstance(rates.lam, Tensor) or isinstance(rates.lr, Tensor)
        if on_device:
            # In float64: near 0, 1 − βᵗ has few digits left in float32.
            given = rates.at(rows[0].step.double().clamp(min=1))  # 0: a step that is not made
            stacked: Tensor = torch.stack([torch.as_tensor(x).to(table.device) for x in given])
            where, numbers = stacked.float(), [0.0] * 4
        else:
            where, numbers = none, rates.at(self.count)
        g, p, m, v, a, _ = table.aligned
        stochastic = rates.seed is not None and rows[0].p.dtype == torch.bfloat16
        recadam_kernel[(table.programs,)](
            table.addresses, table.sizes, table.owner, table.part, table.count,
            where, *numbers, rates.beta1, rates.beta2, rates.eps,
            none if rates.grad_scale is None else rates.grad_scale,
            none if rates.found_inf is None else rates.found_inf, rates.seed or 0,
            ALIGNED=p and m and v, G_ALIGNED=g, A_ALIGNED=a, MAXIMIZE=rates.maximize,
            ON_DEVICE=on_device, SCALED=rates.grad_scale is not None, STOCHASTIC=stochastic,
            **self.options,
        )  # fmt: skip


def _launches(rows: Sequence[Row]) -> list[_Launch]:
    kinds: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        tensors = (row.p, row.m, row.anchor, row.weight)
        if row.p.numel():
            dtypes = tuple(None if t is None else t.dtype for t in tensors)
            # The only time that a count is read from the device.
            kinds.setdefault((_local(row.p).device, dtypes, float(row.step)), []).append(i)
    return [
        _Launch([rows[i] for i in numbers], numbers, count)
        for (_, _, count), numbers in kinds.items()
    ]


def _columns(rows: Sequence[Row]) -> list[list[Tensor]]:
    """The tensors as the kernel's table has them, all lying as the weights do."""
    ps = [_local(row.p) for row in rows]
    anchors = [p if row.anchor is None else _beside(row.anchor, row.p) for p, row in _zip(ps, rows)]
    weights = [p if row.weight is None else _beside(row.weight, row.p) for p, row in _zip(ps, rows)]
    return [
        [dense(_local(row.grad), p) for p, row in _zip(ps, rows)],
        ps,
        [_local(row.m) for row in rows],
        [_local(row.v) for row in rows],
        anchors,
        weights,
    ]


def _zip(ps: Sequence[Tensor], rows: Sequence[Row]) -> zip[tuple[Tensor, Row]]:
    return zip(ps, rows, strict=True)


def _beside(tensor: Tensor, p: Tensor) -> Tensor:
    """On the parameter's device, parted and lying as it is, in its own dtype."""
    return dense(_local(like(tensor, p, tensor.dtype)), _local(p))


def _local(tensor: Tensor) -> Tensor:
    here: Any = tensor
    return here.to_local() if is_sharded(tensor) else tensor


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie side by side, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
