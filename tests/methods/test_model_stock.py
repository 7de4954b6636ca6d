import pytest
import torch

from golden.model_stock import model_stock
from holdfast import ModelStock, Recipe
from holdfast._torch.merging import SlicesInMemory
from methods.merges import WHERE, assert_equals, numbers, vectors


@pytest.mark.parametrize("models", [2, 3, 5])
def test_float64_equals_its_definition(models):
    base, tuned = vectors(models)
    merged = ModelStock().merged(WHERE, base, tuned)
    assert_equals(merged, model_stock(*numbers(base, tuned)))


def test_the_angle_decides():
    def ratio(*changes):
        slices = SlicesInMemory(torch.ones(2), [1 + change for change in changes])
        return ModelStock().survey(WHERE, slices)

    one = torch.tensor([1.0, 0.0])
    assert ratio(one, one) == pytest.approx(1)  # the same direction: the average
    assert ratio(one, one.flip(0)) == 0  # at a right angle: the base
    assert ratio(one, -one) == 0  # opposite: not beyond the base
    assert ratio(one, 0 * one) == 0  # a tensor that one model has not moved


def test_what_no_model_moved_stays_to_the_bit():
    base, _ = vectors(dtype=torch.float32)
    assert ModelStock().merged(WHERE, base, [base.clone()] * 3).equal(base)


def test_a_recipe_trains_one_model():
    with pytest.raises(ValueError, match="merges 2 or more tuned models, but a recipe trains one"):
        Recipe(merging=ModelStock())
