"""The way back to θ* in one pass: every weight, anchor and importance is read once.

    θ ← θ + min(1, c·F)·(θ* − θ)        or, coupled,        g ← g − c·F·(θ* − θ)

The arithmetic is in float32, whatever the tensors are in. What is not moved keeps its bits, and
what is moved all the way is θ*.
"""

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.kernels.tables import toward

__all__ = ["BLOCK", "WARPS", "pull_kernel"]

BLOCK, WARPS = 512, 4


@triton.jit
def pull_kernel(
    table, sizes, owner, part, tensors, c, scale,
    G: tl.constexpr, P: tl.constexpr, A: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr, WEIGHTED: tl.constexpr, COUPLED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One block of one tensor.

    Args:
        table: addresses, a row each for gradients, weights, anchors and importances.
        sizes: of the tensors. owner, part: of each program, its tensor and its block of it.
        tensors: how many there are.
        c: the rate.
        scale: of the gradients, if they are SCALED: what is added to them is scaled too.
        G, P, A, F: dtypes of gradients, of weights, of anchors, of importances.
        ALIGNED: whether all addresses are multiples of 16 bytes.
        WEIGHTED, COUPLED: whether there are importances, and whether it is the gradients that
            change.
    """
    program = tl.program_id(0)
    own = tl.load(owner + program)
    begin = tl.load(part + program).to(tl.int64) * BLOCK
    size = tl.load(sizes + own)
    g_ = tl.load(table + own).to(tl.pointer_type(G))
    p_ = tl.load(table + tensors + own).to(tl.pointer_type(P))
    a_ = tl.load(table + 2 * tensors + own).to(tl.pointer_type(A))
    f_ = tl.load(table + 3 * tensors + own).to(tl.pointer_type(F))
    if ALIGNED:
        g_, p_ = tl.multiple_of(g_, 16), tl.multiple_of(p_, 16)
        a_, f_ = tl.multiple_of(a_, 16), tl.multiple_of(f_, 16)
    if SCALED:
        c = c * tl.load(scale)
    i = tl.multiple_of(begin, BLOCK) + tl.arange(0, BLOCK)
    if begin + BLOCK <= size:  # without a mask loads are as wide as they can be
        _pull(g_ + i, p_ + i, a_ + i, f_ + i, None, c, G, P, WEIGHTED, COUPLED)
    else:
        _pull(g_ + i, p_ + i, a_ + i, f_ + i, i < size, c, G, P, WEIGHTED, COUPLED)


@triton.jit
def _pull(
    g_, p_, a_, f_, mask, c,
    G: tl.constexpr, P: tl.constexpr, WEIGHTED: tl.constexpr, COUPLED: tl.constexpr,
):  # fmt: skip
    p = tl.load(p_, mask).to(tl.float32)
    a = tl.load(a_, mask).to(tl.float32)
    d = a - p
    share = c * tl.load(f_, mask).to(tl.float32) if WEIGHTED else c + tl.zeros_like(d)
    if COUPLED:
        tl.store(g_, (tl.load(g_, mask).to(tl.float32) - share * d).to(G), mask)
    else:
        share = tl.minimum(share, 1.0)
        moved = toward(p, a, share)
        stays = (share == 0.0) | (d == 0.0)  # −0 + 0 is not −0, nor 0·∞ a number
        tl.store(p_, tl.where(stays, p, moved).to(P), mask)
