"""EAFT: weights from the entropy of the predictions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from golden import eaft as golden
from holdfast.methods.eaft import EAFT, normalized_entropy
from methods.runs import (
    CLASSES,
    collate_for,
    gradient,
    loss_of,
    make_model,
    make_run,
    make_samples,
    moved,
    outputs_and_labels,
)


@pytest.mark.parametrize("settings", [{}, {"alpha": 2.0, "k": 3}], ids=str)
@pytest.mark.parametrize("task", CLASSES)
def test_loss_and_gradient_are_the_literal_ones(task, settings):
    """Of four classes, so that 20 are all."""
    model, samples = moved(make_model(task)), make_samples(task)
    criterion = EAFT(**settings).prepare(make_run(model, samples, task))
    ours = loss_of(criterion, model, collate_for(task))
    theirs = golden.loss(task, *outputs_and_labels(model, samples), **settings)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    found, expected = gradient(ours, model), gradient(theirs, model)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


@given(st.lists(st.floats(-60, 60), min_size=2, max_size=30), st.integers(2, 25))
def test_the_entropy_is_a_share(logits, k):
    (share,) = normalized_entropy(torch.tensor([logits], dtype=torch.float64), k).tolist()
    assert 0 <= share <= 1 + 1e-12
    p = torch.tensor(logits, dtype=torch.float64).softmax(0)
    top = p.sort(descending=True).values[:k]
    if top.min() > 1e-30:
        assert share == pytest.approx(golden.gate(p.tolist(), k, 1.0), abs=1e-9)


def test_a_confident_conflict_has_no_weight():
    certain, uncertain = [30.0] + [0.0] * 40, [0.0] * 41
    assert normalized_entropy(torch.tensor([certain, uncertain]), 20).tolist() == pytest.approx(
        [0.0, 1.0], abs=1e-6
    )


@pytest.mark.parametrize("settings", [{"alpha": -1}, {"k": 1}, {"k": 2.5}], ids=str)
def test_settings_are_checked(settings):
    with pytest.raises((ValueError, TypeError), match=f"{next(iter(settings))} must be"):
        EAFT(**settings)
