"""What penalties do to tensors: what is rounded, what is kept, what is noticed."""

from dataclasses import dataclass

import pytest
import torch

from holdfast import EWC, L1SP, L2SP, Reference
from holdfast.optim import Penalty, attach_penalties
from methods.problems import backward, make_net


def test_what_changes_between_updates_is_noticed():
    """Gradients that come and go, other tensors in a group, weights that are moved or cast."""
    net, beta, lr = make_net(), 2.0, 0.05
    star = {n: p.detach().clone() for n, p in net.named_parameters()}
    named = list(net.named_parameters())
    opt = torch.optim.SGD([{"params": named[:4]}, {"params": named[4:], "lr": 0.02}], lr=lr)
    attach_penalties(opt, [L2SP(beta)], Reference(star))
    for t in range(6):
        backward(net, t)
        if t % 2:
            net.head.weight.grad = None
        if t == 2:
            net.body[0].weight.data = net.body[0].weight.data.clone()
        if t == 3:
            net.body[2].bias.data = net.body[2].bias.data.float()
            net.body[2].bias.grad = net.body[2].bias.grad.float()
        if t == 4:
            net.body[2].weight = torch.nn.Parameter(net.body[2].weight.detach() + 0.1)
            opt.param_groups[0]["params"][2] = net.body[2].weight
            backward(net, t)
            opt.param_groups[1]["lr"] = 0.03
        expected = {}
        for n, p in net.named_parameters():
            rate = opt.param_groups[1]["lr"] if n.startswith("head") else lr
            if p.grad is None:
                expected[n] = p.detach().clone()
                continue
            moved = p.detach() - rate * p.grad
            expected[n] = moved - rate * beta * (moved - star[n])
        opt.step()
        for n, p in net.named_parameters():
            room = 1e-12 if p.dtype == torch.float64 else 1e-6
            assert torch.allclose(p.double(), expected[n].double(), rtol=0, atol=room), (t, n)
        net.body[2].bias.data = net.body[2].bias.data.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "penalties", [[L2SP(2.0)], [EWC(2.0)], [L2SP(2.0), EWC(1.0)], [L1SP(0.1), EWC(2.0)]], ids=str
)
def test_half_precision_is_rounded_once(penalties, dtype):
    """All penalties of an update together, whatever the anchors are in."""
    p = torch.nn.Parameter(torch.randn(5000).to(dtype))
    star, weight = torch.randn(5000), 2 * torch.rand(5000)
    opt = torch.optim.SGD([("p", p)], lr=0.1)
    attach_penalties(opt, penalties, Reference({"p": star}), Reference({"p": weight}))
    exact = p.detach().double()
    for penalty in penalties:
        d = exact - star.double()
        if isinstance(penalty, L1SP):
            exact = star + d.sign() * (d.abs() - 0.1 * penalty.beta).clamp(min=0)
        else:
            exact = exact - 0.1 * penalty.beta * (weight if penalty.weighted else 1) * d
    p.grad = torch.zeros_like(p)
    opt.step()
    assert float((p.detach() == exact.to(dtype)).float().mean()) > 0.995  # but for ties in float32
    torch.testing.assert_close(p.detach(), exact.to(dtype), atol=1e-7, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("penalty", [L2SP(3.0), EWC(3.0), L1SP(0.2)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_not_moved_keeps_its_bits(penalty, dtype):
    star = torch.randn(4000).to(dtype)
    p = torch.nn.Parameter(star.clone())
    weight = torch.rand(4000)
    if penalty.weighted:
        p.data += torch.randn(4000).to(dtype)
        weight[::2] = 0.0
    else:
        p.data[1::2] += 1.0
    before = p.detach().clone()
    opt = torch.optim.SGD([("p", p)], lr=0.1)
    attach_penalties(opt, [penalty], Reference({"p": star}), Reference({"p": weight}))
    p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.equal(p[::2], before[::2])
    assert float((p[1::2] == before[1::2]).float().mean()) < 0.2


def test_a_penalty_of_ones_own():
    """Which says its move, and what it adds to the gradient; or nothing."""

    @dataclass(frozen=True)
    class Halve(Penalty):
        def move(self, difference, importance, lr):
            return difference / 2

    p = torch.nn.Parameter(torch.full((3,), 9.0))
    opt = torch.optim.SGD([("p", p)], lr=0.5)
    given = [L2SP(1.0), Halve(), L2SP(0.5)]
    attach_penalties(opt, given, Reference({"p": torch.ones(3)}))
    p.grad = torch.zeros(3)
    opt.step()
    assert p.tolist() == [1 + 8 * 0.5 * 0.5 * 0.75] * 3
    assert not Halve().gradient(torch.ones(3), 1.0).any()
    with pytest.raises(NotImplementedError, match="Penalty defines neither rate nor move"):
        Penalty().move(torch.ones(3), 1.0, 0.1)
