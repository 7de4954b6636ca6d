"""Penalties across a restart: what is saved, what is counted, what is refused."""

import copy
import math

import pytest
import torch

from holdfast import EWC, L1SP, L2SP, MAS, SFA, RecAdam, Reference
from holdfast.anneal import Sigmoid
from holdfast.optim import MoFO, attach_penalties
from methods.problems import backward, batch, far, make_net

SETS = {
    "l2": [L2SP(3.0)],
    "coupled": [L2SP(3.0, coupled=True)],
    "l1 and average": [L1SP(0.2), SFA(every=0.2)],
}


def make(cls=torch.optim.AdamW, penalties="l2", dtype=torch.float32, seed=0, groups=False, **extra):
    net = make_net(dtype, seed)
    if cls is RecAdam:
        extra |= {"gamma": 5.0, "anneal": Sigmoid(0.3, 5)}
    params = list(net.named_parameters())
    if groups:
        params = [{"params": params[:2]}, {"params": params[2:], "lr": 3e-3}]
    opt = cls(params, lr=1e-2, **extra)
    given = SETS[penalties] if isinstance(penalties, str) else penalties
    return net, opt, attach_penalties(opt, given, Reference.of(net), total_updates=20)


def train(net, opt, start, stop):
    for t in range(start, stop):
        backward(net, t)
        opt.step()


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, MoFO, RecAdam])
@pytest.mark.parametrize("penalties", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [0, 1, 11])
def test_any_step_can_be_the_last_before_a_restart(cls, penalties, dtype, at, tmp_path):
    net, opt, _ = make(cls, penalties, dtype, groups=True)
    train(net, opt, 0, at)
    torch.save([net.state_dict(), opt.state_dict()], tmp_path / "s.pt")
    train(net, opt, at, 20)
    other, again, attached = make(cls, penalties, dtype, groups=True)
    weights, state = torch.load(tmp_path / "s.pt", weights_only=True)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    assert [g["penalty_updates"] for g in again.param_groups] == [at, at]
    train(other, again, at, 20)
    assert far(net, other) == 0.0
    assert attached.updates == 20
    assert {p.dtype for p in other.parameters()} == {dtype}


class TestRefused:
    @pytest.mark.parametrize("cls", [torch.optim.AdamW, RecAdam])
    def test_other_anchors(self, cls):
        net, opt, _ = make(cls)
        train(net, opt, 0, 3)
        pretrained = Reference(dict(Reference.of(make_net(torch.float32))))
        extra = {"gamma": 5.0, "anchors": pretrained} if cls is RecAdam else {}
        late = cls(net.named_parameters(), lr=1e-2, **extra)
        attach_penalties(late, SETS["l2"], Reference.of(net))
        before = copy.deepcopy(late.state_dict())
        with pytest.raises(ValueError, match=r"made with other anchors.* all of them.*attach_pen"):
            late.load_state_dict(opt.state_dict())
        assert str(late.state_dict()) == str(before)

    def test_one_of_them_is_named(self):
        _, opt, _ = make(groups=True)
        state = opt.state_dict()
        net = make_net(torch.float32)
        torch.nn.init.normal_(net.head.bias)
        named = list(net.named_parameters())
        late = torch.optim.AdamW([{"params": named[:2]}, {"params": named[2:]}])
        attach_penalties(late, SETS["l2"], Reference.of(net))
        with pytest.raises(ValueError, match=r"for head\.bias of group 1\."):
            late.load_state_dict(state)

    def test_a_state_without_penalties(self):
        net, opt, _ = make()
        plain = torch.optim.AdamW(make_net(torch.float32).parameters())
        with pytest.raises(ValueError, match="made without penalties, but this optimizer has L2SP"):
            opt.load_state_dict(plain.state_dict())

    def test_other_groups(self):
        _, opt, _ = make()
        with pytest.raises(ValueError, match=r"has \[2, 4\] parameters per group, .* \[6\]"):
            opt.load_state_dict(make(groups=True)[1].state_dict())

    def test_twice(self):
        net, opt, attached = make()
        with pytest.raises(ValueError, match="already has penalties"):
            attach_penalties(opt, [L1SP()], Reference.of(net))
        attached.remove()
        assert "penalty_updates" not in opt.state_dict()["param_groups"][0]
        attach_penalties(opt, [L1SP()], Reference.of(net))

    def test_importances_that_do_not_fit(self):
        net = make_net()
        opt = torch.optim.SGD(net.named_parameters(), lr=0.1)
        one = Reference({n: torch.ones_like(p) for n, p in net.named_parameters()})
        with pytest.raises(ValueError, match="there are 2 penalties and 1 importances"):
            attach_penalties(opt, [EWC(), MAS()], Reference.of(net), [one])
        with pytest.raises(ValueError, match="MAS weights each coordinate"):
            attach_penalties(opt, [EWC(), MAS()], Reference.of(net), [one, None])
        with pytest.raises(ValueError, match="pass the Reference"):
            attach_penalties(opt, [L2SP()], None)
        with pytest.raises(ValueError, match="importance: no parameter has an importance"):
            attach_penalties(opt, [EWC()], Reference.of(net), Reference({"x": torch.ones(1)}))
        attach_penalties(opt, [EWC(0.0), L2SP(1.0)], Reference.of(net))  # 0 weighs nothing


def test_each_uses_its_own_importance():
    """EWC and MAS at once, against the literal rule."""
    net, lr = make_net(), 0.05
    star = {n: p.detach().clone() for n, p in net.named_parameters()}
    fisher, omega = (
        {n: torch.rand_like(p) * 3 for n, p in net.named_parameters()} for _ in range(2)
    )
    opt = torch.optim.SGD(net.named_parameters(), lr=lr)
    attached = attach_penalties(
        opt, [EWC(2.0), L2SP(0.5), MAS(3.0)], Reference(star),
        [Reference(fisher), None, Reference(omega)],
    )  # fmt: skip
    twin = {n: p.clone() for n, p in star.items()}
    for t in range(20):
        backward(net, t)
        for n, p in net.named_parameters():
            x = twin[n] - lr * p.grad
            for strength, weight in ((2.0, fisher[n]), (0.5, 1.0), (3.0, omega[n])):
                x = x - lr * strength * weight * (x - star[n])
            twin[n] = x
        opt.step()
    for n, p in net.named_parameters():
        assert torch.allclose(p, twin[n], rtol=0, atol=1e-12)
    expected = 0.0
    for n, p in net.named_parameters():
        expected += 0.5 * 3.0 * float((omega[n] * (p.detach() - star[n]).square()).sum())
    assert attached.values()["MAS"] == pytest.approx(expected)
    assert list(attached.values()) == ["EWC", "L2SP", "MAS"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("coupled", [False, True])
def test_a_huge_importance_in_half_precision(dtype, coupled):
    net = make_net(dtype)
    huge = Reference({n: torch.full(p.shape, 1e6) for n, p in net.named_parameters()})
    opt = torch.optim.SGD(net.named_parameters(), lr=0.0)
    penalty = EWC(1e-8, coupled=coupled)
    attach_penalties(opt, [penalty], Reference.of(net), huge)
    train(net, opt, 0, 1)  # a warm-up may begin at 0
    assert far(net, make_net(dtype)) == 0.0
    opt.param_groups[0]["lr"] = 1e-2
    train(net, opt, 1, 4)
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    assert {p.dtype for p in net.parameters()} == {dtype}


class TestTheCount:
    def test_a_skipped_step_is_none(self):
        net, opt, attached = make(penalties="l1 and average")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for t in range(6):
            x, y = batch(t, torch.float32)
            opt.zero_grad()
            scaler.scale((net(x) - y).square().mean()).backward()
            if t % 2:
                net.head.bias.grad[0] = math.inf
            scaler.step(opt)
            scaler.update()
        assert attached.updates == 3

    def test_a_fused_step_that_was_skipped_is_none(self):
        """With fused=True on an accelerator the step is called and told what was found."""
        net, opt, attached = make(fused=True)
        with torch.no_grad():
            net.head.bias.add_(1.0)
        before = copy.deepcopy(net)
        backward(net, 0)
        opt.found_inf = torch.ones(())
        opt.step()
        assert attached.updates == 0
        assert far(net, before) == 0.0
        del opt.found_inf
        opt.step()
        assert attached.updates == 1

    def test_a_step_without_gradients_is_none(self):
        _, opt, attached = make()
        opt.step()
        assert attached.updates == 0

    def test_late_groups(self):
        net = make_net()
        named = list(net.named_parameters())
        opt = torch.optim.SGD(named[:2], lr=0.1)
        attached = attach_penalties(opt, [L2SP(5.0)], Reference.of(net))
        train(net, opt, 0, 3)
        opt.add_param_group({"params": named[2:]})
        train(net, opt, 3, 6)
        assert [g["penalty_updates"] for g in opt.param_groups] == [6, 6]
        assert attached.updates == 6
        twin = make_net()
        both = torch.optim.SGD(twin.named_parameters(), lr=0.1)
        attach_penalties(both, [L2SP(5.0)], Reference.of(twin))
        frozen = list(twin.parameters())[2:]
        for t in range(6):
            backward(twin, t)
            for p in frozen if t < 3 else ():
                p.grad = None
            both.step()
        assert far(net, twin) == 0.0

    def test_a_state_loaded_before_they_are_attached(self):
        net, opt, _ = make(penalties="l1 and average")
        train(net, opt, 0, 7)
        reference = Reference.of(make_net(torch.float32))
        for pretrained in (True, False):
            other = torch.optim.AdamW(copy.deepcopy(net).named_parameters())
            other.load_state_dict(opt.state_dict())
            if pretrained:
                attached = attach_penalties(other, [L2SP(1.0)], reference)
                assert attached.updates == 7
            else:
                with pytest.raises(ValueError, match="made with other anchors"):
                    attach_penalties(other, [L2SP(1.0)], Reference.of(net))


def test_only_plain_values_are_saved():
    net, opt, _ = make(penalties="l1 and average")
    train(net, opt, 0, 2)
    group = opt.state_dict()["param_groups"][0]
    assert group["penalty_updates"] == 2
    assert type(group["penalty_updates"]) is int
    assert len(group["penalty_fingerprint"].split()) == 6


def test_anchors_that_are_the_live_tensors_are_copied():
    net = make_net()
    opt = torch.optim.SGD(net.named_parameters(), lr=0.1)
    attached = attach_penalties(opt, [L2SP(1.0)], Reference(net.state_dict()))
    train(net, opt, 0, 3)
    assert attached.values()["L2SP"] > 0
