"""STM: tokens that the pretrained model finds unlikely are left out."""

import logging
import math

import pytest
import torch

from golden import stm as golden
from holdfast.methods.identity import Uniform
from holdfast.methods.stm import STM
from methods.runs import (
    CLASSES,
    TASKS,
    TOKENS,
    batch_of,
    collate_for,
    gradient,
    loss_of,
    make_model,
    make_run,
    make_samples,
    moved,
    outputs_and_labels,
)


def prepared(task, method, samples=None, model=None):
    model = make_model(task) if model is None else model
    samples = make_samples(task) if samples is None else samples
    run = make_run(model, samples, task, collate=collate_for(task))
    return method.prepare(run), moved(model)


@pytest.mark.parametrize("tau", [3.0, 4.5])
@pytest.mark.parametrize("task", CLASSES)
def test_loss_and_gradient_are_the_literal_ones(task, tau):
    criterion, model = prepared(task, STM(tau))
    samples = make_samples(task)
    weights = criterion.weigh(None, {criterion.column: batch_of(criterion, collate_for(task))[
        criterion.column]}, 1)  # fmt: skip
    assert {0.0, 1.0} == {*weights.flatten().tolist()}  # some count, some do not
    outputs, labels = outputs_and_labels(model, samples)
    base, _ = outputs_and_labels(make_model(task), samples)
    ours = loss_of(criterion, model, collate_for(task))
    theirs = golden.loss(task, outputs, base, labels, tau)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    found, expected = gradient(ours, model), gradient(theirs, model)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def test_the_bound_itself_counts():
    losses = [math.log(2.5), math.log(2.5) + 1e-9, 0.0, math.inf]
    assert STM().keep(losses).tolist() == [True, False, True, False]


@pytest.mark.parametrize("task", CLASSES)
def test_neutral_settings_score_nothing(task, monkeypatch):
    monkeypatch.setattr("holdfast.methods._base_losses.score", None)
    neutral, model = prepared(task, STM(**STM.neutral))
    uniform = Uniform().prepare(make_run(model, make_samples(task), task))
    assert torch.equal(*(loss_of(c, model, collate_for(task)) for c in (neutral, uniform)))


@pytest.mark.filterwarnings("ignore:1 of 8 samples have no targets")
@pytest.mark.parametrize("task", TOKENS)
def test_a_sample_without_targets_is_passed_over(task):
    empty = {"input_ids": [1, 2, 3], "labels": [-100] * 3}
    without, model = prepared(task, STM(4.0))
    with_it, _ = prepared(task, STM(4.0), [*make_samples(task), empty])
    expected = loss_of(without, model, collate_for(task))
    torch.testing.assert_close(loss_of(with_it, model, collate_for(task)), expected)


def test_it_tells_how_many_targets_remain(caplog):
    with caplog.at_level(logging.INFO):
        prepared("causal_lm", STM(4.0))
    assert "STM trains on " in caplog.text
    assert " targets" in caplog.text


@pytest.mark.filterwarnings("ignore:1 of 1 samples have no targets")
def test_data_without_targets_is_an_error():
    with pytest.raises(ValueError, match="no sample has a target"):
        prepared("causal_lm", STM(), [{"input_ids": [1, 2, 3], "labels": [-100] * 3}])


def test_nothing_left_and_broken_losses_are_errors():
    with pytest.raises(
        ValueError, match=r"STM\(tau=1\) leaves out all 17 targets: their lowest .* is 2[.]"
    ):
        prepared("causal_lm", STM(1))
    with pytest.raises(ValueError, match="1 of 2 are NaN"):
        STM().keep([0.1, math.nan])


@pytest.mark.parametrize("task", [t for t in TASKS if t not in CLASSES])
def test_targets_without_a_probability_are_refused(task):
    with pytest.raises(ValueError, match="STM needs the probability of each target"):
        prepared(task, STM())


@pytest.mark.parametrize("tau", [0.9, -1, math.nan, "high"])
def test_settings_are_checked(tau):
    with pytest.raises((ValueError, TypeError), match="tau must be"):
        STM(tau)
