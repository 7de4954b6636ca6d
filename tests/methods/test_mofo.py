import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from golden.mofo import Twin
from holdfast.methods.mofo import largest
from holdfast.optim import MoFO
from methods.problems import PATHS, backward, far, make_net


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wd", [0.0, 0.1])
@pytest.mark.parametrize("fraction", [0.05, 0.15, 0.5, 1.0])
def test_float64_follows_the_twin(path, wd, fraction):
    net = make_net()
    named = dict(net.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if "body" in n]},
        {"params": [p for n, p in named.items() if "head" in n], "lr": 3e-2, "fraction": 0.3},
    ]
    opt = MoFO(groups, lr=1e-2, fraction=fraction, weight_decay=wd, **PATHS[path])
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 60)
    twins = {n: Twin(p.detach().clone()) for n, p in named.items()}
    for t in range(60):
        backward(net, t)
        rates = [group["lr"] for group in opt.param_groups]
        opt.step()
        for n, p in named.items():
            lr, share = (rates[1], 0.3) if "head" in n else (rates[0], fraction)
            twins[n].update(p.grad, lr=lr, fraction=share, wd=wd)
        scheduler.step()
    for n, p in named.items():
        assert torch.allclose(p, twins[n].theta, rtol=0, atol=1e-12), n


@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.15, 0.5, 0.999])
def test_exactly_so_many_coordinates_move(fraction):
    net = make_net(torch.float32)
    opt = MoFO(net.parameters(), lr=1e-2, fraction=fraction, weight_decay=0.1)
    for t in range(5):
        before = copy.deepcopy(net)
        backward(net, t)
        opt.step()
        for p, old in zip(net.parameters(), before.parameters(), strict=True):
            moved = int((p != old).sum())
            assert moved == (p.numel() if p.dim() == 1 else max(1, round(fraction * p.numel())))


@given(
    values=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=30),
    share=st.floats(0.01, 1.0),
)
def test_ties_go_to_the_lowest_index(values, share):
    k = max(1, round(share * len(values)))
    expected = sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])
    assert largest(torch.tensor(values), k).nonzero().flatten().tolist() == expected


def test_moments_are_kept_for_what_does_not_move():
    net, other = make_net(), make_net()
    opt, adam = MoFO(net.parameters(), fraction=0.1), torch.optim.AdamW(other.parameters())
    backward(net, 0)
    backward(other, 0)
    opt.step()
    adam.step()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(opt.state[p]["exp_avg"], adam.state[q]["exp_avg"])


def test_resume_to_the_bit(tmp_path):
    def make():
        net = make_net(torch.float32)
        return net, MoFO(net.named_parameters(), lr=1e-2, fraction=0.2)

    (net, opt), (other, again) = make(), make()
    for t in range(5):
        backward(net, t)
        opt.step()
    torch.save([net.state_dict(), opt.state_dict()], tmp_path / "s.pt")
    weights, state = torch.load(tmp_path / "s.pt", weights_only=True)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for n, o in ((net, opt), (other, again)):
        for t in range(5, 10):
            backward(n, t)
            o.step()
    assert far(net, other) == 0.0


@pytest.mark.parametrize("bad", [0.0, -0.1, 1.5, math.nan, "half"])
def test_refused(bad):
    net = make_net()
    with pytest.raises((ValueError, TypeError), match="fraction must"):
        MoFO(net.parameters(), fraction=bad)
    named = list(net.parameters())
    opt = MoFO(named[:2])
    with pytest.raises((ValueError, TypeError), match="fraction must"):
        opt.add_param_group({"params": named[2:], "fraction": bad})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("broken", [1, 40, 100])
def test_a_nan_gradient_shows_in_the_weights(path, broken):
    p = torch.nn.Parameter(torch.zeros(10, 10, dtype=torch.float64))
    opt, twin = MoFO([p], lr=0.1, fraction=0.15, **PATHS[path]), Twin(p.detach().clone())
    for t in range(6):
        p.grad = torch.randn(10, 10, dtype=p.dtype, generator=torch.Generator().manual_seed(t))
        if t == 1:
            p.grad.view(-1)[:broken] = torch.nan
        opt.step()
        twin.update(p.grad, lr=0.1, fraction=0.15)
    assert int(p.isnan().sum()) == min(broken, 15)
    torch.testing.assert_close(p.detach(), twin.theta, rtol=0, atol=1e-12, equal_nan=True)
