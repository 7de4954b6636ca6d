import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from golden.finch import Twin
from holdfast import L2SP, FinchUpdate, LoopSettings, Recipe, Run, finetune_loop, train_loop
from holdfast.methods.finch import rate_factor
from holdfast.optim import Finch
from methods.problems import PATHS, backward, batch, far, make_net

DATA = TensorDataset(batch(0, torch.float64)[0], torch.arange(16) % 3)


def steps(net, opt, numbers, scale=1.0):
    for t in numbers:
        opt.observe(scale * backward(net, t))
        opt.step()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("alpha", "cap", "wd"), [(0.9, 2.5, 0.0), (0.0, 1.2, 0.1), (0.5, 9, 0.0)])
def test_float64_follows_the_twin(path, alpha, cap, wd):
    net = make_net()
    named = dict(net.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if "body" in n]},
        {"params": [p for n, p in named.items() if "head" in n], "lr": 3e-2},
    ]
    opt = Finch(groups, lr=1e-2, smoothing=alpha, cap=cap, weight_decay=wd, **PATHS[path])
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 60)
    twins = {n: Twin(p.detach().clone()) for n, p in named.items()}
    capped = 0
    for t in range(60):
        loss = (3.0 if t < 30 else 0.1) * backward(net, t)
        rates = [group["lr"] for group in opt.param_groups]
        opt.observe(loss)
        opt.step()
        for n, p in named.items():
            lr = rates["head" in n]
            eta = twins[n].update(p.grad, float(loss), lr=lr, most=cap * lr, alpha=alpha, wd=wd)
        assert opt.rate_state()["lr_factor"] == pytest.approx(eta / lr)
        capped += opt.rate_state()["lr_factor"] == cap
        scheduler.step()
    assert capped or cap == 9
    for n, p in named.items():
        assert torch.allclose(p, twins[n].theta, rtol=0, atol=1e-12), n


losses = st.floats(1e-6, 1e6)


@given(loss=losses, power=st.floats(0.1, 2), cap=st.floats(1, 100))
def test_the_factor(loss, power, cap):
    factor = rate_factor(torch.tensor(loss, dtype=torch.float64), power, cap).item()
    assert 0 < factor <= cap
    if factor < cap:
        assert factor * loss**power == pytest.approx(1.0)  # what bounds the forgetting of a step
    higher = rate_factor(torch.tensor(2 * loss, dtype=torch.float64), power, cap).item()
    assert higher <= factor


@given(values=st.lists(losses, min_size=1, max_size=12), alpha=st.floats(0, 0.99))
def test_the_average_lies_among_the_losses(values, alpha):
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = Finch([p], smoothing=alpha)
    for value in values:
        p.grad = torch.ones_like(p)
        opt.observe(torch.tensor(value, dtype=torch.float64))
        opt.step()
        assert min(values) * (1 - 1e-9) <= opt.rate_state()["mean_loss"] <= max(values) * 1.000001


def test_a_closure_may_return_the_loss():
    nets = [make_net(), make_net()]
    opts = [Finch(net.parameters(), lr=1e-2) for net in nets]
    for t in range(5):
        opts[0].observe(backward(nets[0], t))
        opts[0].step()
        opts[1].step(lambda t=t: backward(nets[1], t))
    assert far(*nets) == 0.0


def test_a_step_without_a_loss_is_refused_and_changes_nothing():
    net, start = make_net(), make_net()
    opt = Finch(net.parameters(), lr=1e-2)
    backward(net, 0)
    with pytest.raises(RuntimeError, match=r"call optimizer.observe\(loss\)"):
        opt.step()
    assert far(net, start) == 0.0
    steps(net, opt, [0])
    backward(net, 1)
    with pytest.raises(RuntimeError, match="observe"):  # a loss counts once
        opt.step()


def test_a_loss_that_is_not_finite_shows_in_the_weights():
    net = make_net()
    steps(net, Finch(net.parameters()), [0, 1], scale=math.nan)
    assert all(p.isnan().all() for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", ["saved", "copied", "pickled"])
def test_resume_to_the_bit(how, dtype, tmp_path):
    def make():
        net = make_net(dtype)
        return net, Finch(net.named_parameters(), lr=1e-2, smoothing=0.7)

    net, opt = make()
    steps(net, opt, range(5), scale=7.0)
    if how == "saved":
        torch.save([net.state_dict(), opt.state_dict()], tmp_path / "s.pt")
        weights, state = torch.load(tmp_path / "s.pt", weights_only=True)
        other, again = make()
        other.load_state_dict(weights)
        again.load_state_dict(state)
    elif how == "copied":
        other, again = copy.deepcopy((net, opt))
    else:
        other, again = pickle.loads(pickle.dumps((net, opt)))
    assert again.rate_state() == opt.rate_state()
    for n, o in ((net, opt), (other, again)):
        steps(n, o, range(5, 10))
    assert far(net, other) == 0.0


def test_a_state_of_adamw_begins_a_new_average():
    net = make_net()
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    backward(net, 0)
    adam.step()
    opt = Finch(net.parameters(), lr=1e-2)
    opt.load_state_dict(adam.state_dict())
    opt.observe(torch.tensor(4.0))
    backward(net, 1)
    opt.step()
    assert opt.rate_state() == {"mean_loss": 4.0, "lr_factor": 0.5}


@pytest.mark.parametrize(
    ("name", "bad"),
    [("power", -1.0), ("smoothing", 1.0), ("smoothing", -0.1), ("cap", 0.9), ("cap", math.nan)],
)
def test_refused(name, bad):
    with pytest.raises(ValueError, match=f"{name} must"):
        Finch(make_net().parameters(), **{name: bad})
    with pytest.raises(ValueError, match=f"{name} must"):
        FinchUpdate(**{name: bad})


OPTIONS = {"task": "classification", "progress": False}


@pytest.mark.parametrize("penalties", [(), (L2SP(),)])
def test_the_loss_of_the_whole_update_counts(penalties):
    """However it is cut into micro-batches; it is the loss that the loop logs."""
    recipe = Recipe(update=FinchUpdate(smoothing=0.0), penalties=penalties)
    ends = []
    for size, accumulate in ((12, 1), (4, 3), (5, 3)):
        rows = []
        settings = LoopSettings(max_updates=6, accumulate=accumulate, log_every=1)
        model = finetune_loop(
            make_net(), recipe, DATA, lr=1e-2, batch_size=size, settings=settings,
            log=rows.append, **OPTIONS,
        )  # fmt: skip
        assert [r["mean_loss"] for r in rows] == pytest.approx([r["loss"] for r in rows])
        assert [r["lr"] for r in rows] == [1e-2] * 6  # that of the schedule
        ends.append((size * accumulate, model))
    assert far(ends[0][1], ends[1][1]) < 1e-9


def test_an_update_that_was_not_made_does_not_count():
    """A GradScaler skips steps; the next update begins with advance."""
    run = Run(Recipe.preset("finch"), make_net(), DATA, lr=1e-2, cache=False, **OPTIONS)
    optimizer = run.make_optimizer(4)
    rows = DATA[:8]
    for update in (1, 2):
        run.advance(update)
        loss = run.loss(rows, 8, update)
        loss.backward()
        if update == 2:
            optimizer.step()
    assert optimizer.rate_state()["mean_loss"] == pytest.approx(loss.item())


def test_other_updates_observe_nothing():
    run = Run(Recipe(), make_net(), DATA, lr=1e-2, cache=False, **OPTIONS)
    train_loop(run, batch_size=8, settings=LoopSettings(max_updates=2))
    assert run._observed == 0.0
