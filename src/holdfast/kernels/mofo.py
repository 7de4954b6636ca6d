"""MoFO's step: the first pass over memory and the last one.

    m ← m + (1−β₁)(g − m)        v ← β₂v + (1−β₂)g²
    θᵢ ← θᵢ·keep − step·mᵢ / (√vᵢ·r + ε)        for i among the k largest |mᵢ|

with keep = 1 − lr·wd, step = lr/(1−β₁ᵗ) and r = 1/√(1−β₂ᵗ). The arithmetic is in float32, whatever
the tensors are in. *learn* writes the moments and begins the search for the k-th largest, *move*
moves the weights; what comes between is in :mod:`holdfast.kernels.mofo_search`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.kernels.mofo_search import (
    BINS,
    FIELDS,
    add,
    as_integer,
    chunk_of,
    is_last,
    pick,
    pointer_to,
    read,
    state_of,
)

__all__ = ["learn_kernel", "move_kernel"]


@triton.jit
def learn_kernel(
    table, sizes, owner, part, tensors, wanted, search, counts, ticket, new1, beta2, new2,
    P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
    ALIGNED: tl.constexpr, G_ALIGNED: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """The moments, and the first interval with the k-th largest.

    The last step's k-th largest is not far: 127 bins on either side of it are an octave each. The
    first bin has all below, the last one all above. A first search has a bin for each exponent.

    Args:
        table: addresses, a row each for gradients, weights and both moments.
        sizes: of the tensors. owner, part: of each program, its tensor and its chunk of it.
        tensors: how many there are.
        wanted: k of each tensor; there is no search where that is all.
        search: FIELDS of each tensor. counts: BINS of each tensor, 0 between kernels.
        ticket: how many programs of each tensor are done, 0 between kernels.
        new1, new2: 1 − β₁ and 1 − β₂, which float32 does not have to many digits.
        P, S: dtypes of weights and gradients, and of moments.
        ALIGNED, G_ALIGNED: whether the addresses of weights and moments, and of gradients, are
            multiples of 16 bytes.
    """
    own, size, begin, end, full = chunk_of(sizes, owner, part, BLOCK, LOOPS)
    g_ = pointer_to(table + own, P, G_ALIGNED)
    m_ = pointer_to(table + 2 * tensors + own, S, ALIGNED)
    v_ = pointer_to(table + 3 * tensors + own, S, ALIGNED)
    want = tl.load(wanted + own)
    searched = want < size
    known = tl.load(search + own * FIELDS).to(tl.int32)
    first = tl.where(known < 0, 0, tl.maximum(known - (127 << 16), 1))  # 1: 0 has its own bin
    shift = tl.where(known < 0, 23, 16)
    found = tl.zeros([BINS], tl.int32)
    for at in range(begin, full, BLOCK):
        bits = _learn(g_, m_, v_, at, size, new1, beta2, new2, S, BLOCK, MAXIMIZE, True)
        if searched:
            bins = tl.maximum(((bits - first) >> shift) + 1, 0)
            found += tl.histogram(tl.minimum(bins, BINS - 1), BINS)
    if full < end:
        bits = _learn(g_, m_, v_, full, size, new1, beta2, new2, S, BLOCK, MAXIMIZE, False)
        if searched:
            bins = tl.maximum(((bits - first) >> shift) + 1, 0)
            inside = full + tl.arange(0, BLOCK) < size
            found += tl.histogram(tl.minimum(bins, BINS - 1), BINS, mask=inside)
    if searched:
        add(counts, own, found)
        if is_last(ticket, own, size, BLOCK * LOOPS):
            base = first.to(tl.int64) - (tl.full([], 1, tl.int64) << shift)
            pick(counts, search, own, size, 0, 1 << 31, base, shift, want)


@triton.jit
def move_kernel(
    table, sizes, owner, part, tensors, search, rates, step, r, keep, eps,
    P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
    ALIGNED: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Adam's step of what is above the interval, and of what is in it up to the last wanted.

    All is read and written: to leave out what does not move takes longer.

    Args:
        rates: step, r and keep in memory, if they are ON_DEVICE; else they are arguments. For the
            rest see above.
    """
    own, size, begin, end, full = chunk_of(sizes, owner, part, BLOCK, LOOPS)
    p_ = pointer_to(table + tensors + own, P, ALIGNED)
    m_ = pointer_to(table + 2 * tensors + own, S, ALIGNED)
    v_ = pointer_to(table + 3 * tensors + own, S, ALIGNED)
    first, width, _, _, _, last = state_of(search, own)
    low, high, last = first.to(tl.int32), (first + width - 1).to(tl.int32), last.to(tl.int32)
    if ON_DEVICE:
        step, r, keep = tl.load(rates), tl.load(rates + 1), tl.load(rates + 2)
    for at in range(begin, full, BLOCK):
        i = at + tl.arange(0, BLOCK)
        _move(p_, m_, v_, i, size, low, high, last, step, r, keep, eps, P, True)
    if full < end:
        i = full + tl.arange(0, BLOCK)
        _move(p_, m_, v_, i, size, low, high, last, step, r, keep, eps, P, False)


@triton.jit
def _learn(
    g_, m_, v_, at, size, new1, beta2, new2,
    S: tl.constexpr, BLOCK: tl.constexpr, MAXIMIZE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write a block's moments; returns the new |m| as integers."""
    i = at + tl.arange(0, BLOCK)
    g, m, v = read(g_, i, size, FULL), read(m_, i, size, FULL), read(v_, i, size, FULL)
    if MAXIMIZE:
        g = -g
    new = (m + new1 * (g - m)).to(S)
    v = (beta2 * v + new2 * g * g).to(S)
    if FULL:
        tl.store(m_ + i, new)
        tl.store(v_ + i, v)
    else:
        tl.store(m_ + i, new, i < size)
        tl.store(v_ + i, v, i < size)
    return as_integer(new.to(tl.float32))


@triton.jit
def _move(
    p_, m_, v_, i, size, low, high, last, step, r, keep, eps,
    P: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    m = read(m_, i, size, FULL)
    bits = as_integer(m)
    moves = (bits > high) | ((bits >= low) & (i <= last))
    if FULL:
        p, v = tl.load(p_ + i), tl.load(v_ + i).to(tl.float32)
        new = p.to(tl.float32) * keep - step * m / (tl.sqrt(v) * r + eps)
        tl.store(p_ + i, tl.where(moves, new.to(P), p))
    else:
        moves = moves & (i < size)
        p = tl.load(p_ + i, moves, other=0.0).to(tl.float32)
        v = tl.load(v_ + i, moves, other=1.0).to(tl.float32)
        tl.store(p_ + i, (p * keep - step * m / (tl.sqrt(v) * r + eps)).to(P), moves)
