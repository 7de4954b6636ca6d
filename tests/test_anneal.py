import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.anneal import Anneal, Constant, Linear, Sigmoid

ANNEALS = [Sigmoid(0.1, 250), Sigmoid(0.0, 3), Linear(40), Linear(0), Constant(0.3)]
finite = st.floats(0, 1e9, allow_nan=False)


@given(k=st.floats(0, 1e6), t0=finite, t=st.integers(1, 10**9))
def test_sigmoid_is_stable_and_within_bounds(k, t0, t):
    lam = Sigmoid(k, t0)(t)
    assert 0.0 <= lam <= 1.0
    assert lam == pytest.approx(
        torch.sigmoid(torch.tensor(k * (t - t0), dtype=torch.float64)).item(), abs=1e-12
    )


def test_sigmoid_at_the_extremes():
    steep = Sigmoid(k=1e6, t0=100)
    assert steep(1) == 0.0
    assert steep(100) == 0.5
    assert steep(10**9) == 1.0
    assert [Sigmoid(k=0.0, t0=7)(t) for t in (1, 7, 10**9)] == [0.5] * 3


@given(k=st.floats(1e-3, 10), t0=st.floats(0, 100), t=st.integers(1, 200))
def test_sigmoid_equals_its_definition_where_that_can_be_computed(k, t0, t):
    if -k * (t - t0) < 700:
        assert Sigmoid(k, t0)(t) == pytest.approx(1 / (1 + math.exp(-k * (t - t0))), rel=1e-13)


def test_linear_and_constant():
    assert [Linear(4)(t) for t in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert Linear(0)(1) == 1.0
    assert Constant(0.3)(123) == 0.3


@pytest.mark.parametrize("anneal", ANNEALS, ids=repr)
def test_tensors_give_the_same_values_as_numbers(anneal):
    for t in (1, 39, 250, 10**9):
        value = anneal(torch.tensor(t))
        assert value.dtype == torch.float64
        assert value.shape == ()
        assert value.item() == pytest.approx(anneal(t), abs=1e-15)


@pytest.mark.parametrize("anneal", ANNEALS, ids=repr)
def test_round_trip_through_plain_values(anneal):
    saved = anneal.to_dict()
    assert all(isinstance(v, (str, float, int)) for v in saved.values())
    assert Anneal.from_dict(saved) == anneal
    with pytest.raises(AttributeError):
        anneal.t0 = 1.0


def test_fractions_of_a_run():
    assert Sigmoid.over(1000, t0=0.25, width=0.01) == Sigmoid(k=0.1, t0=250)
    assert Linear.over(1000, t0=0.5) == Linear(500)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_bad_values_are_refused(bad):
    for make in (
        lambda: Sigmoid(k=bad),
        lambda: Sigmoid(t0=bad),
        lambda: Linear(t0=bad),
        lambda: Constant(lam=bad),
        lambda: Sigmoid.over(100, width=bad),
        lambda: Sigmoid.over(100, t0=bad),
        lambda: Linear.over(bad),
    ):
        with pytest.raises(ValueError, match=r"must"):
            make()


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"unknown annealing 'Cosine'; "):
        Anneal.from_dict({"name": "Cosine"})


def test_a_second_class_of_the_same_name_is_refused():
    with pytest.raises(TypeError, match="named Sigmoid exists already"):
        type("Sigmoid", (Anneal,), {"_at": lambda self, t: 0.0})
    with pytest.raises(TypeError, match="abstract"):
        Anneal()


def test_a_fraction_is_one():
    for make in (lambda: Sigmoid.over(100, t0=25), lambda: Linear.over(100, t0=50)):
        with pytest.raises(ValueError, match="t0 must be a fraction of the run"):
            make()
