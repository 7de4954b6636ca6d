import copy
import math

import pytest
import torch

from holdfast import L1SP, L2SP, RecAdam, Reference
from holdfast.anneal import Sigmoid
from holdfast.optim import MoFO, attach_penalties
from methods.problems import PATHS, backward, far, make_net

PENALTIES = [L2SP(3.0), L2SP(3.0, coupled=True), L1SP(0.2), L1SP(0.2, coupled=True)]


def train(net, opt, steps, start=0):
    for t in range(start, start + steps):
        backward(net, t)
        opt.step()


def literal_sgd(net, penalty, lr, steps):
    """SGD with the penalty, written out, float64."""
    anchors = {n: p.detach().clone() for n, p in net.named_parameters()}
    beta = penalty.strength
    for t in range(steps):
        backward(net, t)
        for n, p in net.named_parameters():
            theta, star, g = p.detach().clone(), anchors[n], p.grad.clone()
            if penalty.coupled:
                d = theta - star
                g = g + (beta * d if isinstance(penalty, L2SP) else beta * d.sign())
                theta = theta - lr * g
            else:
                theta = theta - lr * g
                d = theta - star
                if isinstance(penalty, L2SP):
                    theta = theta - min(1.0, lr * beta) * d
                else:
                    theta = star + d.sign() * (d.abs() - lr * beta).clamp(min=0)
            p.data.copy_(theta)
    return net


@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
def test_float64_follows_the_literal_rule(penalty):
    net = make_net()
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    attach_penalties(opt, [penalty], Reference.of(net))
    train(net, opt, 40)
    twin = literal_sgd(make_net(), penalty, 0.05, 40)
    assert far(net, twin) < 1e-12
    assert far(net, make_net()) > 0.05


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cls", [L2SP, L1SP])
@pytest.mark.parametrize("coupled", [False, True])
def test_strength_zero_changes_no_bit(path, cls, coupled):
    nets = [make_net(torch.float32), make_net(torch.float32)]
    opts = [torch.optim.AdamW(n.parameters(), lr=1e-2, **PATHS[path]) for n in nets]
    attach_penalties(opts[0], [cls(0.0, coupled=coupled)], Reference.of(nets[0]))
    for net, opt in zip(nets, opts, strict=True):
        train(net, opt, 15)
    assert far(*nets) == 0.0


@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
def test_it_keeps_the_model_nearer(penalty):
    distances = {}
    for strength in (0.0, penalty.strength):
        net = make_net()
        reference = Reference.of(net)
        opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
        chosen = type(penalty)(strength, coupled=penalty.coupled)
        attached = attach_penalties(opt, [chosen], reference)
        train(net, opt, 60)
        distances[strength] = reference.distance(net).total
    assert distances[penalty.strength] < distances[0.0]
    name = type(penalty).__name__
    assert attached.values()[name] > 0
    if isinstance(penalty, L2SP):
        expected = 0.5 * penalty.strength * distances[penalty.strength] ** 2
        assert attached.values()[name] == pytest.approx(expected, rel=1e-5)


def test_zeros_of_l1_are_exact():
    net = make_net(torch.float32)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    attach_penalties(opt, [L1SP(0.03)], Reference.of(net))
    train(net, opt, 30)
    pairs = zip(net.parameters(), make_net(torch.float32).parameters(), strict=True)
    same = sum(int((p == q).sum()) for p, q in pairs)
    assert 20 < same < sum(p.numel() for p in net.parameters()) - 20


def test_the_pull_of_l2_does_not_overshoot():
    net = make_net()
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    with pytest.warns(UserWarning, match="lr·strength = 50 is above 1") as seen:
        attach_penalties(opt, [L2SP(100.0)], Reference.of(net))
    assert seen[0].filename == __file__
    train(net, opt, 3)
    assert far(net, make_net()) == 0.0


def test_decoupled_l2_is_recadams_pull_at_constant_lambda():
    """RecAdam with λ ≡ λ₀ is Adam at lr·λ₀ with L2-SP at rate lr·(1−λ₀)·γ."""
    from holdfast.anneal import Constant

    net, other = make_net(), make_net()
    recadam = RecAdam(net.parameters(), lr=1e-2, gamma=10.0, anneal=Constant(0.5))
    adam = torch.optim.AdamW(other.parameters(), lr=0.5e-2, weight_decay=0.0)
    attach_penalties(adam, [L2SP(10.0)], Reference.of(other))
    train(net, recadam, 30)
    train(other, adam, 30)
    assert far(net, other) < 1e-12


@pytest.mark.parametrize("cls", [torch.optim.AdamW, MoFO, RecAdam], ids=lambda c: c.__name__)
@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
def test_they_compose_and_resume_to_the_bit(cls, penalty, tmp_path):
    extra = {"gamma": 5.0, "anneal": Sigmoid(0.3, 5)} if cls is RecAdam else {}

    def make():
        net = make_net(torch.float32)
        reference = Reference.of(net)
        opt = cls(net.named_parameters(), lr=1e-2, **extra)
        attach_penalties(opt, [penalty, L2SP(0.5)], reference)
        return net, opt

    (net, opt), (other, again) = make(), make()
    train(net, opt, 5)
    torch.save([net.state_dict(), opt.state_dict()], tmp_path / "s.pt")
    weights, state = torch.load(tmp_path / "s.pt", weights_only=True)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    train(net, opt, 5, start=5)
    train(other, again, 5, start=5)
    assert far(net, other) == 0.0


@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
@pytest.mark.parametrize("path", PATHS)
def test_a_scaler_changes_nothing(penalty, path):
    net, other = make_net(torch.float32), make_net(torch.float32)
    opts = [torch.optim.AdamW(n.parameters(), lr=1e-2, **PATHS[path]) for n in (net, other)]
    for n, opt in zip((net, other), opts, strict=True):
        attach_penalties(opt, [penalty], Reference.of(n))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for t in range(8):
        before = copy.deepcopy(net)
        loss = backward(net, t)
        for p in net.parameters():
            p.grad.mul_(scaler._scale if scaler._scale is not None else 2.0**12)
        scaler.scale(loss)
        if t == 4:
            net.head.bias.grad[0] = math.inf
        scaler.step(opts[0])
        scaler.update()
        if t == 4:
            assert far(net, before) == 0.0
            continue
        backward(other, t)
        opts[1].step()
    assert far(net, other) < 1e-4


def test_new_parameters_and_absent_gradients_are_left_alone():
    net = make_net()
    reference = Reference.of(net, without="head")
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    opt = torch.optim.SGD(net.named_parameters(), lr=0.0)
    attach_penalties(opt, [L2SP(1.0)], reference)
    start = copy.deepcopy(net)
    net.head(torch.ones(1, 7).double()).sum().backward()
    opt.param_groups[0]["lr"] = 1e-9
    opt.step()
    assert far(net.body, start.body) == 0.0


def test_refused():
    net = make_net()
    opt = torch.optim.SGD(net.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no parameter has an anchor"):
        attach_penalties(opt, [L2SP(1.0)], Reference({"foreign": torch.zeros(1)}))
    for bad in (-1.0, math.nan, "much"):
        with pytest.raises((ValueError, TypeError), match="strength must be"):
            L2SP(bad)


def test_removed_penalties_do_nothing():
    nets = [make_net(), make_net()]
    opts = [torch.optim.SGD(n.parameters(), lr=0.1) for n in nets]
    attach_penalties(opts[0], [L2SP(5.0)], Reference.of(nets[0])).remove()
    for net, opt in zip(nets, opts, strict=True):
        train(net, opt, 5)
    assert far(*nets) == 0.0


@pytest.mark.parametrize("lr", [1e-5, 1e-3, 0.1])
def test_without_a_strength_an_update_goes_one_per_cent_of_the_way_back(lr):
    """Whatever the learning rate; schedules scale it from there."""
    net = make_net()
    reference = Reference({n: p + 1.0 for n, p in net.named_parameters()})
    opt = torch.optim.SGD(net.named_parameters(), lr=lr)
    attached = attach_penalties(opt, [L2SP()], reference)
    assert attached.penalties == (L2SP(0.01 / lr),)
    backward(net, 1)
    for p in net.parameters():
        p.grad.zero_()
    opt.step()
    for n, p in net.named_parameters():
        assert torch.allclose(reference[n] - p, torch.full_like(p, 0.99), atol=1e-12)


def test_the_strength_is_set_by_the_peak_learning_rate():
    net = make_net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 0.25, total_iters=10)
    assert opt.param_groups[0]["lr"] < 0.1
    (penalty,) = attach_penalties(opt, [L2SP()], Reference.of(net)).penalties
    assert penalty.strength == pytest.approx(0.1)
    del scheduler
    with pytest.raises(ValueError, match="from the learning rate, which is 0"):
        attach_penalties(torch.optim.SGD(net.parameters(), lr=0.0), [L2SP()], Reference.of(net))
