"""What RecAdam becomes at the ends of its settings."""

import pytest
import torch

from golden.recadam import Twin
from holdfast import RecAdam, Reference, random_init
from holdfast.anneal import Constant, Linear, Sigmoid
from methods.problems import PATHS, backward, far, make_net


@pytest.mark.parametrize("path", PATHS)
def test_large_k_is_recall_then_fine_tuning(path):
    """k → ∞: the weights do not leave θ* before t0, and move as Adam's do after it."""
    net, switch = make_net(), 20
    start = make_net()
    opt = RecAdam(
        net.parameters(), lr=1e-2, gamma=10.0, anneal=Sigmoid(k=1e6, t0=switch + 0.5), **PATHS[path]
    )
    for t in range(switch):
        backward(net, t)
        opt.step()
    assert far(net, start) == 0.0

    # Adam's moments have seen all gradients; from here on the steps are plain Adam's.
    plain = {p: Twin(p.detach().clone(), None) for p in net.parameters()}
    for p, twin in plain.items():
        state = opt.state[p]
        twin.step, twin.m, twin.v = 20, state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    for t in range(switch, 50):
        backward(net, t)
        opt.step()
        for p, twin in plain.items():
            twin.update(p.grad, lr=1e-2, lam=1.0, gamma=0.0)
    assert far(net, start) > 0.1
    for p, twin in plain.items():
        assert torch.allclose(p, twin.theta, rtol=0, atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lam", [0.0, 1e-300, 1e-7, 1e-5])
def test_weight_decay_does_not_depend_on_lambda(path, lam):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    twin = Twin(torch.ones(3).double(), torch.zeros(3).double())
    opt = RecAdam(
        [("p", p)], lr=0.1, gamma=1.0, anneal=Constant(lam), weight_decay=0.5,
        anchors={"p": torch.zeros(3)}, **PATHS[path],
    )  # fmt: skip
    for _ in range(5):
        p.grad = torch.ones(3, dtype=torch.float64)
        opt.step()
        twin.update(p.grad, lr=0.1, lam=lam, gamma=1.0, wd=0.5)
    assert torch.allclose(p, twin.theta, rtol=0, atol=1e-14)


def test_a_tensor_learning_rate_of_zero_is_no_nan():
    p = torch.nn.Parameter(torch.ones(3))
    opt = RecAdam([p], lr=torch.tensor(0.0), gamma=1.0)
    p.grad = torch.tensor([0.0, 1.0, 0.0])
    opt.step()
    assert torch.equal(p, torch.ones(3))


@pytest.mark.parametrize("path", PATHS)
def test_k_zero_weighs_both_losses_by_half(path):
    """k = 0 minimises ½(Loss_T + Loss_S): half an Adam step, half the pull."""
    net = make_net()
    twins = {p: Twin(p.detach().clone(), p.detach().clone()) for p in net.parameters()}
    opt = RecAdam(net.parameters(), lr=1e-2, gamma=10.0, anneal=Sigmoid(k=0.0), **PATHS[path])
    for t in range(30):
        backward(net, t)
        opt.step()
        for p, twin in twins.items():
            twin.update(p.grad, lr=1e-2, lam=0.5, gamma=10.0)
    for p, twin in twins.items():
        assert torch.allclose(p, twin.theta, rtol=0, atol=1e-13)
    assert opt.recall_state() == {"updates": 30, "lam": 0.5, "pull": pytest.approx(0.05)}


def test_the_pull_of_a_constant_lambda_is_kept():
    """The released code's constant annealing pulls nowhere; ours does."""
    far_away = {}
    for gamma in (0.0, 50.0):
        net = make_net()
        opt = RecAdam(net.parameters(), lr=1e-2, gamma=gamma, anneal=Constant(0.5))
        for t in range(50):
            backward(net, t)
            opt.step()
        far_away[gamma] = opt.distance()
    assert far_away[50.0] < 0.2 * far_away[0.0]


def test_linear_annealing_ends_in_plain_adam():
    opt = RecAdam(make_net().parameters(), lr=1e-3, gamma=100.0, anneal=Linear(t0=10))
    for t in range(12):
        backward_state = opt.recall_state()
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        opt.step()
        assert backward_state["lam"] == pytest.approx(min(1.0, max(1, t) / 10))
    assert opt.recall_state()["lam"] == 1.0
    assert opt.recall_state()["pull"] == 0.0


@pytest.mark.parametrize("path", PATHS)
def test_random_initialisation_recovers_the_pretrained_weights(path):
    net = make_net(torch.float32)
    pretrained = Reference.of(net)
    random_init(net, seed=3)
    start = pretrained.distance(net).total
    assert start > 1
    opt = RecAdam(
        net.named_parameters(), lr=1e-3, gamma=100.0, anneal=Sigmoid(k=0.5, t0=200),
        anchors=pretrained, **PATHS[path],
    )  # fmt: skip
    for t in range(150):  # the recall phase
        backward(net, t)
        opt.step()
    assert opt.recall_state()["lam"] < 1e-10
    assert pretrained.distance(net).total <= 0.001 * start


def test_a_clamped_pull_lands_on_the_anchor():
    p = torch.nn.Parameter(torch.randn(5))
    anchor = torch.randn(5)
    with pytest.warns(UserWarning, match=r"lr·gamma = 50 is above 1"):
        opt = RecAdam(
            [("p", p)], lr=0.01, gamma=5000.0, anneal=Constant(0.0), anchors={"p": anchor}
        )
    p.grad = torch.randn(5)
    opt.step()
    assert torch.equal(p, anchor)


def test_a_group_without_gradients_joins_later():
    first, late = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    opt = RecAdam([{"params": [first]}, {"params": [late]}], lr=1e-2, gamma=1.0)
    first.grad = torch.ones(3)
    opt.step()
    opt.step()
    assert torch.equal(late, torch.ones(3))
    assert not opt.state[late]
    late.grad = torch.ones(3)
    opt.step()
    assert float(opt.state[late]["step"]) == 1
    assert float(opt.state[first]["step"]) == 3
