"""Ratios of sums and their intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.evaluate.stats import Outcomes, compare, estimate


def change(before, after):
    return compare("x", "nll", before, after, lower_is_better=True).change


def test_the_interval_covers_as_often_as_it_says():
    generator = np.random.default_rng(1)
    hits = []
    for _ in range(300):
        counts = generator.integers(1, 20, size=100)
        values = counts * 2.0 + generator.normal(size=100) * counts
        found = estimate(Outcomes(values, counts))
        hits.append(found.low <= 2.0 <= found.high)
    assert 0.90 < np.mean(hits) < 0.98  # 95 %, less what the percentile bootstrap lacks


def test_a_change_is_paired():
    generator = np.random.default_rng(1)
    before = generator.normal(size=200) * 10
    after = before + 0.1 + 0.01 * generator.normal(size=200)
    found = change(Outcomes(before), Outcomes(after))
    assert 0 < found.low < 0.1 < found.high < 0.11
    own = estimate(Outcomes(after))
    assert own.high - own.low > 1


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 9)), min_size=1, max_size=50))
def test_the_figure_is_the_ratio_of_the_sums_and_lies_in_its_interval(rows):
    values, counts = zip(*rows, strict=True)
    found = estimate(Outcomes(values, counts))
    assert found.value == pytest.approx(sum(values) / sum(counts))
    assert found.low - 1e-9 <= found.value <= found.high + 1e-9 or len(rows) < 20
    assert found.n == len(rows)


def test_the_same_samples_have_not_changed():
    samples = Outcomes([0.1, 0.7, 0.3], [2, 1, 4])
    score = compare("x", "perplexity", samples, samples, lower_is_better=True, transform=np.exp)
    assert (score.change.value, score.change.low, score.change.high) == (0, 0, 0)
    assert score.before.value == pytest.approx(np.exp(1.1 / 7))


@pytest.mark.parametrize("transform", [None, np.exp])
@pytest.mark.parametrize("kinds", [("yes", "yes"), ("yes", "number"), ("number", "ratio")])
def test_figures_that_are_compared_are_those_of_each_model(kinds, transform):
    generator = np.random.default_rng(1)
    values = generator.normal(size=50)
    made = {
        "yes": lambda: Outcomes(generator.integers(0, 2, 50).astype(float)),
        "number": lambda: Outcomes(values),
        "ratio": lambda: Outcomes(values, generator.integers(1, 9, 50)),
    }
    before, after = (made[kind]() for kind in kinds)
    score = compare("x", "y", before, after, lower_is_better=True, transform=transform)
    assert score.before == estimate(before, transform)
    assert score.after == estimate(after, transform)
    assert score.change.value == score.after.value - score.before.value
    assert score.change.low < score.change.value < score.change.high


def test_wrong_use():
    with pytest.raises(ValueError, match="no samples"):
        estimate(Outcomes([]))
    with pytest.raises(ValueError, match="the same samples, got 2 and 1"):
        change(Outcomes([1.0, 2.0]), Outcomes([1.0]))


def test_shares_of_all_or_none_are_not_certain():
    found = estimate(Outcomes([0.0] * 30))
    assert (found.value, found.low) == (0, 0)
    assert 0.1 < found.high < 0.15
    same = change(Outcomes([1.0, 0.0] * 15), Outcomes([1.0, 0.0] * 15))
    assert (same.value, same.low, same.high) == (0, -0.1, 0.1)
