"""RecAdam against its literal float64 twin, on every path."""

import copy
import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from golden.recadam import Twin, sigmoid_lambda
from holdfast import RecAdam, Reference, random_init
from holdfast.anneal import Constant, Sigmoid
from matrices import sampled
from methods.problems import PATHS, backward, far, make_net

STEPS = 300
BODY = {"lr": 3e-3, "gamma": 40.0, "k": 0.05, "t0": 120.0}
BODY_2 = {"lr": 1e-3, "gamma": 90.0, "k": 0.2, "t0": 60.0}
HEAD = {"lr": 1e-2, "gamma": 0.0, "k": 0.0, "t0": 0.0}


def schedule(t):
    return 1 - t / (2 * STEPS)


def group_settings(name):
    if name.startswith("head"):
        return HEAD
    return BODY if name.startswith("body.0") else BODY_2


def make_groups(net, wd):
    """Three groups: two of the body with their own settings, and a head without anchors."""
    groups = []
    for prefix, s in (("body.0", BODY), ("body.2", BODY_2), ("head", HEAD)):
        group = {"params": [(n, p) for n, p in net.named_parameters() if n.startswith(prefix)]}
        group |= {"lr": s["lr"], "weight_decay": wd}
        if prefix == "head":
            group["anchored"] = False
        else:
            group |= {"gamma": s["gamma"], "anneal": Sigmoid(s["k"], s["t0"])}
        groups.append(group)
    return groups


def run_ours(dtype, path, wd, start):
    net = make_net(dtype)
    anchors = Reference.of(net)
    if start == "RI":
        random_init(net, seed=7)
    opt = RecAdam(make_groups(net, wd), anchors=anchors, **PATHS[path])
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    for t in range(STEPS):
        backward(net, t)
        opt.step()
        scheduler.step()
    return net


def run_twin(wd, start, dtype=torch.float64):
    """``dtype``: in which the starting weights are drawn; all arithmetic is float64."""
    net = make_net(dtype)
    anchors = {n: p.detach().clone().double() for n, p in net.named_parameters()}
    if start == "RI":
        random_init(net, seed=7)
    net = net.double()
    twins = {
        n: Twin(p.detach().clone(), None if n.startswith("head") else anchors[n])
        for n, p in net.named_parameters()
    }
    for t in range(STEPS):
        backward(net, t)
        for n, p in net.named_parameters():
            s = group_settings(n)
            lam = sigmoid_lambda(t + 1, s["k"], s["t0"])
            twins[n].update(p.grad, lr=s["lr"] * schedule(t), lam=lam, gamma=s["gamma"], wd=wd)
            p.data.copy_(twins[n].theta)
    return net


def run_adamw(dtype, path, wd, start):
    net = make_net(torch.float32)
    if start == "RI":
        random_init(net, seed=7)
    net = net.to(dtype)
    groups = [
        {k: v for k, v in g.items() if k in ("params", "lr", "weight_decay")}
        for g in make_groups(net, wd)
    ]
    opt = torch.optim.AdamW(groups, **PATHS[path])
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    for t in range(STEPS):
        backward(net, t)
        opt.step()
        scheduler.step()
    return net


RUNS = list(itertools.product(PATHS, [0.0, 0.1], ["PI", "RI"]))


@pytest.mark.parametrize(
    ("path", "wd", "start"), sampled(RUNS, [r for r in RUNS if r[1:] in ((0.0, "PI"), (0.1, "RI"))])
)
def test_float64_follows_the_twin(path, wd, start):
    ours, twin = run_ours(torch.float64, path, wd, start), run_twin(wd, start)
    worst = max(
        (a - b).abs().max().item()
        for a, b in zip(ours.parameters(), twin.parameters(), strict=True)
    )
    assert worst <= 1e-12
    assert far(ours, make_net()) > 0.1  # it went somewhere


@pytest.mark.parametrize(
    ("path", "wd", "start"), sampled(RUNS, [r for r in RUNS if r[1:] == (0.1, "RI")])
)
def test_float32_is_as_exact_as_adamw(path, wd, start):
    ours = far(run_ours(torch.float32, path, wd, start), run_twin(wd, start, torch.float32))
    torchs = far(
        run_adamw(torch.float32, path, wd, start), run_adamw(torch.float64, path, wd, start)
    )
    assert ours <= 2 * torchs


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NEUTRAL = list(itertools.product(PATHS, DTYPES, [False, True]))


@pytest.mark.parametrize(
    ("path", "dtype", "maximize"),
    sampled(NEUTRAL, [n for n in NEUTRAL if n[2] == (n[1] == torch.float32)]),
)
def test_a_neutral_pull_is_adamw_to_the_bit(path, dtype, maximize):
    nets = [make_net(dtype), make_net(dtype)]
    # float16 cannot hold Adam's default eps.
    eps = 1e-4 if dtype == torch.float16 else 1e-8
    shared = {"lr": 1e-3, "eps": eps, "weight_decay": 0.05, "maximize": maximize, **PATHS[path]}
    opts = [
        RecAdam(nets[0].parameters(), gamma=0.0, anneal=Constant(lam=1.0), **shared),
        torch.optim.AdamW(nets[1].parameters(), **shared),
    ]
    for t in range(50):
        for net, opt in zip(nets, opts, strict=True):
            backward(net, t)
            opt.step()
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(a, b)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(opts[0].state[a][key], opts[1].state[b][key])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gamma", [0.0, 50.0])
def test_lambda_one_is_adamw_whatever_gamma(path, gamma):
    nets = [make_net(torch.float32), make_net(torch.float32)]
    ours = RecAdam(nets[0].parameters(), lr=1e-3, gamma=gamma, anneal=Constant(1.0), **PATHS[path])
    torchs = torch.optim.AdamW(nets[1].parameters(), lr=1e-3, weight_decay=0.0, **PATHS[path])
    for t in range(20):
        for net, opt in zip(nets, (ours, torchs), strict=True):
            backward(net, t)
            opt.step()
    assert far(*nets) == 0.0


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=4),
    dtype=st.sampled_from(list(TOLERANCE)),
    state_dtype=st.sampled_from([None, torch.float32]),
    path=st.sampled_from(list(PATHS)),
    lr=st.floats(1e-5, 0.1),
    gamma=st.floats(0.0, 10.0),
    k=st.floats(0.0, 5.0),
    t0=st.floats(0.0, 20.0),
    wd=st.floats(0.0, 0.5),
    beta1=st.floats(0.0, 0.99),
    beta2=st.floats(0.5, 0.9999),
    seed=st.integers(0, 2**16),
)
def test_any_shape_setting_and_dtype(
    shape, dtype, state_dtype, path, lr, gamma, k, t0, wd, beta1, beta2, seed
):
    # Second moments of small gradients are 0 in float16, in torch's AdamW too: there it is compared
    # to the bit, above.
    assume(dtype != torch.float16 or state_dtype is not None)
    generator = torch.Generator().manual_seed(seed)
    p = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
    anchor = torch.randn(shape, generator=generator).to(dtype)
    twin = Twin(p.detach().double().clone(), anchor.double())
    opt = RecAdam(
        [("p", p)], lr=lr, gamma=gamma, anneal=Sigmoid(k, t0), betas=(beta1, beta2), eps=1e-3,
        weight_decay=wd, anchors={"p": anchor}, state_dtype=state_dtype, **PATHS[path],
    )  # fmt: skip
    for t in range(1, 9):
        g = torch.randn(shape, generator=generator).to(dtype)
        p.grad = g.clone()
        opt.step()
        twin.update(
            g.double(), lr=lr, lam=sigmoid_lambda(t, k, t0), gamma=gamma, beta1=beta1, beta2=beta2,
            eps=1e-3, wd=wd,
        )  # fmt: skip
    assert p.dtype == dtype
    tolerance = max(TOLERANCE[dtype], TOLERANCE[state_dtype or dtype])
    assert torch.allclose(p.double(), twin.theta, rtol=tolerance, atol=tolerance)


def test_moments_in_float32_beat_moments_in_bfloat16():
    """What ``state_dtype`` is for: bf16 parameters whose moments do not stall."""
    twin = Twin(torch.ones(100).double(), torch.ones(100).double())
    nets = {
        dtype: torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
        for dtype in (None, torch.float32)
    }
    opts = {
        d: RecAdam([p], lr=0.02, gamma=0.0, anneal=Constant(1.0), state_dtype=d)
        for d, p in nets.items()
    }
    for t in range(200):
        g = torch.randn(100, generator=torch.Generator().manual_seed(t)).bfloat16() + 0.1
        twin.update(g.double(), lr=0.02, lam=1.0, gamma=0.0)
        for d, p in nets.items():
            p.grad = g.clone()
            opts[d].step()
    moment = {d: opts[d].state[p]["exp_avg_sq"] for d, p in nets.items()}
    error = {d: (v.double() - twin.v).norm().item() for d, v in moment.items()}
    assert moment[torch.float32].dtype == torch.float32
    assert error[torch.float32] < 0.01 * error[None]


def test_the_bias_correction_is_the_parameters_own_and_lambda_is_global():
    early, late = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    anneal = Sigmoid(k=0.5, t0=6)
    opt = RecAdam([("early", early), ("late", late)], lr=0.01, gamma=20.0, anneal=anneal)
    twins = [Twin(torch.ones(3).double(), torch.ones(3).double()) for _ in range(2)]
    for t in range(1, 13):
        early.grad = torch.full((3,), 0.3, dtype=torch.float64)
        late.grad = early.grad.clone() if t > 5 else None
        before = late.detach().clone()
        opt.step()
        for twin, p in zip(twins, (early, late), strict=True):
            if p.grad is not None:
                twin.update(p.grad, lr=0.01, lam=sigmoid_lambda(t, 0.5, 6), gamma=20.0)
        assert t > 5 or torch.equal(late, before)
    assert torch.allclose(early, twins[0].theta, atol=1e-14)
    assert torch.allclose(late, twins[1].theta, atol=1e-14)
    assert opt.state[late]["step"] == 7
    assert opt.recall_state()["updates"] == 12


def test_a_step_without_gradients_counts_nothing():
    net = make_net()
    opt = RecAdam(net.parameters())
    before = copy.deepcopy(net)
    opt.step()
    assert far(net, before) == 0
    assert opt.recall_state()["updates"] == 0
