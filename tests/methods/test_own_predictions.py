"""What all objectives do that weigh targets by the model's own predictions."""

import pytest
import torch

from holdfast.data import pad_collate
from holdfast.methods.dft import DFT
from holdfast.methods.eaft import EAFT
from holdfast.methods.identity import Uniform
from holdfast.methods.rehearsal import Rehearsal
from holdfast.methods.talr import TALR
from methods.runs import (
    CLASSES,
    TASKS,
    collate_for,
    loss_of,
    make_model,
    make_run,
    make_samples,
    moved,
    recalled,
)

METHODS = [DFT(), TALR(tau=0.8), EAFT(k=3)]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)


def prepared(task, method, samples=None, **fields):
    model = make_model(task)
    samples = make_samples(task) if samples is None else samples
    run = make_run(model, samples, task, collate=collate_for(task), **fields)
    return method.prepare(run), moved(model)


@every_method
@pytest.mark.parametrize("task", CLASSES)
def test_cutting_an_update_changes_nothing(task, method):
    criterion, model = prepared(task, method)
    whole = loss_of(criterion, model, collate_for(task), num_targets=17.0)
    halves = [
        loss_of(criterion, model, collate_for(task), part, num_targets=17.0)
        for part in ([0, 1, 2], [3, 4, 5, 6])
    ]
    torch.testing.assert_close(sum(halves), whole, rtol=1e-12, atol=0)


@every_method
def test_the_data_is_not_read_and_the_model_runs_once(method):
    assert not method.reads_data
    criterion, model = prepared("causal_lm", method)
    assert criterion.columns == ()
    calls = []
    with model.register_forward_hook(lambda *_: calls.append(1)):
        loss_of(criterion, model, pad_collate).backward()
    assert len(calls) == 1


@every_method
@pytest.mark.parametrize("task", [t for t in TASKS if t not in CLASSES])
def test_targets_without_a_probability_are_refused(task, method):
    with pytest.raises(ValueError, match=f"{type(method).__name__} needs the probability"):
        prepared(task, method)


@every_method
def test_a_loss_function_is_refused(method):
    run = make_run(make_model("classification"), [], lambda model, batch: None)
    with pytest.raises(ValueError, match="not a loss function: use another objective"):
        method.prepare(run)


@every_method
@pytest.mark.parametrize("task", CLASSES)
def test_neutral_settings_are_uniform_to_the_bit(task, method):
    neutral, model = prepared(task, type(method)(**method.neutral))
    uniform = Uniform().prepare(make_run(model, make_samples(task), task))
    assert torch.equal(*(loss_of(c, model, collate_for(task)) for c in (neutral, uniform)))


@pytest.mark.parametrize("method", [*METHODS, TALR()], ids=str)
@pytest.mark.parametrize("task", CLASSES)
def test_samples_without_targets_are_passed_over(task, method):
    samples, empty = make_samples(task), make_samples(task, 1, seed=5)[0]
    labels = torch.as_tensor(empty["labels"]) * 0 - 100
    empty = {**empty, "labels": labels if labels.dim() == 0 else labels.tolist()}
    without, model = prepared(task, method)
    with_it, _ = prepared(task, method, [*samples, empty])
    expected = loss_of(without, model, collate_for(task))
    torch.testing.assert_close(loss_of(with_it, model, collate_for(task)), expected)
    alone = loss_of(with_it, model, collate_for(task), [len(samples)], num_targets=1.0)
    assert alone.item() == 0.0


@every_method
def test_old_samples_of_a_rehearsal_keep_their_weight(method):
    task, samples, old = "causal_lm", make_samples("causal_lm", 4), make_samples("causal_lm", 4, 1)
    run = make_run(make_model(task), samples, task, collate=pad_collate, old_data=old)
    criterion = recalled(Rehearsal(ratio=1.0), run, method)
    model = moved(run.model)
    alone = method.prepare(make_run(run.model, samples, task))
    plain = Uniform().prepare(make_run(run.model, [criterion.data[i] for i in range(4, 8)], task))
    plain.data = [{n: row[n] for n in ("input_ids", "labels")} for row in plain.data]
    share = criterion.recall.share
    count = 17.0
    expected = 0.5 / (1 - share) * loss_of(
        alone, model, pad_collate, num_targets=count
    ) + 0.5 / share * loss_of(plain, model, pad_collate, num_targets=count)
    found = loss_of(criterion, model, pad_collate, num_targets=count)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@every_method
def test_half_precision_logits(method):
    criterion, model = prepared("causal_lm", method)
    exact = loss_of(criterion, model, pad_collate)
    half = loss_of(criterion, model.bfloat16(), pad_collate)
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(exact.item(), rel=0.05)
