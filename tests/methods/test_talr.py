"""TALR: weights from the probability of each target, with τ from the batch."""

import statistics

import pytest
import torch

from golden import talr as golden
from holdfast import Run, pad_collate
from holdfast.methods.talr import TALR, median_of_means
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


@pytest.mark.parametrize("samples", [7, 6])
@pytest.mark.parametrize("tau", [None, 0.4])
@pytest.mark.parametrize("task", CLASSES)
def test_loss_and_gradient_are_the_literal_ones(task, tau, samples):
    model, samples = moved(make_model(task)), make_samples(task, samples)
    rows = golden.targets(task, *outputs_and_labels(model, samples))
    power = 1 / (tau or golden.tau_of(rows))
    w_min = statistics.median(
        golden.number(p[wanted]) ** power for row in rows for p, wanted in row
    )
    method = TALR(w_min=w_min, **({} if tau is None else {"tau": tau}))
    ours = loss_of(method.prepare(make_run(model, samples, task)), model, collate_for(task))
    theirs = golden.loss(task, *outputs_and_labels(model, samples), tau, w_min)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    found, expected = gradient(ours, model), gradient(theirs, model)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def test_the_median_over_sequences_of_their_means():
    losses = torch.tensor([1.0, 2.0, 9.0, 4.0, 0.5, 3.5], dtype=torch.float64)
    sequence = torch.tensor([0, 0, 3, 5, 5, 5])
    expected = statistics.median([1.5, 9.0, 8 / 3])
    assert median_of_means(losses, sequence).item() == pytest.approx(expected)
    zero = median_of_means(torch.zeros(3), torch.tensor([0, 1, 2]))
    assert zero > 0
    assert torch.exp(-torch.tensor([0.0, 1.0]) / zero).tolist() == [1.0, 0.0]


def test_packed_samples_have_means_of_their_own():
    """τ is that of the same samples in rows of their own."""
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from holdfast.hosts._packing import Packed
    from small import make_llama

    rows = [[5, 6, 7], [8, 9, 7, 5], [4, 4], [6, 5, 4, 8, 9]]
    samples = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows]
    losses = []
    for data in (samples, Packed(samples, room=7)):
        run = Run("talr", make_llama(scale=0.5).double(), samples, lr=1e-3, progress=False)
        batch = pad_collate([data[i] for i in range(len(data))])
        losses.append(run.loss(batch, 10.0, update=1).item())
    assert len(data) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("settings", [{"tau": 0}, {"tau": "mean"}, {"tau": True}, {"w_min": 0},
                                      {"w_min": 2}], ids=str)  # fmt: skip
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must be"):
        TALR(**settings)


def test_an_infinite_tau_changes_nothing():
    assert not TALR(tau=float("inf")).changes_loss
    assert TALR().changes_loss
