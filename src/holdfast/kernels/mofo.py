"""MoFO's step by Triton kernels: the same few launches for one tensor and for thousands.

    m ← m + (1−β₁)(g − m)        v ← β₂v + (1−β₂)g²
    θᵢ ← θᵢ·keep − step·mᵢ / (√vᵢ·r + ε)        for i among the k largest |mᵢ|

with keep = 1 − lr·wd, step = lr/(1−β₁ᵗ) and r = 1/√(1−β₂ᵗ). The arithmetic is in float32, whatever
the dtypes of the tensors. *learn* writes the moments and begins the search for the k-th largest,
*narrow* and *ties* continue it, and *move* moves the weights.

The search counts instead of sorting. The bits of |m| as a float32, read as an integer, have the
order of |m|. The search keeps an interval of integers that contains the k-th largest, and splits it
into 256 bins: first in *learn*, then *narrow* splits the bin found. The search is over if all
elements in the interval are wanted, or if the interval is a single value. Then *ties* finds the
index up to which this value is wanted. Only |m| is read again, a few times.

A program processes a chunk of a tensor, LOOPS blocks. The last program of a tensor evaluates the
counts of all its programs and clears them for the next kernel.

:class:`MoFOStep` keeps tables, step counts and the results of the searches from one step to the
next. It reads nothing from the device but the step counts, once.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast._torch.layout import dense, is_sharded, same_objects
from holdfast.kernels import available
from holdfast.kernels.tables import TYPES, AddressTable, load, on_device, pointer_to, store

#: Elements per block, blocks per program, and warps: the best of six on an H200 at 1.2 G.
BLOCK, LOOPS, WARPS = 1024, 16, 4

#: More bins mean fewer rounds, but before Triton 3.7 a histogram's cost grows with its bins.
BINS = tl.constexpr(256)
#: Of a search: the interval's first value and width, the number of wanted and of all elements in
#: it, the shift to its bins, and the index of the last wanted element.
FIELDS = tl.constexpr(6)

#: Before Triton 3.4 a histogram has no mask.
_MASKED = "mask" in inspect.signature(tl.histogram).parameters

#: The distance of two values as float32 bits, and the rounds that narrow 2³¹ down to it.
_GRAINS = {torch.float32: (1, 4), torch.bfloat16: (1 << 16, 2), torch.float16: (1 << 13, 3)}


def takes(p: Tensor) -> bool:
    """Whether the kernels support a parameter: contiguous, of a known dtype."""
    known = _MASKED and p.dtype in TYPES and not is_sharded(p)
    return known and p.is_contiguous() and 0 < p.numel() <= 1 << 30 and available(p.device)


class MoFOStep:
    """Updates parameters by MoFO's kernels."""

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
        """Make one update and advance the step counts; returns the numbers of other parameters.

        ``adam`` are lr, beta1, beta2, eps, weight_decay, maximize and capturable.
        """
        columns = (params, exp_avgs, exp_avg_sqs, state_steps)
        # ``Module.to`` keeps the parameter.
        known: list[Any] = [fraction, *[(p.dtype, p.device, p.stride()) for p in params]]
        if known != self._known or not all(map(same_objects, columns, self._held)):
            self._known, self._held = known, [list(column) for column in columns]
            self._look(fraction)
        for launch in self._launches:
            launch([grads[i] for i in launch.rows], **adam)
        return self._rest

    def _look(self, fraction: float) -> None:
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
    """The launches for parameters of the same device, dtype and step count."""

    def __init__(
        self, rows: list[int], columns: list[list[Tensor]], fraction: float, count: float
    ) -> None:
        self.rows, self.count = rows, count
        self.params, ms, vs, self.steps = columns
        self.kept = [self.params, ms, vs]
        self.table = AddressTable.of([self.params, *self.kept], BLOCK * LOOPS)
        self.dtype, device = self.params[0].dtype, self.params[0].device
        sizes = [p.numel() for p in self.params]
        wanted = [
            max(1, round(fraction * size)) if p.dim() > 1 else size
            for p, size in zip(self.params, sizes, strict=True)
        ]
        self.searched = wanted != sizes
        # A first search begins at −1. A search for all elements is over: its interval holds all.
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
        self.count += 1
        torch._foreach_add_(self.steps, 1)
        # Held until the launch, because some may be copies.
        grads = [
            dense(g if g.dtype == self.dtype else g.to(self.dtype), p)
            for g, p in zip(grads, self.params, strict=True)
        ]
        table, search, kind = self.table, self.search, TYPES[self.dtype]
        with torch.cuda.device_of(search):
            table.find([grads, *self.kept])
        g_aligned, *others = table.aligned
        shape, aligned = {"S": kind, **self.shape}, all(others)
        where = table.arguments
        there = capturable or (isinstance(lr, Tensor) and not lr.is_cpu)
        rates: Any = table.sizes  # not read in this case
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
    """step, r and keep at step ``t``."""
    return [lr / (1 - beta1**t), 1 / (1 - beta2**t) ** 0.5, 1 - lr * weight_decay]


@triton.jit
def learn_kernel(
    table, sizes, owner, part, tensors, wanted, search, counts, ticket, new1, beta2, new2,
    P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
    ALIGNED: tl.constexpr, G_ALIGNED: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """Write the moments, and find the first interval that contains the k-th largest.

    The k-th largest is near that of the last step: 127 bins on either side of it cover an octave
    each. The first bin counts everything below, the last one everything above. A first search has
    one bin per exponent.

    Args:
        table, sizes, owner, part, tensors: see :class:`AddressTable`. The rows are gradients,
            weights and both moments.
        wanted: k of each tensor; no search if k is its size.
        search: FIELDS per tensor. counts: BINS per tensor, 0 between kernels.
        ticket: the number of finished programs per tensor, 0 between kernels.
        new1, new2: 1 − β₁ and 1 − β₂, computed in float64.
        P, S: dtypes of weights and gradients, and of moments.
    """
    own, size, begin, end, full = _chunk_of(sizes, owner, part, BLOCK, LOOPS)
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
        _add(counts, own, found)
        if _is_last(ticket, own, size, BLOCK * LOOPS):
            base = first.to(tl.int64) - (tl.full([], 1, tl.int64) << shift)
            _pick(counts, search, own, size, 0, 1 << 31, base, shift, want)


@triton.jit
def narrow_kernel(
    table, sizes, owner, part, tensors, search, counts, ticket,
    S: tl.constexpr, GRAIN: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """Split the interval further, unless the search is over.

    GRAIN is the distance of two values of the moments' dtype, as integers.
    """
    own, size, begin, end, full = _chunk_of(sizes, owner, part, BLOCK, LOOPS)
    first, width, want, have, shift, _ = _state_of(search, own)
    if (want < have) & (width > GRAIN):
        # Not marked as aligned: wide loads would have to be redistributed for the atomics.
        m_ = pointer_to(table + 2 * tensors + own, S, False)
        low, high = first.to(tl.int32), (first + width - 1).to(tl.int32)
        by = shift.to(tl.int32)
        few = have * 32 < size
        found = tl.zeros([BINS], tl.int32)
        for at in range(begin, full, BLOCK):
            found += _part(m_, at, size, low, high, by, counts + own * BINS, few, BLOCK, True)
        if full < end:
            found += _part(m_, full, size, low, high, by, counts + own * BINS, few, BLOCK, False)
        _add(counts, own, found)
        if _is_last(ticket, own, size, BLOCK * LOOPS):
            _pick(counts, search, own, size, first, first + width, first, by, want.to(tl.int32))


@triton.jit
def ties_kernel(
    table, sizes, owner, part, tensors, search, tallies, ticket,
    S: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Find the index up to which the value in the interval is wanted, if not all of it is.

    ``tallies`` are the counts of each program.
    """
    own, size, begin, end, full = _chunk_of(sizes, owner, part, BLOCK, LOOPS)
    first, width, want, have, _, _ = _state_of(search, own)
    if want < have:
        m_ = pointer_to(table + 2 * tensors + own, S, ALIGNED)
        low, high = first.to(tl.int32), (first + width - 1).to(tl.int32)
        ties = tl.zeros([BLOCK], tl.int32)
        for at in range(begin, full, BLOCK):
            bits = _bits(m_, at + tl.arange(0, BLOCK), size, True)
            ties += ((bits >= low) & (bits <= high)).to(tl.int32)
        if full < end:
            bits = _bits(m_, full + tl.arange(0, BLOCK), size, False)
            ties += ((bits >= low) & (bits <= high)).to(tl.int32)
        program = tl.program_id(0)
        tl.store(tallies + program, tl.sum(ties))
        if _is_last(ticket, own, size, BLOCK * LOOPS):
            wanted = want.to(tl.int32)
            mine = tallies + program - tl.load(part + program)
            chunks, chunk = tl.cdiv(size, BLOCK * LOOPS), 0
            before, total = 0, 0  # ties before the chunk with the last wanted one, and so far
            for at in range(0, chunks, BLOCK):
                j = at + tl.arange(0, BLOCK)
                tally = tl.load(mine + j, j < chunks, other=0, volatile=True)
                upto = total + tl.cumsum(tally, 0)
                short = (upto < wanted) & (j < chunks)
                chunk += tl.sum(short.to(tl.int32))
                before = tl.maximum(before, tl.max(tl.where(short, upto, 0)))
                total += tl.sum(tally)
            start = chunk * (BLOCK * LOOPS)
            last = start
            for at in range(start, tl.minimum(start + BLOCK * LOOPS, size), BLOCK):
                i = at + tl.arange(0, BLOCK)
                bits = _bits(m_, i, size, False)
                tie = ((bits >= low) & (bits <= high)).to(tl.int32)
                upto = before + tl.cumsum(tie, 0)
                last += tl.sum(((upto < wanted) & (i < size)).to(tl.int32))
                before += tl.sum(tie)
            tl.store(search + own * FIELDS + 5, last.to(tl.int64))


@triton.jit
def move_kernel(
    table, sizes, owner, part, tensors, search, rates, step, r, keep, eps,
    P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
    ALIGNED: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Adam's step for elements above the interval, and in it up to the last wanted one.

    Everything is read and written: skipping elements that do not move takes longer. If ON_DEVICE,
    step, r and keep are in memory, in ``rates``.
    """
    own, size, begin, end, full = _chunk_of(sizes, owner, part, BLOCK, LOOPS)
    p_ = pointer_to(table + tensors + own, P, ALIGNED)
    m_ = pointer_to(table + 2 * tensors + own, S, ALIGNED)
    v_ = pointer_to(table + 3 * tensors + own, S, ALIGNED)
    first, width, _, _, _, last = _state_of(search, own)
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
    """Write the moments of a block; returns the new |m| as integers."""
    i = at + tl.arange(0, BLOCK)
    g, m, v = _read(g_, i, size, FULL), _read(m_, i, size, FULL), _read(v_, i, size, FULL)
    if MAXIMIZE:
        g = -g
    new = (m + new1 * (g - m)).to(S)
    v = (beta2 * v + new2 * g * g).to(S)
    store(m_, i, new, size, FULL)
    store(v_, i, v, size, FULL)
    return _as_integer(new.to(tl.float32))


@triton.jit
def _move(
    p_, m_, v_, i, size, low, high, last, step, r, keep, eps,
    P: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    m = _read(m_, i, size, FULL)
    bits = _as_integer(m)
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


@triton.jit
def _chunk_of(sizes, owner, part, BLOCK: tl.constexpr, LOOPS: tl.constexpr):
    """A program's tensor and its size; the begin and end of its chunk and of its full blocks."""
    program = tl.program_id(0)
    own = tl.load(owner + program)
    size = tl.load(sizes + own).to(tl.int32)
    begin = tl.multiple_of(tl.load(part + program) * (BLOCK * LOOPS), BLOCK)
    end = tl.minimum(begin + BLOCK * LOOPS, size)
    return own, size, begin, end, begin + (end - begin) // BLOCK * BLOCK


@triton.jit
def _state_of(search, own):
    s = search + own * FIELDS
    first, width, want = tl.load(s), tl.load(s + 1), tl.load(s + 2)
    return first, width, want, tl.load(s + 3), tl.load(s + 4), tl.load(s + 5)


@triton.jit
def _read(pointer, i, size, FULL: tl.constexpr):
    return load(pointer, i, size, FULL).to(tl.float32)


@triton.jit
def _as_integer(m):
    """|m| of a float32 m, as an integer. NaN counts as infinity."""
    return tl.minimum(m.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)


@triton.jit
def _bits(m_, i, size, FULL: tl.constexpr):
    """A block of |m| as integers; −1 beyond the tensor."""
    bits = _as_integer(_read(m_, i, size, FULL))
    if not FULL:
        bits = tl.where(i < size, bits, -1)
    return bits


@triton.jit
def _part(
    m_, at, size, low, high, by, place, few, BLOCK: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """Count a block's elements per bin; few elements are counted in memory directly."""
    bits = _bits(m_, at + tl.arange(0, BLOCK), size, FULL)
    inside = (bits >= low) & (bits <= high)
    bins = tl.where(inside, (bits - low) >> by, 0)
    found = tl.zeros([BINS], tl.int32)
    if few:
        tl.atomic_add(place + bins, 1, mask=inside, sem="relaxed")
    else:
        found = tl.histogram(bins, BINS, mask=inside)
    return found


@triton.jit
def _add(counts, own, found):
    tl.atomic_add(counts + own * BINS + tl.arange(0, BINS), found, mask=found > 0, sem="relaxed")


@triton.jit
def _is_last(ticket, own, size, CHUNK: tl.constexpr):
    """Whether all other programs of the tensor are done; then their counts can be read."""
    tl.debug_barrier()  # all threads write before the first one takes the ticket
    last = tl.atomic_add(ticket + own, 1, sem="acq_rel") == tl.cdiv(size, CHUNK) - 1
    if last:
        tl.store(ticket + own, 0)
    return last


@triton.jit
def _pick(counts, search, own, size, first, end, base, shift, want):
    """Continue in the bin with the ``want``-th largest: bin b begins at ``base`` + b·2^``shift``.

    The first bin begins at ``first``, and the last one ends at ``end``.
    """
    b = tl.arange(0, BINS)
    place = counts + own * BINS + b
    count = tl.load(place, volatile=True)
    tl.store(place, tl.zeros([BINS], tl.int32))
    above = tl.sum(count) - tl.cumsum(count, 0)
    here = (above < want) & (above + count >= want)
    wide = b.to(tl.int64)
    low = tl.where(b == 0, first, base + (wide << shift))
    high = tl.where(b == BINS - 1, end, tl.minimum(base + ((wide + 1) << shift), end))
    width = tl.sum(tl.where(here, high - low, 0))
    reach = (tl.zeros([32], tl.int64) + BINS) << tl.arange(0, 32).to(tl.int64)
    s = search + own * FIELDS
    tl.store(s, tl.sum(tl.where(here, low, 0)))
    tl.store(s + 1, width)
    tl.store(s + 2, (want - tl.sum(tl.where(here, above, 0))).to(tl.int64))
    tl.store(s + 3, tl.sum(tl.where(here, count, 0)).to(tl.int64))
    tl.store(s + 4, tl.sum((reach < width).to(tl.int64)))
    tl.store(s + 5, size.to(tl.int64))
