"""RecAdam's step in one pass: every weight, gradient, moment and anchor is read once.

    m ← m + (1−β₁)(g − m)        v ← β₂v + (1−β₂)g²
    θ ← θ·keep − step·m / (√v·r + ε)
    θ ← θ + min(1, c·F)·(θ* − θ)

with keep = 1 − lr·wd, step = lr·λ/(1−β₁ᵗ), r = 1/√(1−β₂ᵗ) and c = lr·(1−λ)·γ. The arithmetic is in
float32, whatever the tensors are in. Moments of 8 bits are as in ``holdfast._torch.eight_bit``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from holdfast._torch import eight_bit

__all__ = ["BLOCK", "WARPS", "recadam_kernel", "toward"]

#: Elements of a program, and its warps: the best of nine on an H200, from 5 M to 1.2 G weights.
BLOCK, WARPS = 512, 4

_M_SHIFT = tl.constexpr(eight_bit.SIGNED.shift)
_M_ZERO = tl.constexpr(eight_bit.SIGNED.zero)
_M_MOST = tl.constexpr(eight_bit.SIGNED.most)
_V_SHIFT = tl.constexpr(eight_bit.UNSIGNED.shift)
_V_ZERO = tl.constexpr(eight_bit.UNSIGNED.zero)
_V_MOST = tl.constexpr(eight_bit.UNSIGNED.most)


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
        table: addresses, a row each for gradients, weights, both moments, anchors, importances and
            both moments' scales; then the parameter's number, and its element where the tensor
            begins: what is drawn at random does not depend on how parameters are parted.
        sizes: of the tensors. owner, part: of each program, its tensor and its block of it.
        tensors: how many there are.
        rates: c, step, r and keep in memory, if they are ON_DEVICE; else they are arguments.
        new1, new2: 1 − β₁ and 1 − β₂, which float32 does not have to many digits.
        scale: of the gradients, if they are SCALED. found_inf: whether one of them is infinite, if
            that is known: it SKIPS the step then.
        updates, seed: of random rounding; the count in memory is added if rates are ON_DEVICE.
        P, S, A, F: dtypes of weights and gradients, of moments, of anchors, of importances.
        ALIGNED, G_ALIGNED, A_ALIGNED: whether the addresses of weights and moments, of gradients
            and of anchors are multiples of 16 bytes.
        PULLED, CONSTANT, WEIGHTED: whether there are anchors, whether each is one number for its
            whole tensor, and whether there are importances.
        STOCHASTIC: whether bfloat16 weights are rounded at random.
        EIGHT_BIT: whether moments have 8 bits: a block has one scale.
    """
    program = tl.program_id(0)
    own = tl.load(owner + program)
    block = tl.load(part + program).to(tl.int64)
    begin = block * BLOCK
    size = tl.load(sizes + own)
    g_ = tl.load(table + own).to(tl.pointer_type(P))
    p_ = tl.load(table + tensors + own).to(tl.pointer_type(P))
    m_ = tl.load(table + 2 * tensors + own).to(tl.pointer_type(S))
    v_ = tl.load(table + 3 * tensors + own).to(tl.pointer_type(S))
    a_ = tl.load(table + 4 * tensors + own).to(tl.pointer_type(A))
    f_ = tl.load(table + 5 * tensors + own).to(tl.pointer_type(F))
    tops = tl.load(table + 6 * tensors + own).to(tl.pointer_type(tl.float32)) + block
    roots = tl.load(table + 7 * tensors + own).to(tl.pointer_type(tl.float32)) + block
    name, start = tl.load(table + 8 * tensors + own), tl.load(table + 9 * tensors + own)
    if ALIGNED:
        p_ = tl.multiple_of(p_, 16)
        m_, v_ = tl.multiple_of(m_, 16), tl.multiple_of(v_, 16)
    if G_ALIGNED:
        g_ = tl.multiple_of(g_, 16)
    if A_ALIGNED:
        a_ = tl.multiple_of(a_, 16)
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
    if begin + BLOCK <= size:  # without a mask loads are as wide as they can be
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
    p = _load(p_, i, size, FULL).to(tl.float32)
    g = _load(g_, i, size, FULL).to(tl.float32) * factor
    if EIGHT_BIT:
        m = _signed(_load(m_, i, size, FULL), tl.load(tops))
        root = _unsigned(_load(v_, i, size, FULL), tl.load(roots))
        v = root * root
    else:
        m = _load(m_, i, size, FULL).to(tl.float32)
        v = _load(v_, i, size, FULL).to(tl.float32)
    m = m + new1 * (g - m)
    v = beta2 * v + new2 * g * g
    root = tl.sqrt(v)
    p = p * keep - step * m / (root * r + eps)
    if PULLED:
        if WEIGHTED:
            c = c * _load(f_, i, size, FULL).to(tl.float32)
        if CONSTANT:
            anchor = tl.load(a_).to(tl.float32)
        else:
            anchor = _load(a_, i, size, FULL).to(tl.float32)
        p = toward(p, anchor, tl.minimum(c, 1.0))
    if EIGHT_BIT:
        noise = _noise(seed, name, start + i)
        top, most = tl.max(tl.abs(m), 0), tl.max(root, 0)
        m8 = _encode(tl.abs(m), top, noise & 0xFFFF, _M_SHIFT, _M_ZERO, _M_MOST)
        v8 = _encode(root, most, noise >> 16, _V_SHIFT, _V_ZERO, _V_MOST)
        m8 = tl.where(m < 0, m8 + 128, m8)
        v8 = tl.where((v8 == 0) & (root > 0), 1, v8)  # not 0: m would be divided by it
        _store(m_, i, m8.to(tl.uint8), size, FULL)
        _store(v_, i, v8.to(tl.uint8), size, FULL)
        tl.store(tops, top)
        tl.store(roots, most)
    else:
        _store(m_, i, m.to(S), size, FULL)
        _store(v_, i, v.to(S), size, FULL)
    if STOCHASTIC:
        bits = p.to(tl.int32, bitcast=True)
        some = (_noise(seed + 1, name, start + i) & 0xFFFF).to(tl.int32)
        finite = (bits & 0x7F800000) != 0x7F800000
        p = tl.where(finite, (bits + some) & -65536, bits).to(tl.float32, bitcast=True)
    _store(p_, i, p.to(P), size, FULL)


@triton.jit
def toward(p, anchor, share):
    """A share of the way: from the nearer end, as torch.lerp, or the last step would be rounded."""
    return tl.where(share < 0.5, p + share * (anchor - p), anchor - (1.0 - share) * (anchor - p))


@triton.jit
def _load(pointer, i, size, FULL: tl.constexpr):
    if FULL:
        x = tl.load(pointer + i)
    else:
        x = tl.load(pointer + i, i < size, other=0)
    return x


@triton.jit
def _store(pointer, i, x, size, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer + i, x)
    else:
        tl.store(pointer + i, x, i < size)


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
    """The code of x / top, rounded up or down with the odds of being nearer."""
    y = tl.where(top > 1e-37, x / top, 0.0)
    bits = y.to(tl.int32, bitcast=True) + (noise.to(tl.int32) << (SHIFT - 16))
    return tl.minimum(tl.maximum((bits >> SHIFT) - ZERO, 0), MOST)


@triton.jit
def _noise(seed, name, i):
    """32 random bits for each element: :func:`holdfast._torch.eight_bit.noise`."""
    x = i.to(tl.uint32) + name.to(tl.uint32) * 0x85EBCA6B + seed.to(tl.uint32) * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
