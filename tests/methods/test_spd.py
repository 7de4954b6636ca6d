import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from golden.spd import Twin
from holdfast import Recipe, Reference, Run
from holdfast.methods.spd import projection
from holdfast.optim import SPD
from methods.problems import PATHS, backward, batch, far, make_net


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("lam", "wd"), [(1.0, 0.0), (0.5, 0.1), (4.0, 0.0), (50.0, 0.1)])
def test_float64_follows_the_twin(path, lam, wd):
    net = make_net()
    named = dict(net.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named.items() if "body" in n]},
        {"params": [(n, p) for n, p in named.items() if "head" in n], "lr": 3e-2, "lam": 0.3},
    ]
    anchors = Reference.of(net, without="head.bias")
    opt = SPD(groups, lr=1e-2, lam=lam, weight_decay=wd, anchors=anchors, **PATHS[path])
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 60)
    twins = {n: Twin(p.detach().clone(), anchors.get(n)) for n, p in named.items()}
    projected = 0
    for t in range(60):
        backward(net, t)
        rates = [group["lr"] for group in opt.param_groups]
        opt.step()
        shares = []
        for n, p in named.items():
            lr, part = (rates[1], 0.3) if "head" in n else (rates[0], lam)
            shares.append(twins[n].update(p.grad, lr=lr, lam=part, wd=wd))
        assert opt.projected() * 5 == pytest.approx(sum(share > 0 for share in shares))
        projected += sum(share > 0 for share in shares)
        scheduler.step()
    assert projected > 5  # of 300
    for n, p in named.items():
        assert torch.allclose(p, twins[n].theta, rtol=0, atol=1e-12), n


def test_parameters_without_an_anchor_get_adamw_to_the_bit():
    nets = [make_net(torch.float32), make_net(torch.float32)]
    opts = (
        SPD(nets[0].named_parameters(), lr=1e-2, anchors={"head.bias": nets[0].head.bias}),
        torch.optim.AdamW(nets[1].parameters(), lr=1e-2, weight_decay=0.0),
    )
    for t in range(20):
        for net, opt in zip(nets, opts, strict=True):
            net.zero_grad()
            x, y = batch(t, torch.float32)
            (net.body(x).sum() + (nets[0].head.bias - y).square().mean()).backward()
            opt.step()
    assert all(
        torch.equal(p, q)
        for p, q in zip(nets[0].body.parameters(), nets[1].body.parameters(), strict=True)
    )


def push_out_then_in(p, opt, turns):
    """Gradients that lead away from the start, then one that points back to it."""
    for t in range(turns + 1):
        p.grad = torch.full_like(p, 1.0 if t < turns else -0.01)
        before = float((p.detach() - p.start).norm())
        opt.step()
    return before, float((p.detach() - p.start).norm())


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("turns", [1, 3, 8])
def test_one_projects_onto_the_distance_before_the_step(turns, maximize):
    p = torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3))
    p.start = p.detach().clone()
    before, after = push_out_then_in(p, SPD([p], lr=0.1, maximize=maximize), turns)
    assert after == pytest.approx(before, rel=1e-12)
    free = torch.nn.Parameter(p.start.clone())
    free.start = p.start
    before, after = push_out_then_in(free, SPD([free], lr=0.1, lam=0.0, maximize=maximize), turns)
    assert after > before * 1.02  # the momentum carries it on


numbers = st.floats(0.0, 1e3, allow_subnormal=False)


@given(
    c=st.floats(-10, 10), gamma=numbers, gamma_new=numbers, lam=st.floats(0, 100),
)  # fmt: skip
def test_a_projection_stays_between_the_step_and_the_anchor(c, gamma, gamma_new, lam):
    of = torch.float64
    values = (torch.tensor([x], dtype=of) for x in (c, gamma, gamma_new))
    share = projection(*values, lam).item()
    assert 0 <= share <= 1
    if c >= 0 or gamma_new <= gamma or lam == 0:
        assert share == 0
    kept = (1 - share) * gamma_new  # the distance of the result
    if lam <= 1:
        assert kept >= min(gamma, gamma_new) - 1e-12 * gamma_new  # as 1 − share is rounded
    if lam == 1 and c < 0:
        assert kept == pytest.approx(min(gamma, gamma_new), rel=1e-9, abs=1e-9)


@given(scale=st.floats(1e-3, 1e3))
def test_the_length_of_the_gradient_does_not_matter(scale):
    """Adam does not see it either, with ε = 0: clipping changes nothing."""
    ends = []
    for factor in (1.0, scale):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        opt = SPD([p], lr=0.1, eps=0.0)
        for g in ([1.0, 2.0, 3.0], [0.5, -1.0, 1.0], [-0.1, 0.2, -0.3]):
            p.grad = factor * torch.tensor(g, dtype=torch.float64)
            opt.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-9, atol=0)


def test_the_first_update_and_a_return_to_the_anchor_are_adamw():
    """Where the deviation is 0, nothing is divided by 0."""
    p = torch.nn.Parameter(torch.zeros(3))
    opt = SPD([p], lr=0.0)
    for _ in range(3):
        p.grad = torch.ones(3)
        opt.step()
    assert torch.equal(p, torch.zeros(3))
    assert opt.projected() == 0


def test_half_precision_is_rounded_once():
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    p.start = p.detach().clone()
    before, after = push_out_then_in(p, SPD([p], lr=0.1, foreach=True), 5)
    assert after == pytest.approx(before, rel=2**-7)


@pytest.mark.parametrize("broken", [1, 6])
def test_a_nan_gradient_shows_in_the_weights(broken):
    p = torch.nn.Parameter(torch.zeros(2, 3))
    opt = SPD([p], lr=0.1)
    for t in range(3):
        p.grad = torch.ones(2, 3)
        if t == 1:
            p.grad.view(-1)[:broken] = torch.nan
        opt.step()
    assert int(p.isnan().sum()) >= broken


def make(anchors=None, **options):
    net = make_net(torch.float32)
    anchors = Reference.of(net) if anchors is None else anchors
    return net, SPD(net.named_parameters(), lr=1e-2, anchors=anchors, **options)


def train(net, opt, steps):
    for t in steps:
        backward(net, t)
        opt.step()


@pytest.mark.parametrize("how", ["saved", "copied", "pickled"])
def test_resume_to_the_bit(how, tmp_path):
    net, opt = make()
    train(net, opt, range(5))
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
    for n, o in ((net, opt), (other, again)):
        train(n, o, range(5, 20))
    assert far(net, other) == 0.0
    assert far(net, make()[0]) > 0.1


def test_a_state_with_other_anchors_is_refused():
    net, opt = make()
    train(net, opt, range(2))
    tuned = SPD(net.named_parameters(), lr=1e-2)  # made after training: anchored at tuned weights
    before = copy.deepcopy(tuned.state_dict())
    with pytest.raises(ValueError, match="other anchors than this optimizer has"):
        tuned.load_state_dict(opt.state_dict())
    assert tuned.state_dict() == before
    adam = torch.optim.AdamW(net.parameters())
    with pytest.raises(ValueError, match="not SPD's"):
        tuned.load_state_dict(adam.state_dict())


def test_groups_that_come_later_are_anchored_as_well():
    net = make_net()
    opt = SPD(net.body.parameters(), lr=1e-2)
    train(net, opt, range(3))
    opt.add_param_group({"params": net.head.parameters(), "lam": 2.0})
    twins = {p: Twin(p.detach().clone(), p.detach().clone()) for p in net.head.parameters()}
    for t in range(30):
        backward(net, t)
        for p, twin in twins.items():
            twin.update(p.grad, lr=1e-2, lam=2.0)
        opt.step()
    assert all(torch.allclose(p, twin.theta, rtol=0, atol=1e-12) for p, twin in twins.items())


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, "much"])
def test_refused(bad):
    net = make_net()
    with pytest.raises((ValueError, TypeError), match="lam must"):
        SPD(net.parameters(), lam=bad)
    named = list(net.parameters())
    opt = SPD(named[:2])
    with pytest.raises((ValueError, TypeError), match="lam must"):
        opt.add_param_group({"params": named[2:], "lam": bad})
    assert len(opt.param_groups) == 1


def test_what_else_is_refused():
    net = make_net()
    with pytest.raises(TypeError, match="not the model"):
        SPD(net)
    with pytest.raises(ValueError, match="no parameter has an anchor"):
        SPD(net.named_parameters(), anchors={"another.name": torch.zeros(6)})
    words = torch.nn.Embedding(4, 2, sparse=True)
    opt = SPD(words.parameters())
    words(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        opt.step()


def test_with_lora_b_is_projected_toward_zero_and_a_is_free():
    pytest.importorskip("peft", reason="the peft extra is not installed")
    data = torch.utils.data.TensorDataset(batch(0, torch.float32)[0], torch.arange(16) % 3)
    options = {"lr": 1e-2, "task": "classification", "progress": False, "cache": False}
    run = Run(Recipe.preset("lora+spd"), make_net(torch.float32), data, **options)
    opt = run.make_optimizer(10)
    names = [name for group in opt.param_groups for name in group["param_names"]]
    anchors = [anchor for found in opt._anchors.values for anchor in found]
    for name, anchor in zip(names, anchors, strict=True):
        assert (anchor is not None) == ("lora_B" in name), name
        assert anchor is None or not anchor.any()
