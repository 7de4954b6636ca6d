"""RecAdam as a torch.optim.Optimizer among torch's own machinery."""

import copy

import pytest
import torch

from holdfast import RecAdam
from holdfast.anneal import Constant, Sigmoid
from methods.problems import PATHS, backward, batch, far, make_net

OPTIONS = {"lr": 1e-2, "gamma": 20.0, "anneal": Sigmoid(0.3, 10)}


def train(net, opt, steps, *, step=None, scheduler=None):
    for t in range(steps):
        backward(net, t)
        (step or opt.step)()
        if scheduler:
            scheduler.step()


def test_closures():
    net, other = make_net(), make_net()
    opt, plain = (RecAdam(n.parameters(), **OPTIONS) for n in (net, other))
    x, y = batch(0)

    def closure():
        opt.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    loss = opt.step(closure)
    expected = backward(other, 0)
    plain.step()
    assert loss.item() == expected.item()
    assert far(net, other) == 0.0


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.6's SequentialLR
@pytest.mark.parametrize("path", PATHS)
def test_schedulers(path):
    net = make_net()
    opt = RecAdam(net.parameters(), **OPTIONS, **PATHS[path])
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        opt,
        [
            torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10),
        ],
        milestones=[5],
    )
    pulls = []
    for t in range(15):
        pulls.append(opt.recall_state()["pull"] / opt.param_groups[0]["lr"])
        train(net, opt, 1, scheduler=scheduler)
        assert opt.recall_state()["updates"] == t + 1
    assert pulls == sorted(pulls, reverse=True)  # (1−λ)·γ falls whatever the schedule does


class TestGradScaler:
    """On the CPU: the scaler unscales, finds the infinity and skips the step."""

    @pytest.mark.parametrize("path", PATHS)
    def test_scaled_gradients_give_the_same_run(self, path):
        net, other = make_net(torch.float32), make_net(torch.float32)
        opt, plain = (RecAdam(n.parameters(), **OPTIONS, **PATHS[path]) for n in (net, other))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for t in range(10):
            x, y = batch(t, torch.float32)
            opt.zero_grad()
            scaler.scale((net(x) - y).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
        train(other, plain, 10)
        assert far(net, other) < 1e-6

    @pytest.mark.parametrize("path", PATHS)
    def test_a_skipped_step_does_not_advance_the_recall(self, path):
        net = make_net(torch.float32)
        opt = RecAdam(net.parameters(), **OPTIONS, **PATHS[path])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for t in range(6):
            before = copy.deepcopy(net)
            x, y = batch(t, torch.float32)
            opt.zero_grad()
            scaler.scale((net(x) - y).square().mean()).backward()
            if t % 2:
                net.head.bias.grad[0] = torch.inf
            scaler.step(opt)
            scaler.update()
            assert (far(net, before) == 0.0) == bool(t % 2)
        assert opt.recall_state()["updates"] == 3


# torch takes a tensor lr with foreach only when capturable, which needs an accelerator.
@pytest.mark.parametrize(
    ("path", "lr_kind"),
    [
        ("single", float),
        ("foreach", float),
        ("fused", float),
        ("single", torch.tensor),
        ("fused", torch.tensor),
    ],
)
@pytest.mark.parametrize("wd", [0.1, pytest.param(0.0, marks=pytest.mark.soak)])
def test_compiled_steps_are_compiled_at_most_twice(path, lr_kind, wd):
    torch._dynamo.reset()
    graphs = 0

    def count(graph, _):
        nonlocal graphs
        graphs += 1
        return graph

    options = PATHS[path] | {"weight_decay": wd}
    net, other = make_net(torch.float32), make_net(torch.float32)
    opt = RecAdam(net.parameters(), **(OPTIONS | {"lr": lr_kind(1e-2)}), **options)
    plain = RecAdam(other.parameters(), **OPTIONS, **options)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s / 20)) for o in (opt, plain)
    ]
    step = torch.compile(opt.step, backend=count)
    train(net, opt, 50, step=step, scheduler=schedulers[0])
    train(other, plain, 50, scheduler=schedulers[1])
    assert 1 <= graphs <= 2
    assert opt.recall_state()["updates"] == 50
    assert far(net, other) < 1e-5
    torch._dynamo.reset()


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_the_real_compiler():
    """Through inductor, not a counting back end."""
    torch._dynamo.reset()
    net, other = make_net(torch.float32), make_net(torch.float32)
    opt, plain = (RecAdam(n.parameters(), foreach=True, **OPTIONS) for n in (net, other))
    train(net, opt, 12, step=torch.compile(opt.step))
    train(other, plain, 12)
    assert far(net, other) < 1e-5
    torch._dynamo.reset()


def test_the_log():
    net = make_net()
    opt = RecAdam(net.parameters(), lr=1e-2, gamma=20.0, anneal=Constant(0.25))
    assert opt.recall_state() == {"updates": 0, "lam": 0.25, "pull": pytest.approx(0.15)}
    start = make_net()
    train(net, opt, 4)
    state = opt.recall_state(distance=True)
    assert state["updates"] == 4
    assert state["distance"] == pytest.approx(far(net, start), rel=1e-9)


def test_non_contiguous_parameters():
    base = torch.randn(6, 4).double()
    p = torch.nn.Parameter(base.clone().t())
    q = torch.nn.Parameter(base.t().contiguous())
    opts = [RecAdam([x], **OPTIONS) for x in (p, q)]
    for t in range(5):
        g = torch.randn(4, 6, generator=torch.Generator().manual_seed(t)).double()
        for x, opt in zip((p, q), opts, strict=True):
            x.grad = g.clone()
            opt.step()
    assert torch.equal(p, q)


def test_frozen_parameters_stay():
    net = make_net()
    net.body.requires_grad_(False)
    opt = RecAdam(net.parameters(), **OPTIONS)
    train(net, opt, 3)
    assert far(net.body, make_net().body) == 0.0
    assert far(net.head, make_net().head) > 0.0


def test_it_is_an_optimizer():
    opt = RecAdam(make_net().parameters())
    assert isinstance(opt, torch.optim.Optimizer)
    assert "gamma: 5000" in repr(opt)


def test_state_that_is_cleared_in_place_is_made_again():
    p = torch.nn.Parameter(torch.ones(3))
    opt = RecAdam([p], lr=1e-5)
    for _ in range(2):
        p.grad = torch.ones(3)
        opt.step()
        opt.state[p].clear()
    opt.step()
    assert opt.state[p]["step"] == 1
