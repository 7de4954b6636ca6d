import math

import pytest
import torch

from golden.slerp import slerp
from holdfast import SLERP
from holdfast._torch.merging import SlicesInMemory
from methods.merges import WHERE, assert_equals, vectors


def angle_between(one, other):
    return SLERP().survey(WHERE, SlicesInMemory(one, [other]))


@pytest.mark.parametrize("t", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("noise", [0.01, 1.0])
def test_float64_equals_its_definition(t, noise):
    base, [tuned] = vectors(noise=noise)
    merged = SLERP(t).merged(WHERE, base, [tuned])
    assert_equals(merged, slerp(base.tolist(), tuned.tolist(), t))


def test_the_angle_grows_in_proportion():
    base, [tuned] = vectors(noise=2.0)
    base, tuned = base / base.norm(), tuned / tuned.norm()
    whole = angle_between(base, tuned)
    assert whole > 1
    for t in (0.2, 0.7):
        merged = SLERP(t).merged(WHERE, base, [tuned])
        assert merged.norm() == pytest.approx(1)
        assert angle_between(base, merged) == pytest.approx(t * whole)


def test_close_checkpoints_are_interpolated_linearly():
    """The difference from a line is of the order Ω²/6 of the weights."""
    base, [tuned] = vectors(n=1000, noise=0.01)
    angle = angle_between(base, tuned)
    line = torch.lerp(base, tuned, 0.5)
    far = (SLERP(0.5).merged(WHERE, base, [tuned]) - line).norm() / line.norm()
    assert 0 < far < angle**2 / 6
    assert angle < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ends_and_straight_lines(dtype):
    base, [tuned] = vectors(dtype=dtype)
    assert SLERP(1).merged(WHERE, base, [tuned]).equal(tuned)
    assert SLERP(0).merged(WHERE, base, [tuned]).equal(base)
    assert SLERP(0.3).merged(WHERE, base, [base.clone()]).equal(base)
    assert torch.allclose(SLERP(0.5).merged(WHERE, base, [3 * base]), 2 * base)
    assert torch.allclose(SLERP(0.25).merged(WHERE, base, [-base]), base / 2)
    zeros = torch.zeros_like(base)
    assert torch.allclose(SLERP(0.5).merged(WHERE, zeros, [tuned]), tuned / 2)
    assert angle_between(base, -base) == pytest.approx(math.pi)
    assert angle_between(base, 3 * base) < (2e-3 if dtype == torch.float32 else 1e-7)


@pytest.mark.parametrize("angle", [1e-7, 1e-3, 1.0, 3.0])
def test_the_angle(angle):
    one = torch.tensor([2.0, 0.0], dtype=torch.float64)
    other = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    assert angle_between(one, 2 * other) == pytest.approx(angle)
    assert angle_between(one, 5 * other) == pytest.approx(angle, rel=0.01)


@pytest.mark.parametrize("bad", [-0.1, 1.1, "x"])
def test_refused(bad):
    with pytest.raises((ValueError, TypeError), match="t must be"):
        SLERP(bad)
