"""Moments in 8 bits: the codes themselves."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast._optim import backends as codec
from holdfast._optim.backends import BLOCK, SIGNED, UNSIGNED

FORMS = {"m": SIGNED, "root of v": UNSIGNED}
ULP = {SIGNED: 1 / 8, UNSIGNED: 1 / 16}  # of a number that is not small in its block
SMALL = 2.0**-15  # in units of the largest of a block; below, codes end
SIZES = [1, 2, 255, 256, 257, 511, 512, 513, 1000]


def code(x, form, seed=0, number=0):
    bits = codec.noise(seed, number, x.numel())
    return codec.encode(x, form, bits & 0xFFFF if form == SIGNED else bits >> 16)


def coded(x, form, seed=0, number=0):
    return codec.decode(*code(x, form, seed, number), form)


def tops(x):
    """The largest magnitude of each element's block."""
    return torch.cat([b.abs().max().expand(len(b)) for b in x.split(BLOCK)])


def drawn(size, seed, magnitude=0.0, spread=3.0, zeros=0.0, form=SIGNED):
    """Numbers over some powers of ten, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    random = [torch.rand(size, generator=generator, dtype=torch.float64) for _ in range(3)]
    x = 10.0 ** (magnitude - spread * random[0]) * (random[1] >= zeros)
    x = x * (1 - 2 * (random[2] < 0.5).double()) if form == SIGNED else x
    return x.float()


class TestCodes:
    @settings(max_examples=60)
    @given(
        st.sampled_from(list(FORMS.values())), st.sampled_from(SIZES), st.integers(0, 2**31 - 1),
        st.floats(-30, 37), st.floats(0, 8), st.sampled_from([0.0, 0.5, 0.99]),
    )  # fmt: skip
    @example(SIGNED, 257, 1, 37.0, 8.0, 0.5)
    @example(UNSIGNED, 513, 2, -30.0, 8.0, 0.0)
    def test_what_comes_back(self, form, size, seed, magnitude, spread, zeros):
        x = drawn(size, seed, magnitude, spread, zeros, form)
        codes, scales = code(x, form, seed)
        y, top = codec.decode(codes, scales, form), tops(x)
        assert codes.dtype == torch.uint8
        assert codes.shape == x.shape
        assert len(scales) == -(-size // BLOCK)
        assert (y[x == 0] == 0).all()
        assert ((y * x.sign()) >= 0).all()  # no sign is turned
        large = x.abs() >= SMALL * top
        error = (y - x).abs().double()
        assert (error[large] <= 1.0001 * ULP[form] * x.abs().double()[large]).all()
        assert (error[~large] <= 1.0001 * SMALL * top.double()[~large]).all()
        assert torch.equal(y.abs()[x.abs() == top], top[x.abs() == top])  # the largest is exact

    @settings(max_examples=60)
    @given(st.sampled_from(SIZES), st.integers(0, 2**31 - 1), st.floats(-22, 30), st.floats(0, 20))
    def test_a_root_is_zero_only_if_it_is(self, size, seed, magnitude, spread):
        """However small it is beside the others: m is divided by it."""
        x = drawn(size, seed, magnitude, spread, 0.3, UNSIGNED)
        x[x < 3e-23] = 0  # a root of a float32 is not smaller
        assert torch.equal(coded(x, UNSIGNED, seed) == 0, x == 0)

    @pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
    @pytest.mark.parametrize("magnitude", [-20.0, 0.0, 20.0])
    def test_right_on_average(self, form, magnitude):
        x, times = drawn(600, 3, magnitude, 4.0, 0.0, form).double(), 500
        mean = sum(coded(x.float(), form, seed).double() for seed in range(times)) / times
        # Of one rounding the standard deviation is at most half a unit, which is an ULP of x.
        noise = ULP[form] * x.abs() / 2 / times**0.5
        assert ((mean - x).abs() < 5 * noise).all()
        assert ((mean - x) / noise).mean().abs() < 5 / 600**0.5

    def test_more_than_one_value_comes_back_and_they_are_neighbours(self):
        x = torch.tensor([1.0, 0.3])
        seen = {coded(x, SIGNED, seed)[1].item() for seed in range(100)}
        assert seen == {0.28125, 0.3125}

    @pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
    def test_a_block_does_not_know_of_its_neighbour(self, form):
        quiet, loud = drawn(BLOCK, 1, 0.0, 2.0, 0.0, form), 1e20 * torch.ones(BLOCK)
        alone = coded(quiet, form)
        beside = coded(torch.cat([quiet, loud]), form)
        assert torch.equal(beside[:BLOCK], alone)

    @pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
    def test_every_code_stands_for_another_number(self, form):
        codes = torch.arange(256).to(torch.uint8)
        values = codec.decode(codes, torch.ones(1), form)
        assert len(values.unique()) == (256 if form == UNSIGNED else 255)  # 0 and −0
        assert values.abs().max() == 1

    def test_nothing_but_zeros(self):
        for form in FORMS.values():
            codes, scales = code(torch.zeros(300), form)
            assert not codes.any()
            assert torch.equal(codec.decode(codes, scales, form), torch.zeros(300))

    def test_random_bits_are_random(self):
        kinds = [(0, 0), (1, 0), (0, 1), (7919, 0), (2**31 - 1, 500)]
        drawn_bits = [codec.noise(seed, number, 20_000) for seed, number in kinds]
        for bits in drawn_bits:
            assert bits.min() >= 0
            assert bits.max() < 2**32
            ones = torch.stack([(bits >> i) & 1 for i in range(32)]).double().mean(1)
            assert ((ones - 0.5).abs() < 5 * 0.5 / 20_000**0.5).all()
            low, high = (bits & 0xFFFF).double(), (bits >> 16).double()  # one for m, one for v
            both = torch.corrcoef(torch.stack([low[1:], high[1:], low[:-1]]))
            assert (both - torch.eye(3)).abs().max() < 0.04
        together = torch.corrcoef(torch.stack([b.double() for b in drawn_bits]))
        assert (together - torch.eye(len(kinds))).abs().max() < 0.04
