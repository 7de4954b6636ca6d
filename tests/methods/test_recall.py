"""Objectives and recalls compose: each keeps its own part of the loss."""

import pytest
import torch

from holdfast.anneal import Constant
from holdfast.losses import token_losses
from holdfast.methods.distill import Distill
from holdfast.methods.flow import Flow
from holdfast.methods.rehearsal import Rehearsal
from methods.runs import (
    TASKS,
    batch_of,
    collate_for,
    loss_of,
    make_model,
    make_run,
    make_samples,
    moved,
    recalled,
)


@pytest.mark.parametrize("task", TASKS)
def test_flow_weighs_the_task_loss_but_not_the_divergence(task):
    found = {}
    for name, objective in (("uniform", None), ("flow", Flow())):
        for strength in (0.0, 0.7):
            model = make_model(task)
            run = make_run(model, make_samples(task), task, collate=collate_for(task))
            criterion = recalled(Distill(strength), run, objective)
            found[name, strength] = loss_of(criterion, moved(model), collate_for(task))
    apart = found["uniform", 0.7] - found["uniform", 0.0]
    assert found["flow", 0.0] != found["uniform", 0.0]
    torch.testing.assert_close(found["flow", 0.7] - found["flow", 0.0], apart)


@pytest.mark.parametrize("tau", ["median", "batch_median"])
@pytest.mark.parametrize(
    ("task", "level"),
    [("classification", "sequence"), ("causal_lm", "sequence"), ("causal_lm", "token")],
)
def test_flow_weighs_the_new_samples_only(task, tau, level):
    lam, collate = 0.3, collate_for(task)
    new, old = make_samples(task, n=8), make_samples(task, n=5, seed=9)
    model, flow = make_model(task), Flow(tau=tau, level=level)
    run = make_run(model, new, task, collate=collate, old_data=old)
    criterion = recalled(Rehearsal(ratio=0.5, anneal=Constant(lam)), run, flow)
    moved(model)
    alone = flow.prepare(make_run(make_model(task), new, task, collate=collate))
    of_new = loss_of(alone, model, collate)  # the mean over the new targets
    batch = batch_of(criterion, collate)
    rehearsed = collate([old[i] for i in range(len(old)) if _is_in(old[i], criterion.data)])
    inputs = {n: v for n, v in rehearsed.items() if n != "labels"}
    of_old = token_losses(model(**inputs), rehearsed["labels"], task).values.mean()
    ours = loss_of(criterion, model, collate)
    assert set(criterion.columns) <= set(batch)
    torch.testing.assert_close(ours, lam * of_new + (1 - lam) * of_old)


def _is_in(sample, data):
    rows = [data[i] for i in range(len(data))]
    name = next(iter(sample))
    return any(
        row["rehearsal"] and torch.equal(torch.as_tensor(row[name]), torch.as_tensor(sample[name]))
        for row in rows
    )
