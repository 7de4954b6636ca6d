"""The kernel in C for the distance of two tensors, beside float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels import compiled
from holdfast.kernels.distance_cpu import square_sums

pytestmark = pytest.mark.skipif(
    compiled.library("distance_cpu") is None, reason="there is no C compiler"
)


class Other(torch.Tensor):
    """A tensor of another class, which may have no memory of its own."""


DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(st.integers(0, 20_000), DTYPES, DTYPES, st.integers(-12, 12), st.integers(0, 99))
def test_sums_are_those_of_float64(size, one, other, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    before, noise = torch.randn(2, size, generator=generator).mul_(10.0**exponent)
    after = (before + 0.1 * noise).to(other)
    before = before.to(one)
    moved, norm = square_sums(before, after)
    expected = (after.double() - before.double()).square().sum().item()
    assert moved == pytest.approx(expected, rel=1e-6, abs=0)
    assert norm == pytest.approx(before.double().square().sum().item(), rel=1e-6, abs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_tensors_have_no_distance(dtype):
    x = torch.randn(5000).to(dtype)
    assert square_sums(x, x.clone())[0] == 0
    assert square_sums(torch.zeros(33, dtype=dtype), torch.zeros(33, dtype=dtype)) == (0, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e25, 1e-25])
@pytest.mark.parametrize("moved", [False, True])
def test_what_float32_cannot_square_is_left_to_others(value, moved):
    before, after = torch.zeros(50), torch.zeros(50)
    (after if moved else before)[40] = value
    assert square_sums(before, after) is None


def test_other_tensors_are_left_to_others(monkeypatch):
    x = torch.randn(10)
    assert square_sums(x.double(), x) is None
    assert square_sums(x, x.half()) is None
    assert square_sums(torch.randn(20)[::2], x) is None
    assert square_sums(x, torch.randn(9)) is None
    assert square_sums(x.view(2, 5), x.view(2, 5)) is None
    assert square_sums(x, x.as_subclass(Other)) is None
    monkeypatch.setattr("holdfast.kernels.distance_cpu.library", lambda name: None)
    assert square_sums(x, x) is None
