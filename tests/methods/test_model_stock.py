import pytest
import torch

from golden.model_stock import model_stock
from holdfast import ModelStock, Recipe
from holdfast.methods.model_stock import ratio
from methods.merges import WHERE, assert_equals, numbers, vectors


@pytest.mark.parametrize("models", [2, 3, 5])
def test_float64_equals_its_definition(models):
    base, tuned = vectors(models)
    merged = ModelStock().merged(WHERE, base, tuned)
    assert_equals(merged, model_stock(*numbers(base, tuned)))


def test_the_angle_decides():
    one = torch.tensor([1.0, 0.0])
    assert ratio(torch.stack([one, one])) == pytest.approx(1)  # the same direction: the average
    assert ratio(torch.stack([one, one.flip(0)])) == 0  # at a right angle: the base
    assert ratio(torch.stack([one, -one])) == 0  # opposite: not beyond the base
    assert ratio(torch.stack([one, 0 * one])) == 0  # a tensor that one model has not moved


def test_what_no_model_moved_stays_to_the_bit():
    base, _ = vectors(dtype=torch.float32)
    assert ModelStock().merged(WHERE, base, [base.clone()] * 3).equal(base)


def test_a_recipe_trains_one_model():
    with pytest.raises(ValueError, match="merges 2 or more tuned models, but a recipe trains one"):
        Recipe(merging=ModelStock())
