"""Stochastic rounding of bfloat16 parameters, by torch's operations."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import RecAdam
from holdfast._optim import backends as codec
from holdfast.anneal import Constant
from methods.problems import PATHS, backward, batch, far, make_net

SIZE = 4096
HALF = torch.bfloat16
STATES = [None, torch.float32, "8bit"]
QUARTER = 2.0**-10  # of the way from 1 to the next number below


def ones(**options):
    """A parameter of 1 that learns a quarter of the way to the next number at each update."""
    p = torch.nn.Parameter(torch.ones(SIZE, dtype=HALF))
    options = {"lr": QUARTER, "gamma": 0.0, "anneal": Constant(1.0)} | options
    return p, RecAdam([("p", p)], **options)


def step(p, opt, times=1, grad=1.0):
    for _ in range(times):
        p.grad = torch.full_like(p, grad)
        opt.step()


class TestRounding:
    @given(st.integers(0, 2**31 - 1), st.floats(-38, 38), st.booleans())
    def test_to_one_of_the_two_neighbours_with_the_odds_of_being_nearer(self, seed, power, turned):
        x = torch.tensor([(-1.0) ** turned * 10.0**power]).float().expand(SIZE).contiguous()
        y = codec.round_stochastically(x, codec.noise(seed, 0, SIZE) & 0xFFFF)
        assert y.dtype == HALF
        bits = x[:1].view(torch.int32)
        below = (bits & -65536).view(torch.float32).item()  # towards 0
        above = ((bits & -65536) + 65536).view(torch.float32).item()
        assert set(y.float().tolist()) <= {below, above}
        odds = (bits & 0xFFFF).item() / 65536
        assert (y.float() == above).double().mean().item() == pytest.approx(odds, abs=0.05)

    def test_numbers_that_bfloat16_has_stay(self):
        every = torch.arange(-(2**15), 2**15).to(torch.int16).view(HALF)
        for seed in range(5):
            y = codec.round_stochastically(every.float(), codec.noise(seed, 3, len(every)) & 0xFFFF)
            assert torch.equal(y.isnan(), every.isnan())
            assert torch.equal(y[~y.isnan()], every[~every.isnan()])


@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize("state_dtype", STATES, ids=str)
def test_small_updates_are_not_lost(path, state_dtype):
    options = {"state_dtype": state_dtype, **PATHS.get(path, {})}
    p, opt = ones(stochastic_rounding=True, **options)
    step(p, opt, 64)
    assert p.dtype == HALF
    assert p.double().mean().item() == pytest.approx(1 - 64 * QUARTER, abs=0.002)
    q, plain = ones(**options)
    step(q, plain, 64)
    assert (q == 1).all()  # to nearest they are


@pytest.mark.parametrize("state_dtype", STATES, ids=str)
@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_a_small_pull_is_not_lost(state_dtype, lam):
    pull, results = 2.0**-11, []
    for stochastic in (True, False):
        p, opt = ones(
            lr=1e-2, gamma=100 * pull / (1 - lam), anneal=Constant(lam), state_dtype=state_dtype,
            anchors={"p": torch.zeros(SIZE)}, stochastic_rounding=stochastic,
        )  # fmt: skip
        step(p, opt, 64, grad=0.0)
        results.append(p.double().mean().item())
    assert results == [pytest.approx((1 - pull) ** 64, abs=0.002), 1.0]


def test_the_pull_is_not_over_where_bfloat16_would_lose_it():
    """1 − λ is below what bfloat16 resolves, but not below what is resolved on average."""
    p, opt = ones(
        lr=1e-2, gamma=100.0, anneal=Constant(1 - 1e-4), anchors={"p": torch.zeros(SIZE)},
        stochastic_rounding=True, release=True,
    )  # fmt: skip
    step(p, opt, 100, grad=0.0)
    assert p.double().mean().item() == pytest.approx((1 - 1e-4) ** 100, abs=0.002)
    assert opt.distance() > 0  # and the anchors are still there


def test_weight_decay_is_not_lost():
    p, opt = ones(lr=1e-2, weight_decay=QUARTER / 1e-2, stochastic_rounding=True)
    step(p, opt, 64, grad=0.0)
    assert p.double().mean().item() == pytest.approx((1 - QUARTER) ** 64, abs=0.002)


@pytest.mark.parametrize("state_dtype", STATES, ids=str)
def test_the_same_at_each_run(state_dtype):
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # torch's generator has no part in it
        p, opt = ones(stochastic_rounding=True, state_dtype=state_dtype)
        step(p, opt, 5)
        torch.rand(seed)
        step(p, opt, 5)
        results.append(p.detach())
    assert torch.equal(*results)
    assert len(results[0].unique()) > 2


def test_it_draws_nothing_from_torchs_generator():
    p, opt = ones(stochastic_rounding=True, state_dtype="8bit")
    before = torch.get_rng_state()
    step(p, opt, 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize("state_dtype", STATES, ids=str)
def test_resume_to_the_bit(tmp_path, path, state_dtype):
    options = {"stochastic_rounding": True, "state_dtype": state_dtype, **PATHS.get(path, {})}
    p, opt = ones(**options)
    step(p, opt, 4)
    torch.save({"p": p.detach(), "opt": opt.state_dict()}, tmp_path / "run.pt")
    step(p, opt, 4)
    q, again = ones(**options)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    with torch.no_grad():
        q.copy_(saved["p"])
    again.load_state_dict(saved["opt"])
    step(q, again, 4)
    assert torch.equal(p, q)
    assert again.param_groups[0]["stochastic_rounding"] is True


def moved(p):
    return (p.detach() != 1).double()


def test_different_between_updates():
    drawn = []
    p, opt = ones(stochastic_rounding=True)
    for _ in range(6):
        with torch.no_grad():
            p.fill_(1.0)
        step(p, opt)
        drawn.append(moved(p))
    together = torch.corrcoef(torch.stack(drawn))
    assert (together - torch.eye(6)).abs().max() < 0.1
    assert torch.stack(drawn).mean(1).tolist() == [pytest.approx(0.25, abs=0.04)] * 6


@pytest.mark.parametrize("state_dtype", [None, "8bit"], ids=str)
def test_different_between_parameters(state_dtype):
    """Of one group, with anchors and without, and of several."""
    params = [torch.nn.Parameter(torch.ones(SIZE, dtype=HALF)) for _ in range(6)]
    named = [(str(i), p) for i, p in enumerate(params)]
    groups = [{"params": named[:4]}, {"params": named[4:5]}, {"params": named[5:]}]
    anchors = {str(i): torch.ones(SIZE) for i in (0, 1, 4, 5)}
    with pytest.warns(UserWarning, match="2 parameters have no anchor"):
        opt = RecAdam(
            groups, lr=QUARTER, gamma=0.0, anneal=Constant(0.999), anchors=anchors,
            state_dtype=state_dtype, stochastic_rounding=True,
        )  # fmt: skip
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    together = torch.corrcoef(torch.stack([moved(p) for p in params]))
    assert (together - torch.eye(6)).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_other_dtypes_are_left_alone(dtype, path):
    nets = []
    for stochastic in (False, True):
        net = make_net(dtype)
        opt = RecAdam(
            net.parameters(), lr=1e-2, gamma=10.0, eps=1e-4, anneal=Constant(0.5),
            stochastic_rounding=stochastic, **PATHS[path],
        )  # fmt: skip
        for t in range(5):
            backward(net, t)
            opt.step()
        nets.append(net)
    assert far(*nets) == 0.0
    assert far(nets[0], make_net(dtype)) > 0


def test_a_group_decides_for_itself():
    a, b = (torch.nn.Parameter(torch.ones(SIZE, dtype=HALF)) for _ in range(2))
    groups = [{"params": [a], "stochastic_rounding": True}, {"params": [b]}]
    opt = RecAdam(groups, lr=QUARTER, gamma=0.0, anneal=Constant(1.0))
    for p in (a, b):
        p.grad = torch.ones_like(p)
    opt.step()
    assert moved(a).any()
    assert not moved(b).any()


def test_float32_weights_beside_bfloat16_ones():
    values, results = torch.randn(300), []
    for halves in ([], [torch.nn.Parameter(torch.ones(300, dtype=HALF))]):
        p = torch.nn.Parameter(values.clone())
        opt = RecAdam(
            [p, *halves], lr=1e-2, gamma=5.0, anneal=Constant(0.5), stochastic_rounding=True
        )
        for q in (p, *halves):
            q.grad = torch.ones_like(q)
        opt.step()
        results.append(p.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("state_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("grad", [1.0, math.inf, -math.inf, math.nan])
def test_infinities_and_nan_survive(state_dtype, grad):
    largest = torch.finfo(HALF).max
    values = torch.tensor([math.inf, -math.inf, math.nan, 1.0, -1.0, 0.0, largest, -largest])
    results = []
    for stochastic in (True, False):
        p = torch.nn.Parameter(values.to(HALF))
        opt = RecAdam(
            [{"params": [p], "anchored": False}], lr=1e-3, state_dtype=state_dtype,
            stochastic_rounding=stochastic,
        )  # fmt: skip
        p.grad = torch.ones_like(p)
        p.grad[3] = grad
        opt.step()
        results.append(p.detach().float())
    ours, plain = results
    assert torch.equal(ours.isnan(), plain.isnan())
    assert torch.equal(ours.isinf(), plain.isinf())
    assert torch.equal(ours[ours.isinf()], plain[plain.isinf()])
    assert ours[3].isnan().item() == (not math.isfinite(grad))


@pytest.mark.parametrize("layout", ["transposed", "channels last", "0-dim", "empty"])
def test_layouts(layout):
    start = {
        "transposed": torch.ones(64, 63).t(),
        "channels last": torch.ones(9, 7, 8, 8).to(memory_format=torch.channels_last),
        "0-dim": torch.ones(()),
        "empty": torch.ones(0, 3),
    }[layout]
    p = torch.nn.Parameter(start.to(HALF))
    opt = RecAdam([p], lr=QUARTER, gamma=0.0, anneal=Constant(1.0), stochastic_rounding=True)
    step(p, opt, 64)
    assert p.stride() == start.stride()
    if p.numel() > 1:
        assert p.double().mean().item() == pytest.approx(1 - 64 * QUARTER, abs=0.002)
    assert (p <= 1).all()


def test_it_learns_where_rounding_to_nearest_stands_still():
    """A learning rate below what bfloat16 resolves."""
    losses = {}
    for name, dtype, stochastic in (
        ("exact", torch.float32, False), ("random", HALF, True), ("nearest", HALF, False),
    ):  # fmt: skip
        net = make_net(dtype)
        opt = RecAdam(
            net.parameters(), lr=1e-4, gamma=0.0, anneal=Constant(1.0), state_dtype=torch.float32,
            stochastic_rounding=stochastic,
        )  # fmt: skip
        for t in range(400):
            backward(net, t)
            opt.step()
        pairs = [batch(5000 + i) for i in range(10)]
        losses[name] = sum((net.double()(x) - y).square().mean().item() for x, y in pairs) / 10
    assert losses["exact"] < 0.97 * losses["nearest"]
    gained = (losses["nearest"] - losses["random"]) / (losses["nearest"] - losses["exact"])
    assert 0.7 < gained < 1.3


def test_a_checkpoint_from_before_there_was_stochastic_rounding():
    p, opt = ones()
    step(p, opt)
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        del group["stochastic_rounding"]
    q, again = ones()
    again.load_state_dict(saved)
    step(q, again)
    assert again.recall_state()["updates"] == 2
    assert again.param_groups[0]["stochastic_rounding"] is False


def test_rounding_may_be_switched_on_during_a_run():
    p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = RecAdam([p], lr=1e-5, gamma=0.0, anneal=Constant(1.0), foreach=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert (p == 1).all()  # the step is below bfloat16's precision
    optimizer.param_groups[0]["stochastic_rounding"] = True
    for _ in range(20):
        optimizer.step()
    assert (p < 1).any()
