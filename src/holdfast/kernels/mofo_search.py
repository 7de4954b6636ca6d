"""Finds the k largest |m| of each of many tensors by counting, without sorting.

The bits of |m| as a float32, read as an integer, have the order of |m|. The search keeps an
interval of integers that contains the k-th largest, and splits it into 256 bins: first while the
moments are written (:mod:`holdfast.kernels.mofo`), then *narrow* splits the bin found. The search
is over if all elements in the interval are wanted, or if the interval is a single value. Then
*ties* finds the index up to which this value is wanted. Only |m| is read again, a few times.

A program processes a chunk of a tensor, LOOPS blocks. The last program of a tensor evaluates the
counts of all its programs and clears them for the next kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["BINS", "FIELDS", "narrow_kernel", "ties_kernel"]

#: More bins mean fewer rounds, but before Triton 3.7 a histogram's cost grows with its bins.
BINS = tl.constexpr(256)

#: Of a search: the interval's first value and width, the number of wanted and of all elements in
#: it, the shift to its bins, and the index of the last wanted element.
FIELDS = tl.constexpr(6)


@triton.jit
def narrow_kernel(
    table, sizes, owner, part, tensors, search, counts, ticket,
    S: tl.constexpr, GRAIN: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """Split the interval further, unless the search is over.

    Args:
        table: addresses, one row each for gradients, weights and both moments.
        sizes: of the tensors. owner, part: the tensor of each program and its chunk of it.
        tensors: how many there are.
        search: FIELDS per tensor. counts: BINS per tensor, 0 between kernels.
        ticket: the number of finished programs per tensor, 0 between kernels.
        S: dtype of the moments. GRAIN: the distance of two values of this dtype, as integers.
    """
    own, size, begin, end, full = chunk_of(sizes, owner, part, BLOCK, LOOPS)
    first, width, want, have, shift, _ = state_of(search, own)
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
        add(counts, own, found)
        if is_last(ticket, own, size, BLOCK * LOOPS):
            pick(counts, search, own, size, first, first + width, first, by, want.to(tl.int32))


@triton.jit
def ties_kernel(
    table, sizes, owner, part, tensors, search, tallies, ticket,
    S: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Find the index up to which the value in the interval is wanted, if not all of it is.

    Args:
        tallies: the count of each program. The other arguments are as above.
        ALIGNED: whether the addresses of the moments are multiples of 16 bytes.
    """
    own, size, begin, end, full = chunk_of(sizes, owner, part, BLOCK, LOOPS)
    first, width, want, have, _, _ = state_of(search, own)
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
        if is_last(ticket, own, size, BLOCK * LOOPS):
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
def chunk_of(sizes, owner, part, BLOCK: tl.constexpr, LOOPS: tl.constexpr):
    """A program's tensor and its size; the begin and end of its chunk and of its full blocks."""
    program = tl.program_id(0)
    own = tl.load(owner + program)
    size = tl.load(sizes + own).to(tl.int32)
    begin = tl.multiple_of(tl.load(part + program) * (BLOCK * LOOPS), BLOCK)
    end = tl.minimum(begin + BLOCK * LOOPS, size)
    return own, size, begin, end, begin + (end - begin) // BLOCK * BLOCK


@triton.jit
def pointer_to(place, T: tl.constexpr, ALIGNED: tl.constexpr):
    """An address in the table as a pointer to a dtype."""
    pointer = tl.load(place).to(tl.pointer_type(T))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def state_of(search, own):
    """The FIELDS of a tensor's search."""
    s = search + own * FIELDS
    first, width, want = tl.load(s), tl.load(s + 1), tl.load(s + 2)
    return first, width, want, tl.load(s + 3), tl.load(s + 4), tl.load(s + 5)


@triton.jit
def read(pointer, i, size, FULL: tl.constexpr):
    """A block in float32; FULL if all of it is in the tensor."""
    # Without a mask, loads are as wide as possible.
    x = tl.load(pointer + i) if FULL else tl.load(pointer + i, i < size, other=0.0)
    return x.to(tl.float32)


@triton.jit
def as_integer(m):
    """|m| of a float32 m, as an integer."""
    return m.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _bits(m_, i, size, FULL: tl.constexpr):
    """A block of |m| as integers; −1 beyond the tensor."""
    bits = as_integer(read(m_, i, size, FULL))
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
def add(counts, own, found):
    """Add the counts of a program to those of its tensor."""
    tl.atomic_add(counts + own * BINS + tl.arange(0, BINS), found, mask=found > 0, sem="relaxed")


@triton.jit
def is_last(ticket, own, size, CHUNK: tl.constexpr):
    """Whether all other programs of the tensor are done; then their counts can be read."""
    tl.debug_barrier()  # all threads write before the first one takes the ticket
    last = tl.atomic_add(ticket + own, 1, sem="acq_rel") == tl.cdiv(size, CHUNK) - 1
    if last:
        tl.store(ticket + own, 0)
    return last


@triton.jit
def pick(counts, search, own, size, first, end, base, shift, want):
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
