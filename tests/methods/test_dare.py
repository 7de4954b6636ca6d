import pytest
import torch

from golden.dare import dare
from holdfast import DARE
from holdfast.stages import Where
from methods.merges import WHERE, assert_equals, numbers, vectors


@pytest.mark.parametrize("models", [1, 3])
@pytest.mark.parametrize(("drop", "lam"), [(0.9, 1.0), (0.3, 0.6)])
def test_float64_equals_its_definition(models, drop, lam):
    """With the masks that are seen in models whose changes are all 1."""
    base, tuned = vectors(models)
    method, kept = DARE(drop, lam), []
    for i in range(models):
        ones = [base + (i == j) for j in range(models)]
        kept.append((method.merged(WHERE, base, ones) != base).tolist())
    merged = method.merged(WHERE, base, tuned)
    assert_equals(merged, dare(*numbers(base, tuned), kept, drop, lam))


@pytest.mark.parametrize("drop", [0.1, 0.9, 0.99])
def test_the_drop_rate(drop):
    n = 200_000
    changed = DARE(drop).merged(WHERE, torch.zeros(n), [torch.ones(n)])
    share = float((changed == 0).double().mean())
    assert abs(share - drop) < 5 * (drop * (1 - drop) / n) ** 0.5
    assert torch.allclose(changed[changed != 0], torch.tensor(1 / (1 - drop)))


def test_the_expectation_is_the_tuned_model():
    base, [tuned] = vectors(n=50)
    draws = 4000
    mean = sum(DARE(0.5, seed=s).merged(WHERE, base, [tuned]) for s in range(draws)) / draws
    error = (tuned - base).abs() / draws**0.5  # one standard error: √(p/(1−p)) is 1 here
    assert ((mean - tuned).abs() < 5 * error).all()


def test_masks_depend_on_seed_name_and_model():
    base, tuned = torch.zeros(64), torch.ones(64)
    first = DARE(0.5).merged(WHERE, base, [tuned])
    assert torch.equal(first, DARE(0.5).merged(WHERE, base, [tuned]))
    assert not torch.equal(first, DARE(0.5, seed=1).merged(WHERE, base, [tuned]))
    assert not torch.equal(first, DARE(0.5).merged(Where("other"), base, [tuned]))
    both = DARE(0.5).merged(WHERE, base, [tuned, tuned])
    assert set(both.tolist()) == {0, 1, 2}  # neither, one or both


@pytest.mark.parametrize("bad", [{"drop": 1}, {"drop": -0.1}, {"lam": 0}, {"seed": -1}])
def test_refused(bad):
    with pytest.raises((ValueError, TypeError), match="must be"):
        DARE(**bad)
