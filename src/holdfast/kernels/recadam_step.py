"""RecAdam's step over many tensors by its kernel: one launch for each kind of tensors.

A step is planned for some parameters and called at each update: where things lie and what they are
is found out once. Only gradients may lie elsewhere each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from holdfast._torch import eight_bit
from holdfast._torch.memory import dense, is_dense
from holdfast._torch.sharding import is_sharded, like, local, local_like
from holdfast.kernels import available
from holdfast.kernels.fetching import Fetching, Piece
from holdfast.kernels.recadam import BLOCK, WARPS, recadam_kernel
from holdfast.kernels.tables import TYPES, Table, on_device
from holdfast.methods._recadam import Row

__all__ = ["Rates", "RecAdamStep", "takes"]

_TYPES = {**TYPES, torch.uint8: tl.uint8}


def takes(row: Row) -> bool:
    """Whether the kernel can update a parameter: its tensors lie alike, in dtypes that it knows."""
    p, m, v = (local(t) for t in (row.p, row.m, row.v))
    if not available(p.device) or not p.device == m.device == v.device:
        return False
    known = all(t is None or t.dtype in _TYPES for t in (p, m, v, row.anchor, row.weight))
    alike = p.numel() < 2 or p.stride() == m.stride() == v.stride()
    return known and m.dtype == v.dtype and alike and is_dense(p)


@dataclass
class Rates:
    """What a step does, as numbers or as tensors on the device.

    Attributes:
        lr, lam, gamma, weight_decay: of RecAdam; the first two may be tensors.
        beta1, beta2, eps, maximize: Adam's.
        grad_scale, found_inf: of a GradScaler, on the device.
        stochastic: round bfloat16 weights at random.
        seed, updates: of what is rounded at random; ``updates`` counts where rates are tensors.
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
    stochastic: bool = False
    seed: int = 0
    updates: Tensor | None = None

    def at(self, t: float | Tensor, pulled: bool) -> list[Any]:
        """c, step, r and keep at step ``t``: see :mod:`holdfast.kernels.recadam`."""
        lam = self.lam if pulled else 1.0
        return [
            self.lr * (1 - lam) * self.gamma,
            self.lr * lam / (1 - self.beta1**t),
            1 / (1 - self.beta2**t) ** 0.5,
            1 - self.lr * self.weight_decay,
        ]


class RecAdamStep:
    """Updates parameters by RecAdam's kernel.

    Args:
        rows: the parameters' tensors. Those without an anchor get plain Adam (λ = 1).
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)
        self._tensors = [t for row in rows for t in (row.p, row.m, row.v)]
        self._sharded = any(is_sharded(row.p) for row in rows)
        self._steps = [row.step for row in rows]
        self._known = self._places()
        self._forms = [(local(row.p).dtype, local(row.p).stride()) for row in rows]
        self._version = self._steps[0]._version
        self._launches, self._fetching = _launches(rows)

    def fits(self) -> bool:
        """Whether weights and moments lie where they did, and no count was set anew."""
        return self._steps[0]._version == self._version and self._places() == self._known

    def _places(self) -> list[int]:
        if self._sharded:
            return [local(t).data_ptr() for t in self._tensors]
        return [t.data_ptr() for t in self._tensors]

    def __call__(self, grads: Sequence[Tensor], rates: Rates) -> None:
        """One update; the counts of steps are advanced."""
        if self._sharded:
            grads = [local_like(g, row.p) for g, row in zip(grads, self._rows, strict=True)]
        torch._foreach_add_(self._steps, 1)
        if rates.found_inf is not None:
            torch._foreach_sub_(self._steps, [rates.found_inf.to(s.device) for s in self._steps])
        self._version = self._steps[0]._version
        if [(g.dtype, g.stride()) for g in grads] != self._forms:
            params = [local(row.p) for row in self._rows]
            grads = [dense(g.to(p.dtype), p) for g, p in zip(grads, params, strict=True)]
        for launch in self._launches:
            with torch.cuda.device_of(launch.table.sizes):  # Triton launches on the current one
                launch(grads, rates)
        self.let_go()

    def let_go(self) -> None:
        """Free anchors that were fetched for this step."""
        for fetching in self._fetching:
            fetching.let_go()


class _Kind(NamedTuple):
    """What the parameters of one launch have in common."""

    device: torch.device
    p: torch.dtype
    m: torch.dtype
    anchor: torch.dtype | None
    weight: torch.dtype | None
    constant: bool
    far: bool
    steps: float


class _Launch:
    """Parts of parameters of one kind."""

    def __init__(
        self, kind: _Kind, rows: Sequence[Row], pieces: Sequence[Piece], fetching: Fetching | None
    ) -> None:
        self.kind, self.pieces, self.count = kind, pieces, kind.steps
        self.step, self.fetching = rows[pieces[0].row].step, fetching
        self.held = {piece.row: _columns(rows[piece.row], kind) for piece in pieces}
        eight = kind.m == torch.uint8
        places = [
            [_address(self.held[piece.row][column], piece.begin) for piece in pieces]
            for column in range(6)
        ]
        scales = [
            [_address(self.held[piece.row][column], piece.begin // eight_bit.BLOCK) if eight else 0
             for piece in pieces]
            for column in (6, 7)
        ]  # fmt: skip
        named = [[piece.row for piece in pieces], [piece.begin for piece in pieces]]
        block = eight_bit.BLOCK if eight else BLOCK
        self.table = Table.at(
            places + scales + named, [piece.end - piece.begin for piece in pieces], block,
            kind.device,
        )  # fmt: skip
        self.options = {
            "P": _TYPES[kind.p],
            "S": _TYPES[kind.m],
            "A": _TYPES[kind.anchor or kind.p],
            "F": _TYPES[kind.weight or kind.p],
            "BLOCK": block,
            "PULLED": kind.anchor is not None,
            "CONSTANT": kind.constant,
            "WEIGHTED": kind.weight is not None,
            "EIGHT_BIT": eight,
            "num_warps": 1 if eight else WARPS,
        }

    def __call__(self, grads: Sequence[Tensor], rates: Rates) -> None:
        self.count += 1
        table, none, size = self.table, self.table.sizes, self.kind.p.itemsize
        table.move(0, [grads[x.row].data_ptr() + x.begin * size for x in self.pieces])
        if self.fetching is not None:
            table.move(4, self.fetching.take(self.pieces[0].chunk))
        there = isinstance(rates.lam, Tensor) or isinstance(rates.lr, Tensor)
        pulled = self.kind.anchor is not None
        if there:
            # In float64: near 0, 1 − βᵗ has few digits left in float32.
            given = rates.at(self.step.double().clamp(min=1), pulled)  # 0: a step not made
            where, numbers = on_device(given, table.device), [0.0] * 4
        else:
            where, numbers = none, rates.at(self.count, pulled)
        g, p, m, v, a = table.aligned[:5]
        recadam_kernel[(table.programs,)](
            table.addresses, table.sizes, table.owner, table.part, table.count,
            where, *numbers, 1 - rates.beta1, rates.beta2, 1 - rates.beta2, rates.eps,
            self._near(rates.grad_scale), self._near(rates.found_inf), self._near(rates.updates),
            rates.seed,
            ALIGNED=p and m and v, G_ALIGNED=g, A_ALIGNED=a, MAXIMIZE=rates.maximize,
            ON_DEVICE=there, SCALED=rates.grad_scale is not None,
            SKIPS=rates.found_inf is not None,
            STOCHASTIC=rates.stochastic and self.kind.p == torch.bfloat16, **self.options,
        )  # fmt: skip

    def _near(self, tensor: Tensor | None) -> Tensor:
        """A tensor on the device; any where there is none, which is not read then."""
        return self.table.sizes if tensor is None else tensor.to(self.table.device)


def _launches(rows: Sequence[Row]) -> tuple[list[_Launch], list[Fetching]]:
    """A launch for each kind; where anchors are far, one for each chunk of them."""
    kinds: dict[_Kind, list[int]] = {}
    # Read from the device only now. A state that was saved elsewhere may have them on the CPU.
    counts = torch.stack([row.step.to(rows[0].step.device) for row in rows]).tolist()
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        p, a = local(row.p), row.anchor
        if p.numel():
            constant = a is not None and a.numel() > 1 and not any(a.stride())
            kind = _Kind(
                p.device, p.dtype, row.m.dtype, None if a is None else a.dtype,
                None if a is None or row.weight is None else row.weight.dtype, constant,
                a is not None and not constant and _device(a) != p.device, count,
            )  # fmt: skip
            kinds.setdefault(kind, []).append(i)
    launches, couriers = [], []
    for kind, numbers in kinds.items():
        sizes = {i: local(rows[i].p).numel() for i in numbers}
        if not kind.far:
            pieces = [Piece(i, 0, size) for i, size in sizes.items()]
            launches.append(_Launch(kind, rows, pieces, None))
            continue
        far = {i: (rows[i].p, _here(rows[i].anchor, rows[i].p)) for i in numbers}
        fetching = Fetching(far, kind.device)
        couriers.append(fetching)
        launches += [_Launch(kind, rows, pieces, fetching) for pieces in fetching.chunks]
    return launches, couriers


def _columns(row: Row, kind: _Kind) -> list[Tensor | None]:
    """A parameter's tensors as the table has them, all lying as the weights do.

    Gradients are found at each step, as are anchors that are far.
    """
    p, a, f = local(row.p), None, None
    if kind.anchor is not None and not kind.far and row.anchor is not None:
        constant = kind.constant and not is_sharded(row.anchor)
        a = row.anchor.as_strided((1,), (1,)) if constant else _here(row.anchor, row.p)
        a = a.to(kind.device)
    if kind.weight is not None and row.weight is not None:
        f = dense(local(like(row.weight, row.p, row.weight.dtype)), p)
    return [None, p, local(row.m), local(row.v), a, f, row.m_scale, row.v_scale]


def _address(tensor: Tensor | None, begin: int) -> int:
    return 0 if tensor is None else tensor.data_ptr() + begin * tensor.element_size()


def _here(anchor: Tensor | None, p: Tensor) -> Tensor:
    """An anchor where it is, but lying as its parameter does, and of it the same part."""
    if anchor is None:
        raise ValueError("there is no anchor")
    if is_sharded(p):
        anchor = local(like(anchor, p, anchor.dtype))
    return dense(anchor, local(p))


def _device(tensor: Tensor) -> torch.device:
    return local(tensor).device
