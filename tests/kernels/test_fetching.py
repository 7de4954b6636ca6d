"""How anchors are split into chunks. Fetching itself needs a GPU: test_recadam_fetching_cuda.py."""

from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast._optim.backends import BLOCK
from holdfast._torch.layout import flat as as_it_lies
from holdfast.kernels import fetching

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = st.one_of(
    st.integers(1, 300), st.integers(4000, 4200), st.integers(1, 70_000), st.just(8192)
)


def cut(sizes, dtype, chunk, numbers=None):
    numbers = range(len(sizes)) if numbers is None else numbers
    flat = {
        i: torch.empty(1, dtype=dtype).expand(size)
        for i, size in zip(numbers, sizes, strict=True)
    }  # fmt: skip
    with mock.patch.object(fetching, "CHUNK", chunk):
        return flat, fetching._cut(flat)


def bytes_of(pieces, flat):
    return sum(fetching._padded(piece, flat[piece.row]) for piece in pieces)


def assert_covers_once(flat, chunks):
    assert all(chunks)  # none is empty
    for row, tensor in flat.items():
        own = [piece for pieces in chunks for piece in pieces if piece.row == row]
        assert own[0].begin == 0
        assert own[-1].end == tensor.numel()
        assert all(piece.begin < piece.end for piece in own)
        assert all(a.end == b.begin for a, b in pairwise(own))
    for number, pieces in enumerate(chunks):
        assert {piece.chunk for piece in pieces} == {number}
    rows = [piece.row for pieces in chunks for piece in pieces]
    assert rows == sorted(rows, reverse=True)  # as gradients arrive: the last parameter first
    assert set(rows) == set(flat)


@given(
    st.lists(SIZES, min_size=1, max_size=8), st.sampled_from(DTYPES),
    st.sampled_from([4, 5, 16]), st.booleans(),
)  # fmt: skip
@example([4096, 1, 4095], torch.float32, 4, False)
@example([70_000] * 8, torch.bfloat16, 4, True)
def test_chunks_cover_everything_once_and_are_full(sizes, dtype, units, gaps):
    chunk = units * 4096 * 4
    numbers = [3 * i + 2 for i in range(len(sizes))] if gaps else None
    flat, chunks = cut(sizes, dtype, chunk, numbers)
    assert_covers_once(flat, chunks)
    width = dtype.itemsize
    for pieces in chunks:
        assert bytes_of(pieces, flat) <= chunk
        for piece in pieces:
            assert piece.begin % 4096 == 0  # so that blocks of 8 bits are whole
            assert 4096 % BLOCK == 0
    for pieces in chunks[:-1]:  # another piece would not have gone in
        assert chunk - bytes_of(pieces, flat) < 4096 * width
    total = sum(bytes_of(pieces, flat) for pieces in chunks)
    assert len(chunks) <= total // (chunk - 4096 * width) + 1


@given(st.lists(SIZES, min_size=1, max_size=6), st.sampled_from(DTYPES), st.integers(64, 20_000))
def test_chunks_smaller_than_the_smallest_piece(sizes, dtype, chunk):
    flat, chunks = cut(sizes, dtype, chunk)
    assert_covers_once(flat, chunks)
    for pieces in chunks:
        least = 4096 * dtype.itemsize
        assert bytes_of(pieces, flat) <= max(chunk + 63, least)
        assert len(pieces) == 1 or chunk >= least


def test_as_it_is_set():
    assert fetching.CHUNK % (4096 * 4) == 0
    flat, chunks = cut([10, 20 * 2**20, 3], torch.float32, fetching.CHUNK)
    assert [[tuple(piece) for piece in pieces] for pieces in chunks] == [
        [(2, 0, 3, 0), (1, 0, 8 * 2**20 - 4096, 0)],
        [(1, 8 * 2**20 - 4096, 16 * 2**20 - 4096, 1)],
        [(1, 16 * 2**20 - 4096, 20 * 2**20, 2), (0, 0, 10, 2)],
    ]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_begin_where_wide_loads_can(size, dtype):
    piece = fetching.Piece(0, 0, size)
    tensor = torch.empty(size, dtype=dtype)
    assert fetching._padded(piece, tensor) % 64 == 0
    assert tensor.nbytes <= fetching._padded(piece, tensor) < tensor.nbytes + 64


def test_a_tensor_is_fetched_as_it_lies():
    turned = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(as_it_lies(turned), torch.arange(12.0))
    assert torch.equal(as_it_lies(torch.arange(12.0)[5:]), torch.arange(5.0, 12.0))
