import pytest
import torch

from golden.ties import ties
from holdfast import TIES
from methods.merges import WHERE, assert_equals, numbers, vectors


@pytest.mark.parametrize("models", [1, 2, 5])
@pytest.mark.parametrize(("density", "lam"), [(0.2, 1.0), (0.5, 0.7), (1.0, 1.0), (0.01, 1.0)])
def test_float64_equals_its_definition(models, density, lam):
    base, tuned = vectors(models)
    merged = TIES(density, lam).merged(WHERE, base, tuned)
    assert_equals(merged, ties(*numbers(base, tuned), density, lam))


def test_one_model_is_its_largest_changes():
    base, [tuned] = vectors(dtype=torch.float32)
    merged = TIES(density=0.25).merged(WHERE, base, [tuned])
    moved = merged != base
    assert moved.sum() == 10
    assert torch.equal(merged[moved], tuned[moved])  # exactly, not θ* + (θ₁ − θ*)
    assert (tuned - base)[moved].abs().min() >= (tuned - base)[~moved].abs().max()


def test_models_that_disagree():
    base, one, other = torch.zeros(3), torch.tensor([1.0, 3.0, 0.0]), torch.tensor([1.0, -1.0, 0.0])
    assert TIES(density=1.0).merged(WHERE, base, [one, other]).tolist() == [1, 3, 0]
    assert TIES(density=1.0).merged(WHERE, base, [one, -one]).tolist() == [0, 0, 0]  # no sign


@pytest.mark.parametrize("bad", [{"density": 0}, {"density": 1.1}, {"lam": 0}, {"lam": "x"}])
def test_refused(bad):
    with pytest.raises((ValueError, TypeError), match="must be"):
        TIES(**bad)
