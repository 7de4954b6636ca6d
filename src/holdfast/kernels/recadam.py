"""RecAdam's step by one Triton kernel: it reads every weight, gradient, moment and anchor once.

    m ← m + (1−β₁)(g − m)        v ← β₂v + (1−β₂)g²
    θ ← θ·keep − step·m / (√v·r + ε)
    θ ← θ + min(1, c·F)·(θ* − θ)

with keep = 1 − lr·wd, step = lr·λ/(1−β₁ᵗ), r = 1/√(1−β₂ᵗ) and c = lr·(1−λ)·γ. The arithmetic is in
float32, whatever the dtypes of the tensors. 8-bit moments have the formats of
``holdfast._optim.backends``.

:class:`RecAdamStep` is planned once for a list of parameters and called at each update. There is
one launch per kind of tensors. Only gradients may have new addresses at each call.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast._torch.layout import dense, is_dense, is_sharded, like, local, local_like
from holdfast.kernels import available
from holdfast.kernels.fetching import Fetching, Piece
from holdfast.kernels.tables import (
    TYPES,
    AddressTable,
    addresses,
    load,
    on_device,
    pointer_to,
    store,
    toward,
)

#: Elements per program, and its warps: the best of nine on an H200, from 5 M to 1.2 G weights.
BLOCK, WARPS = 512, 4
#: Elements that share a scale of 8-bit moments.
BLOCK_8BIT = 256

# The 8-bit formats: the bits that are dropped, the code of 1, and the upper bits of code 0.
_M_SHIFT, _M_MOST = tl.constexpr(20), tl.constexpr(127)
_V_SHIFT, _V_MOST = tl.constexpr(19), tl.constexpr(255)
_M_ZERO = tl.constexpr((0x3F800000 >> 20) - 127)
_V_ZERO = tl.constexpr((0x3F800000 >> 19) - 255)

_TYPES = {**TYPES, torch.uint8: tl.uint8}
_DTYPE = attrgetter("dtype")


class Operands(NamedTuple):
    """The tensors of one parameter."""

    p: Tensor
    m: Tensor
    v: Tensor
    step: Tensor  # the parameter's own count
    anchor: Tensor | None = None  # None is plain Adam (λ = 1)
    weight: Tensor | None = None  # the importance of each coordinate; None is 1
    m_scale: Tensor | None = None  # of 8-bit moments
    v_scale: Tensor | None = None


def takes(row: Operands) -> bool:
    """Whether the kernel can update a parameter: it knows the dtypes, and the strides agree."""
    p, m, v = (local(t) for t in row[:3])
    if not available(p.device) or not p.device == m.device == v.device:
        return False
    known = all(t is None or t.dtype in _TYPES for t in (p, m, v, row.anchor, row.weight))
    alike = p.numel() < 2 or p.stride() == m.stride() == v.stride()
    return known and m.dtype == v.dtype and alike and is_dense(p)


class RecAdamStep:
    """Updates parameters by RecAdam's kernel, as long as their tensors stay where they are."""

    def __init__(self, rows: Sequence[Operands]) -> None:
        self._rows = list(rows)
        self._sharded = any(is_sharded(row.p) for row in rows)
        self._steps = [row.step for row in rows]
        base = self._steps[0]._base
        if (
            base is not None
            and len(base) == len(rows)
            and all(s._base is base for s in self._steps)
        ):
            self._steps = [base]  # all of them at once
        params = [local(row.p) for row in rows]
        self._forms = [*map(_DTYPE, params)], [*map(Tensor.stride, params)]
        self._launches, self._fetching = _plan_launches(rows)

    def __call__(
        self, grads: Sequence[Tensor], *, found_inf: Tensor | None = None, **settings: Any
    ) -> None:
        """Make one update and advance the step counts.

        ``found_inf`` is 1 on the device if a gradient is infinite; then the step is skipped. lr and
        lam are numbers, or tensors on the device. With stochastic rounding of bfloat16 weights,
        updates (a count on the device) is added to the seed.
        """
        if self._sharded:
            grads = [local_like(g, row.p) for g, row in zip(grads, self._rows, strict=True)]
        torch._foreach_add_(self._steps, 1)
        if found_inf is not None:
            torch._foreach_sub_(self._steps, [found_inf.to(s.device) for s in self._steps])
        if ([*map(_DTYPE, grads)], [*map(Tensor.stride, grads)]) != self._forms:
            params = [local(row.p) for row in self._rows]
            grads = [dense(g.to(p.dtype), p) for g, p in zip(grads, params, strict=True)]
        for launch in self._launches:
            with torch.cuda.device_of(launch.table.sizes):  # Triton launches on the current one
                launch(grads, found_inf=found_inf, **settings)
        self.discard_fetched()

    def discard_fetched(self) -> None:
        """Free fetched anchors: the step is done, or is not made."""
        for fetching in self._fetching:
            fetching.discard()


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
    """One launch: pieces of parameters of one kind."""

    def __init__(
        self,
        kind: _Kind,
        rows: Sequence[Operands],
        pieces: Sequence[Piece],
        fetching: Fetching | None,
    ) -> None:
        self.kind, self.pieces, self.count = kind, pieces, kind.steps
        self.step, self.fetching = rows[pieces[0].row].step, fetching
        self.held = {piece.row: _columns(rows[piece.row], kind) for piece in pieces}
        eight = kind.m == torch.uint8
        block = BLOCK_8BIT if eight else BLOCK
        strides = [1] * 6 + [block] * 2  # one scale per block
        self.rows = [piece.row for piece in pieces]
        self.whole = self.rows == [*range(len(rows))]
        begins = np.array([piece.begin for piece in pieces])
        self.offsets = begins * kind.p.itemsize  # of the pieces in their gradients
        places = [
            np.array(
                [_address(self.held[piece.row][column], piece.begin // stride) for piece in pieces]
            )
            for column, stride in enumerate(strides)
        ]
        named = [np.array(self.rows), begins]
        sizes = [piece.end - piece.begin for piece in pieces]
        self.table = AddressTable(places + named, sizes, block, kind.device)
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

    def __call__(
        self, grads: Sequence[Tensor], *, lr: Any, lam: Any, gamma: float, weight_decay: float,
        beta1: float, beta2: float, eps: float, maximize: bool = False,
        grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
        stochastic: bool = False, seed: int = 0, updates: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.count += 1
        table = self.table
        own = grads if self.whole else [grads[row] for row in self.rows]
        table.move(0, addresses(own) + self.offsets)
        if self.fetching is not None:
            table.move(4, np.array(self.fetching.take(self.pieces[0].chunk)))
        on_gpu = isinstance(lam, Tensor) or isinstance(lr, Tensor)
        lam = lam if self.kind.anchor is not None else 1.0

        def rates(t: Any) -> list[Any]:
            """c, step, r and keep at step ``t``."""
            step, r = lr * lam / (1 - beta1**t), 1 / (1 - beta2**t) ** 0.5
            return [lr * (1 - lam) * gamma, step, r, 1 - lr * weight_decay]

        if on_gpu:
            # In float64: near 0, 1 − βᵗ has few digits left in float32. 0 is a skipped step.
            where = on_device(rates(self.step.double().clamp(min=1)), table.device)
            numbers = [0.0] * 4
        else:
            where, numbers = table.sizes, rates(self.count)
        g, p, m, v, a = table.aligned[:5]
        recadam_kernel[(table.programs,)](
            *table.arguments, where, *numbers, 1 - beta1, beta2, 1 - beta2, eps,
            self._near(grad_scale), self._near(found_inf), self._near(updates), seed,
            ALIGNED=p and m and v, G_ALIGNED=g, A_ALIGNED=a, MAXIMIZE=maximize,
            ON_DEVICE=on_gpu, SCALED=grad_scale is not None, SKIPS=found_inf is not None,
            STOCHASTIC=stochastic and self.kind.p == torch.bfloat16, **self.options,
        )  # fmt: skip

    def _near(self, tensor: Tensor | None) -> Tensor:
        """A tensor on the device; for None any tensor, which the kernel does not read."""
        return self.table.sizes if tensor is None else tensor.to(self.table.device)


def _plan_launches(rows: Sequence[Operands]) -> tuple[list[_Launch], list[Fetching]]:
    """One launch per kind; one per chunk of anchors where these are in CPU memory."""
    kinds: dict[_Kind, list[int]] = {}
    # Read from the device only now. A state that was saved elsewhere may have counts on the CPU.
    counts = torch.stack([row.step.to(rows[0].step.device) for row in rows]).tolist()
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        p, a = local(row.p), row.anchor
        if p.numel():
            constant = a is not None and a.numel() > 1 and not any(a.stride())
            kind = _Kind(
                p.device, p.dtype, row.m.dtype, None if a is None else a.dtype,
                None if a is None or row.weight is None else row.weight.dtype, constant,
                a is not None and not constant and local(a).device != p.device, count,
            )  # fmt: skip
            kinds.setdefault(kind, []).append(i)
    launches, fetchings = [], []
    for kind, numbers in kinds.items():
        if not kind.far:
            pieces = [Piece(i, 0, local(rows[i].p).numel()) for i in numbers]
            launches.append(_Launch(kind, rows, pieces, None))
            continue
        far = {i: (rows[i].p, _laid_out(rows[i])) for i in numbers}
        fetching = Fetching(far, kind.device)
        fetchings.append(fetching)
        launches += [_Launch(kind, rows, pieces, fetching) for pieces in fetching.chunks]
    return launches, fetchings


def _columns(row: Operands, kind: _Kind) -> list[Tensor | None]:
    """A parameter's tensors in the order of the table, all with the strides of the weights.

    Gradients are looked up at each step, as are anchors in CPU memory.
    """
    p, a, f = local(row.p), None, None
    if row.anchor is not None and not kind.far:
        constant = kind.constant and not is_sharded(row.anchor)
        a = row.anchor.as_strided((1,), (1,)) if constant else _laid_out(row)
        a = a.to(kind.device)
    if kind.weight is not None and row.weight is not None:
        f = dense(local(like(row.weight, row.p, row.weight.dtype)), p)
    return [None, p, local(row.m), local(row.v), a, f, row.m_scale, row.v_scale]


def _laid_out(row: Operands) -> Tensor:
    """The anchor on its own device, with the strides and the sharding of its parameter."""
    anchor: Any = row.anchor
    if is_sharded(row.p):
        anchor = local(like(anchor, row.p, anchor.dtype))
    return dense(anchor, local(row.p))


def _address(tensor: Tensor | None, begin: int) -> int:
    return 0 if tensor is None else tensor.data_ptr() + begin * tensor.element_size()


@triton.jit(do_not_specialize=["seed"])
def recadam_kernel(
    table, sizes, owner, part, tensors,
    rates, c, step, r, keep, new1, beta2, new2, eps,
    scale, found_inf, updates, seed,
    P: tl.constexpr, S: tl.constexpr, A: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr, G_ALIGNED: tl.constexpr, A_ALIGNED: tl.constexpr,
    PULLED: tl.constexpr, CONSTANT: tl.constexpr, WEIGHTED: tl.constexpr, MAXIMIZE: tl.constexpr,
    ON_DEVICE: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr,
    STOCHASTIC: tl.constexpr, EIGHT_BIT: tl.constexpr,
):  # fmt: skip
    """One block of one tensor.

    Args:
        table, sizes, owner, part, tensors: see :class:`AddressTable`. The rows are gradients,
            weights, both moments, anchors, importances and both moments' scales; then the
            parameter's number and the element at which this tensor begins, so that random bits do
            not depend on how parameters are split.
        rates: c, step, r and keep in memory if ON_DEVICE; otherwise they are arguments.
        new1, new2: 1 − β₁ and 1 − β₂, computed in float64.
        scale: of the gradients if SCALED. found_inf: not 0 if the step is skipped, if SKIPS.
        updates, seed: for random rounding; the count in memory is added if ON_DEVICE.
        P, S, A, F: dtypes of weights and gradients, moments, anchors, importances.
        PULLED, CONSTANT, WEIGHTED: whether there are anchors, whether each anchor is one number
            for its whole tensor, and whether there are importances.
        STOCHASTIC: whether bfloat16 weights are rounded stochastically.
        EIGHT_BIT: whether moments have 8 bits; a block then has one scale.
    """
    program = tl.program_id(0)
    own = tl.load(owner + program)
    block = tl.load(part + program).to(tl.int64)
    begin = block * BLOCK
    size = tl.load(sizes + own)
    g_ = pointer_to(table + own, P, G_ALIGNED)
    p_ = pointer_to(table + tensors + own, P, ALIGNED)
    m_ = pointer_to(table + 2 * tensors + own, S, ALIGNED)
    v_ = pointer_to(table + 3 * tensors + own, S, ALIGNED)
    a_ = pointer_to(table + 4 * tensors + own, A, A_ALIGNED)
    f_ = pointer_to(table + 5 * tensors + own, F, False)
    tops = pointer_to(table + 6 * tensors + own, tl.float32, False) + block
    roots = pointer_to(table + 7 * tensors + own, tl.float32, False) + block
    name, start = tl.load(table + 8 * tensors + own), tl.load(table + 9 * tensors + own)
    if ON_DEVICE:
        c, step = tl.load(rates), tl.load(rates + 1)
        r, keep = tl.load(rates + 2), tl.load(rates + 3)
        seed += tl.load(updates).to(tl.int32) * 7919
    factor = 1.0
    if SCALED:
        factor = 1.0 / tl.load(scale)
    if SKIPS:
        size = tl.where(tl.load(found_inf) == 0, size, 0)
    if MAXIMIZE:
        factor = -factor
    i = tl.multiple_of(begin, BLOCK) + tl.arange(0, BLOCK)
    if begin + BLOCK <= size:
        _block(
            g_, p_, m_, v_, a_, f_, tops, roots, i, size, name, start, seed,
            factor, c, step, r, keep, new1, beta2, new2, eps,
            P, S, True, PULLED, CONSTANT, WEIGHTED, STOCHASTIC, EIGHT_BIT,
        )  # fmt: skip
    elif begin < size:
        _block(
            g_, p_, m_, v_, a_, f_, tops, roots, i, size, name, start, seed,
            factor, c, step, r, keep, new1, beta2, new2, eps,
            P, S, False, PULLED, CONSTANT, WEIGHTED, STOCHASTIC, EIGHT_BIT,
        )  # fmt: skip


@triton.jit
def _block(
    g_, p_, m_, v_, a_, f_, tops, roots, i, size, name, start, seed,
    factor, c, step, r, keep, new1, beta2, new2, eps,
    P: tl.constexpr, S: tl.constexpr, FULL: tl.constexpr, PULLED: tl.constexpr,
    CONSTANT: tl.constexpr, WEIGHTED: tl.constexpr, STOCHASTIC: tl.constexpr,
    EIGHT_BIT: tl.constexpr,
):  # fmt: skip
    p = load(p_, i, size, FULL).to(tl.float32)
    g = load(g_, i, size, FULL).to(tl.float32) * factor
    if EIGHT_BIT:
        m = _signed(load(m_, i, size, FULL), tl.load(tops))
        root = _unsigned(load(v_, i, size, FULL), tl.load(roots))
        v = root * root
    else:
        m = load(m_, i, size, FULL).to(tl.float32)
        v = load(v_, i, size, FULL).to(tl.float32)
    m = m + new1 * (g - m)
    v = beta2 * v + new2 * g * g
    root = tl.sqrt(v)
    p = p * keep - step * m / (root * r + eps)
    if PULLED:
        if WEIGHTED:
            c = c * load(f_, i, size, FULL).to(tl.float32)
        if CONSTANT:
            anchor = tl.load(a_).to(tl.float32)
        else:
            anchor = load(a_, i, size, FULL).to(tl.float32)
        p = toward(p, anchor, tl.minimum(c, 1.0))
    if EIGHT_BIT:
        noise = _noise(seed, name, start + i)
        top, most = tl.max(tl.abs(m), 0), tl.max(root, 0)
        m8 = _encode(tl.abs(m), top, noise & 0xFFFF, _M_SHIFT, _M_ZERO, _M_MOST)
        v8 = _encode(root, most, noise >> 16, _V_SHIFT, _V_ZERO, _V_MOST)
        m8 = tl.where(m < 0, m8 + 128, m8)
        v8 = tl.where((v8 == 0) & (root > 0), 1, v8)  # m is divided by it
        store(m_, i, m8.to(tl.uint8), size, FULL)
        store(v_, i, v8.to(tl.uint8), size, FULL)
        tl.store(tops, top)
        tl.store(roots, most)
    else:
        store(m_, i, m.to(S), size, FULL)
        store(v_, i, v.to(S), size, FULL)
    if STOCHASTIC:
        bits = p.to(tl.int32, bitcast=True)
        some = (_noise(seed + 1, name, start + i) & 0xFFFF).to(tl.int32)
        finite = (bits & 0x7F800000) != 0x7F800000
        p = tl.where(finite, (bits + some) & -65536, bits).to(tl.float32, bitcast=True)
    store(p_, i, p.to(P), size, FULL)


@triton.jit
def _signed(code, top):
    q = (code & 127).to(tl.int32)
    x = ((q + _M_ZERO) << _M_SHIFT).to(tl.float32, bitcast=True) * top
    x = tl.where(q == 0, 0.0, x)
    return tl.where(code > 127, -x, x)


@triton.jit
def _unsigned(code, top):
    q = code.to(tl.int32)
    x = ((q + _V_ZERO) << _V_SHIFT).to(tl.float32, bitcast=True) * top
    return tl.where(q == 0, 0.0, x)


@triton.jit
def _encode(x, top, noise, SHIFT: tl.constexpr, ZERO: tl.constexpr, MOST: tl.constexpr):
    """The code of x / top, rounded stochastically without bias."""
    y = tl.where(top > 1e-37, x / top, 0.0)
    bits = y.to(tl.int32, bitcast=True) + (noise.to(tl.int32) << (SHIFT - 16))
    return tl.minimum(tl.maximum((bits >> SHIFT) - ZERO, 0), MOST)


@triton.jit
def _noise(seed, name, i):
    """32 random bits per element: :func:`holdfast._optim.backends.noise`."""
    x = i.to(tl.uint32) + name.to(tl.uint32) * 0x85EBCA6B + seed.to(tl.uint32) * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
