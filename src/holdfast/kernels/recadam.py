"""RecAdam's step in one pass: every weight, gradient, moment and anchor is read once.

    m ← m + (1−β₁)(g − m)        v ← β₂v + (1−β₂)g²
    θ ← θ·keep − step·m / (√v·r + ε)
    θ ← θ + min(1, c·F)·(θ* − θ)

with keep = 1 − lr·wd, step = lr·λ/(1−β₁ᵗ), r = 1/√(1−β₂ᵗ) and c = lr·(1−λ)·γ. The arithmetic is in
float32, whatever the tensors are in.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["BLOCK", "WARPS", "recadam_kernel"]

#: Elements of a program, and its warps: the best of nine on an H200, from 5 M to 1.2 G weights.
BLOCK, WARPS = 512, 4


@triton.jit
def recadam_kernel(
    table, sizes, owner, part, tensors,
    rates, c, step, r, keep, beta1, beta2, eps,
    scale, found_inf, seed,
    P: tl.constexpr, S: tl.constexpr, A: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr, G_ALIGNED: tl.constexpr, A_ALIGNED: tl.constexpr,
    PULLED: tl.constexpr, WEIGHTED: tl.constexpr, MAXIMIZE: tl.constexpr,
    ON_DEVICE: tl.constexpr, SCALED: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """One block of one tensor.

    Args:
        table: addresses, a row each for gradients, weights, both moments, anchors and importances.
        sizes: of the tensors. owner, part: of each program, its tensor and its block of it.
        tensors: how many there are.
        rates: c, step, r and keep in memory, if they are ON_DEVICE; else they are arguments.
        scale, found_inf: of the gradients, if they are SCALED: nothing is done if one is infinite.
        seed: of STOCHASTIC rounding to bfloat16.
        P, S, A, F: dtypes of weights and gradients, of moments, of anchors, of importances.
        ALIGNED, G_ALIGNED, A_ALIGNED: whether the addresses of weights and moments, of gradients
            and of anchors are multiples of 16 bytes.
        PULLED, WEIGHTED: whether there are anchors, and importances.
    """
    program = tl.program_id(0)
    own = tl.load(owner + program)
    begin = tl.load(part + program).to(tl.int64) * BLOCK
    size = tl.load(sizes + own)
    g_ = tl.load(table + own).to(tl.pointer_type(P))
    p_ = tl.load(table + tensors + own).to(tl.pointer_type(P))
    m_ = tl.load(table + 2 * tensors + own).to(tl.pointer_type(S))
    v_ = tl.load(table + 3 * tensors + own).to(tl.pointer_type(S))
    a_ = tl.load(table + 4 * tensors + own).to(tl.pointer_type(A))
    f_ = tl.load(table + 5 * tensors + own).to(tl.pointer_type(F))
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
    factor = 1.0
    if SCALED:
        factor = 1.0 / tl.load(scale)
        size = tl.where(tl.load(found_inf) == 0, size, 0)
    if MAXIMIZE:
        factor = -factor
    i = tl.multiple_of(begin, BLOCK) + tl.arange(0, BLOCK)
    if begin + BLOCK <= size:  # without a mask loads are as wide as they can be
        p = tl.load(p_ + i).to(tl.float32)
        g = tl.load(g_ + i).to(tl.float32) * factor
        m = tl.load(m_ + i).to(tl.float32)
        v = tl.load(v_ + i).to(tl.float32)
        p, m, v = _adam(p, g, m, v, step, r, keep, beta1, beta2, eps)
        if PULLED:
            pull = c
            if WEIGHTED:
                pull = c * tl.load(f_ + i).to(tl.float32)
            p += tl.minimum(pull, 1.0) * (tl.load(a_ + i).to(tl.float32) - p)
        tl.store(m_ + i, m.to(S))
        tl.store(v_ + i, v.to(S))
        tl.store(p_ + i, _rounded(p, seed, program * BLOCK, P, BLOCK, STOCHASTIC))
    else:
        mask = i < size
        p = tl.load(p_ + i, mask, other=0.0).to(tl.float32)
        g = tl.load(g_ + i, mask, other=0.0).to(tl.float32) * factor
        m = tl.load(m_ + i, mask, other=0.0).to(tl.float32)
        v = tl.load(v_ + i, mask, other=0.0).to(tl.float32)
        p, m, v = _adam(p, g, m, v, step, r, keep, beta1, beta2, eps)
        if PULLED:
            pull = c
            if WEIGHTED:
                pull = c * tl.load(f_ + i, mask, other=0.0).to(tl.float32)
            p += tl.minimum(pull, 1.0) * (tl.load(a_ + i, mask, other=0.0).to(tl.float32) - p)
        tl.store(m_ + i, m.to(S), mask)
        tl.store(v_ + i, v.to(S), mask)
        tl.store(p_ + i, _rounded(p, seed, program * BLOCK, P, BLOCK, STOCHASTIC), mask)


@triton.jit
def _adam(p, g, m, v, step, r, keep, beta1, beta2, eps):
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    return p * keep - step * m / (tl.sqrt(v) * r + eps), m, v


@triton.jit
def _rounded(
    p, seed, first, P: tl.constexpr, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr
):  # fmt: skip
    """To the weights' dtype: to the nearest value, or up or down with the odds of being nearer."""
    if STOCHASTIC:
        bits = p.to(tl.int32, bitcast=True)
        noise = tl.randint(seed, first + tl.arange(0, BLOCK)).to(tl.int32, bitcast=True) & 0xFFFF
        finite = (bits & 0x7F800000) != 0x7F800000
        p = tl.where(finite, (bits + noise) & -65536, bits).to(tl.float32, bitcast=True)
    return p.to(P)
