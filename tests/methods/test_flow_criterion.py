"""FLOW in a run: scored at θ*, carried by the samples, weighed in the loss."""

import math
import statistics

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from holdfast.data import pad_collate
from holdfast.losses import token_losses
from holdfast.methods.flow import Flow
from holdfast.methods.identity import Uniform
from methods.runs import (
    TASKS,
    TOKENS,
    collate_for,
    loss_of,
    make_model,
    make_run,
    make_samples,
    moved,
)

SAMPLES = 7


def prepared(task, flow, samples=None, **fields):
    model = make_model(task)
    samples = make_samples(task, SAMPLES) if samples is None else samples
    criterion = flow.prepare(make_run(model, samples, task, collate=collate_for(task), **fields))
    return criterion, moved(model)


def losses(task, model, samples):
    found = []
    for sample in samples:
        batch = collate_for(task)([sample])
        with torch.no_grad():
            logits = model(**{n: v for n, v in batch.items() if n != "labels"})
        found.append(token_losses(logits, batch["labels"], task).values.tolist())
    return found


def literal(task, model, samples, flow, taus):
    """Σ w·loss / N, with each target's w from the losses at θ*."""
    at_base, now = losses(task, make_model(task), samples), losses(task, model, samples)
    total, n = 0.0, 0
    for f, g, tau in zip(at_base, now, taus, strict=True):
        for f_t, g_t in zip(f, g, strict=True):
            w = math.exp(-(f_t if flow.level == "token" else statistics.mean(f)) / tau)
            total, n = total + w * g_t, n + 1
    return total / n


def medians(task, level):
    f = losses(task, make_model(task), make_samples(task, SAMPLES))
    return [x for row in f for x in row] if level == "token" else [statistics.mean(r) for r in f]


@pytest.mark.parametrize("tau", ["median", 1.7])
@pytest.mark.parametrize(
    ("task", "level"), [*((t, "sequence") for t in TASKS), *((t, "token") for t in TOKENS)]
)
def test_the_loss_is_the_literal_one(task, level, tau):
    flow = Flow(tau=tau, level=level)
    criterion, model = prepared(task, flow)
    value = statistics.median(medians(task, level)) if tau == "median" else tau
    expected = literal(task, model, make_samples(task, SAMPLES), flow, [value] * SAMPLES)
    ours = loss_of(criterion, model, collate_for(task))
    assert ours.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("task", "level"), [("classification", "sequence"), ("causal_lm", "token")]
)
def test_a_median_for_each_batch(task, level):
    flow = Flow(tau="batch_median", level=level)
    criterion, model = prepared(task, flow)
    few = [0, 2, 5]
    samples = [make_samples(task, SAMPLES)[i] for i in few]
    f = losses(task, make_model(task), samples)
    tau = statistics.median([x for row in f for x in row])
    expected = literal(task, model, samples, flow, [tau] * 3)
    assert loss_of(criterion, model, collate_for(task), few).item() == pytest.approx(
        expected, rel=1e-6
    )
    assert criterion.state_dict() == {}


def test_a_running_median_is_saved_with_the_criterion():
    flow = Flow(tau="running_median")
    criterion, model = prepared("classification", flow)
    again, _ = prepared("classification", flow)
    assert len(flow._recent) == 0  # the recipe's object knows of no run
    collate = default_collate
    loss_of(criterion, model, collate, [0, 1, 2])
    again.load_state_dict(criterion.state_dict())
    f = medians("classification", "sequence")
    tau = statistics.median(f[:5])
    samples = make_samples("classification", SAMPLES)[3:5]
    expected = literal("classification", model, samples, flow, [tau] * 2)
    for one in (criterion, again):
        assert loss_of(one, model, collate, [3, 4]).item() == pytest.approx(expected, rel=1e-6)
    fresh, _ = prepared("classification", flow)
    assert loss_of(fresh, model, collate, [3, 4]).item() != pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("task", TASKS)
def test_an_infinite_tau_is_uniform_to_the_bit_and_scores_nothing(task, monkeypatch):
    monkeypatch.setattr("holdfast.methods._base_losses.score", None)
    neutral, model = prepared(task, Flow(**Flow.neutral), new=("head",))
    uniform = Uniform().prepare(make_run(model, make_samples(task, SAMPLES), task))
    assert torch.equal(*(loss_of(c, model, collate_for(task)) for c in (neutral, uniform)))


@pytest.mark.parametrize(
    ("task", "level"), [*((t, "sequence") for t in TASKS), *((t, "token") for t in TOKENS)]
)
def test_cutting_an_update_changes_nothing(task, level):
    criterion, model = prepared(task, Flow(level=level))
    whole = loss_of(criterion, model, collate_for(task), num_targets=17.0)
    halves = [
        loss_of(criterion, model, collate_for(task), part, num_targets=17.0)
        for part in ([0, 1, 2], [3, 4, 5, 6])
    ]
    torch.testing.assert_close(sum(halves), whole, rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:1 of 8 samples have no targets")
@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("tau", ["median", "batch_median", "running_median"])
def test_a_sample_without_targets_is_passed_over(tau, level):
    samples = make_samples("causal_lm", SAMPLES)
    empty = {"input_ids": [1, 2, 3], "labels": [-100] * 3}
    flow = Flow(tau=tau, level=level)
    without, model = prepared("causal_lm", flow)
    with_it, _ = prepared("causal_lm", flow, [*samples, empty])
    expected = loss_of(without, model, pad_collate)
    torch.testing.assert_close(loss_of(with_it, model, pad_collate), expected)
    alone = loss_of(with_it, model, pad_collate, [SAMPLES], num_targets=1.0)
    assert alone.item() == 0.0


def test_a_table_and_a_loader():
    datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
    samples = make_samples("causal_lm", SAMPLES)
    expected, model = prepared("causal_lm", Flow())
    table, _ = prepared("causal_lm", Flow(), datasets.Dataset.from_list(samples))
    assert table.data.column_names == ["input_ids", "labels", "holdfast_weight"]
    loader = DataLoader(samples, 2, shuffle=True, collate_fn=pad_collate)
    opened, _ = prepared("causal_lm", Flow(), loader)
    for one in (table, opened):
        assert torch.equal(*(loss_of(c, model, pad_collate, [3, 1]) for c in (one, expected)))


def test_a_loss_function_of_the_users():
    def task(model, batch):
        return (model(x=batch["x"]).sum(1) - batch["labels"]).square()

    model, samples = make_model("classification"), make_samples("classification", SAMPLES)
    run = make_run(model, samples, task, collate=default_collate)
    criterion = Flow().prepare(run)
    whole = default_collate(samples)
    f = task(model, whole).detach()
    loss = loss_of(criterion, moved(model), default_collate, num_targets=7.0)
    weights = torch.exp(-f / statistics.median(f.tolist()))
    torch.testing.assert_close(loss, (weights * task(model, whole)).sum() / 7, rtol=1e-6, atol=0)


class TestRefused:
    def test_ready_made_batches(self):
        batches = [(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))]
        run = make_run(make_model("classification"), batches, "classification")
        with pytest.raises(ValueError, match="must be indexed samples"):
            Flow().prepare(run)

    def test_token_weights_without_tokens(self):
        with pytest.raises(ValueError, match="needs a task with tokens, not 'classification'"):
            prepared("classification", Flow(level="token"))

    def test_token_weights_without_labels_in_the_samples(self):
        samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [3, 4, 5, 6]}]

        def collate(samples):
            batch = pad_collate(samples)
            return {**batch, "labels": batch["input_ids"] % 4}

        run = make_run(make_model("causal_lm"), samples, "causal_lm", collate=collate)
        with pytest.raises(ValueError, match="sample 0 has no labels"):
            Flow(level="token").prepare(run)
