"""SFA: against its twin, in any optimizer, and across a restart."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from golden.sfa import averaged_at, sfa
from holdfast import L2SP, SFA, RecAdam, Reference
from holdfast.anneal import Sigmoid
from holdfast.optim import MoFO, attach_penalties
from methods.problems import backward, far, make_net


def train(net, opt, start, stop):
    for t in range(start, stop):
        backward(net, t)
        opt.step()


@given(every=st.floats(0.01, 1.0), total=st.integers(1, 300))
def test_when_it_acts(every, total):
    average = SFA(every=every)
    acts = [t for t in range(1, total + 1) if average.acts_at(t, total)]
    assert acts == sorted(averaged_at(every, total))
    assert acts[-1] == total


@pytest.mark.parametrize("every", [0.25, 0.3, 1.0])
@pytest.mark.parametrize("weight", [0.0, 0.2, 0.5, 1.0])
def test_float64_follows_the_twin(every, weight):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(7, generator=generator, dtype=torch.float64)
    targets = torch.randn(40, 7, generator=generator, dtype=torch.float64)
    p = torch.nn.Parameter(start.clone())
    opt = torch.optim.SGD([("p", p)], lr=0.05)
    attach_penalties(opt, [SFA(every, weight)], Reference({"p": start}), total_updates=40)
    for t in range(1, 41):
        p.grad = p.detach() - targets[t - 1]
        opt.step()
    twin = sfa(
        start, start, lambda x, t: x - targets[t - 1], lr=0.05, total=40, every=every,
        weight=weight,
    )  # fmt: skip
    assert torch.allclose(p, twin, rtol=0, atol=1e-12)
    assert torch.equal(p, start) == (weight == 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weight_zero_changes_no_bit_and_dtypes_are_kept(dtype):
    nets = [make_net(dtype), make_net(dtype), make_net(dtype)]
    for net, weight in zip(nets, (0.0, None, 0.5), strict=True):
        opt = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
        if weight is not None:
            penalty = SFA(weight=weight)
            attach_penalties(opt, [penalty], Reference.of(net), total_updates=8)
        train(net, opt, 0, 8)
    assert far(nets[0], nets[1]) == 0.0
    assert 0 < far(nets[2], make_net(dtype)) < far(nets[1], make_net(dtype))
    assert {p.dtype for p in nets[2].parameters()} == {dtype}


@pytest.mark.parametrize("cls", [torch.optim.AdamW, MoFO, RecAdam, torch.optim.SGD])
@pytest.mark.parametrize("at", [0, 4, 5, 9])
def test_a_restart_keeps_its_place(cls, at, tmp_path):
    extra = {"gamma": 5.0, "anneal": Sigmoid(0.3, 5)} if cls is RecAdam else {}

    def make():
        net = make_net(torch.float32)
        opt = cls(net.named_parameters(), lr=1e-2, **extra)
        penalties = [L2SP(2.0), SFA(every=0.25)]
        return net, opt, attach_penalties(opt, penalties, Reference.of(net), total_updates=20)

    net, opt, attached = make()
    train(net, opt, 0, at)
    torch.save([net.state_dict(), opt.state_dict()], tmp_path / "s.pt")
    train(net, opt, at, 20)
    other, again, resumed = make()
    weights, state = torch.load(tmp_path / "s.pt", weights_only=True)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    assert resumed.updates == at
    train(other, again, at, 20)
    assert far(net, other) == 0.0
    assert attached.updates == resumed.updates == 20
    assert set(attached.values()) == {"L2SP"}  # an average amounts to nothing


def test_it_does_not_ask_for_a_learning_rate():
    """Nor for a gradient: what is frozen for a while is averaged with the rest."""
    net = make_net()
    reference = Reference.of(net)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    opt = torch.optim.SGD(net.parameters(), lr=0.0)
    attach_penalties(opt, [SFA(every=1.0)], reference, total_updates=1)
    net.body[0].weight.requires_grad_(False)
    backward(net, 0)
    opt.step()
    for name, distance in reference.distance(net).per_parameter.items():
        assert distance == pytest.approx(0.5 * math.sqrt(reference[name].numel()))


def test_refused():
    net = make_net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="pass total_updates="):
        attach_penalties(opt, [SFA()], Reference.of(net))
    for bad in (0.0, -0.1, 1.1, math.nan, "often"):
        with pytest.raises((ValueError, TypeError), match="every must be"):
            SFA(every=bad)
    for bad in (-0.1, 1.1, math.nan, "half"):
        with pytest.raises((ValueError, TypeError), match="weight must"):
            SFA(weight=bad)
