"""DFT: weights from the probability of each target."""

import pytest
import torch

from golden import dft as golden
from golden import distill
from holdfast.methods.dft import DFT
from holdfast.methods.distill import Distill
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
    recalled,
)


@pytest.mark.parametrize("power", [1.0, 0.3])
@pytest.mark.parametrize("task", CLASSES)
def test_loss_and_gradient_are_the_literal_ones(task, power):
    model, samples = moved(make_model(task)), make_samples(task)
    ours = loss_of(DFT(power).prepare(make_run(model, samples, task)), model, collate_for(task))
    theirs = golden.loss(task, *outputs_and_labels(model, samples), power)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    found, expected = gradient(ours, model), gradient(theirs, model)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def test_the_gradient_is_that_of_the_probability():
    """The paper's point: −p·∇log p = −∇p, without the factor 1/p."""
    task, samples = "classification", make_samples("classification")
    model = moved(make_model(task))
    ours = loss_of(DFT().prepare(make_run(model, samples, task)), model, collate_for(task))
    outputs, labels = outputs_and_labels(model, samples)
    p = torch.stack(outputs).softmax(-1)[range(len(labels)), torch.stack(labels)]
    expected = gradient(-p.mean(), model)
    torch.testing.assert_close(gradient(ours, model), expected, rtol=1e-10, atol=1e-13)


def test_with_a_divergence_it_is_asft():
    """Σ (−sg(p)·log p + λ·KL(base ‖ model)) / N, the loss of https://arxiv.org/abs/2509.23753."""
    task, samples = "causal_lm", make_samples("causal_lm")
    run = make_run(make_model(task), samples, task, collate=collate_for(task))
    criterion = recalled(Distill(strength=0.05, temperature=1.0), run, DFT())
    model = moved(run.model)
    outputs, labels = outputs_and_labels(model, samples)
    base, _ = outputs_and_labels(make_model(task), samples)
    apart = [
        distill.kl([*b[t].detach()], [*z[t]], 1.0)
        for z, b, label in zip(outputs, base, labels, strict=True)
        for t, _ in distill.targets(task, z, label)
    ]
    expected = golden.loss(task, outputs, labels) + 0.05 * sum(apart) / len(apart)
    ours = loss_of(criterion, model, collate_for(task))
    assert ours.item() == pytest.approx(expected.item(), rel=1e-12)
    found = gradient(ours, model)
    torch.testing.assert_close(found, gradient(expected, model), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("power", [-1, float("inf"), "much"])
def test_settings_are_checked(power):
    with pytest.raises((ValueError, TypeError), match="power must be"):
        DFT(power=power)
