"""The largest values of a tensor that is read in slices."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._torch import largest as module
from holdfast._torch import slices as slicing
from holdfast._torch.largest import Largest, largest_of
from holdfast._torch.merging import SlicesInMemory
from holdfast.methods.mofo import largest


def found(values, k):
    slices = SlicesInMemory(torch.zeros_like(values), [values])
    result = largest_of(slices, lambda part: part.tuned[0], k)
    masks = slices.map(lambda part: result.mask_(part.begin, part.tuned[0].clone()))
    return torch.cat([*masks]).bool()


@pytest.fixture
def small(monkeypatch):
    """Many slices and blocks, so that a short tensor is sampled and bracketed like a long one."""
    monkeypatch.setattr(slicing, "SLICE", 50)
    for name, value in {"_BLOCK": 4, "_PER_BLOCK": 16, "_MOST_BLOCKS": 8}.items():
        monkeypatch.setattr(module, name, value)


FEW = st.sampled_from([0.0, 0.5, 1.0, 7.0, -float("inf"), float("inf")])
NUMBERS = st.one_of(FEW, st.floats(-100, 100, width=32))


@settings(max_examples=200)
@given(st.lists(NUMBERS, min_size=1, max_size=400), st.data())
def test_equal_to_sorting(values, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slicing, "SLICE", 50)
        for name, value in {"_BLOCK": 4, "_PER_BLOCK": 16, "_MOST_BLOCKS": 8}.items():
            patch.setattr(module, name, value)
        k = data.draw(st.integers(1, len(values)))
        numbers = torch.tensor(values)
        assert found(numbers, k).equal(largest(numbers, k))


@pytest.mark.parametrize("share", [0.001, 0.2, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_long_tensor(share, dtype):
    drawn = torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(0)).abs_()
    values = drawn.to(dtype).float()  # bfloat16 has many ties
    k = int(share * len(values))
    assert found(values, k).equal(largest(values, k))


def test_most_values_are_equal(small):
    values = torch.zeros(1000)
    values[::10] = 1.0
    assert found(values, 300).equal(largest(values, 300))  # all of 1, and the first 200 of 0
    assert found(values, 50).nonzero().flatten().tolist() == [*range(0, 500, 10)]


def test_a_sample_that_misses_the_value(small, monkeypatch):
    """A sorted tensor whose blocks lie elsewhere: other passes look outside of the bracket."""
    values = torch.arange(1000.0)
    for wrong in [(-5.0, -1.0), (2000.0, 3000.0), (10.0, 20.0), (980.0, 990.0)]:
        monkeypatch.setattr(module, "_bracket", lambda *_, wrong=wrong: wrong)
        assert found(values, 100).equal(values >= 900)


def test_too_few_numbers(small):
    values = torch.full((100,), float("nan"))
    values[3] = 1.0
    slices = SlicesInMemory(values, [values])
    assert largest_of(slices, lambda part: part.base, 2) == Largest(None)
    assert np.isnan(found(values, 2).float().numpy()).sum() == 0


def test_values_in_a_buffer_that_is_reused():
    """The sample is copied from it: one pass finds the value."""
    values = torch.randn(2 * slicing.SLICE, generator=torch.Generator().manual_seed(0))
    buffer, passes = torch.empty(slicing.SLICE), []

    def sizes(part):
        passes.append(len(part.base) // slicing.SLICE)
        return torch.abs(part.tuned[0], out=buffer[: len(part.base)])

    values[: len(values) // 2] *= 3  # so that no block is like all of them
    result = largest_of(SlicesInMemory(values, [values]), sizes, 10_000)
    assert result.level == values.abs().topk(10_000).values[-1]
    assert sum(passes) == 2  # slices of one pass
