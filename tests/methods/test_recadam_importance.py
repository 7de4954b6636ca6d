"""RecAdam with a pull that is weighted by importance: against the twin, on every path."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from golden.recadam import Twin, sigmoid_lambda
from holdfast import RecAdam, Reference
from holdfast._optim.backends import pull
from holdfast.anneal import Constant, Sigmoid
from methods.problems import PATHS, backward, far, make_net

OPTIONS = {"lr": 1e-2, "gamma": 20.0, "anneal": Sigmoid(0.1, 20)}


def importance_of(net, without=()):
    """Heavy-tailed, as real ones are: some coordinates are clamped, some hardly pulled."""
    generator = torch.Generator().manual_seed(3)
    found = {
        n: torch.randn(p.shape, generator=generator, dtype=torch.float64).mul(2).exp()
        for n, p in net.named_parameters()
    }
    return {n: f for n, f in found.items() if not n.startswith(tuple(without) or "-")}


def train(net, opt, start, stop):
    for t in range(start, stop):
        backward(net, t)
        opt.step()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wd", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
def test_float64_follows_the_twin(path, wd, maximize):
    """Some parameters with an importance, some without, and a head without anchors."""
    net = make_net()
    importance = importance_of(net, without=["body.2"])
    named = list(net.named_parameters())
    groups = [
        {"params": named[:3], "weight_decay": wd},
        {"params": named[3:4], "lr": 2e-2, "weight_decay": wd},
        {"params": named[4:], "anchored": False, "weight_decay": wd},
    ]
    opt = RecAdam(
        groups, importance=importance, anchors=Reference.of(net), maximize=maximize, **OPTIONS,
        **PATHS[path],
    )  # fmt: skip
    twins = {n: Twin(p.detach().clone(), None if "head" in n else p.detach()) for n, p in named}
    for twin in twins.values():
        twin.anchor = None if twin.anchor is None else twin.anchor.clone()
    shares = []
    for t in range(1, 61):
        backward(net, t)
        opt.step()
        lam = sigmoid_lambda(t, 0.1, 20)
        for i, (n, p) in enumerate(named):
            lr = 2e-2 if i == 3 else 1e-2
            F = importance.get(n, 1.0)  # noqa: N806
            g = -p.grad if maximize else p.grad
            twins[n].update(g, lr=lr, lam=lam, gamma=20.0, wd=wd, F=F)
            shares.append(float(torch.as_tensor(lr * (1 - lam) * 20.0 * F).max()))
    for n, p in named:
        assert torch.allclose(p, twins[n].theta, rtol=0, atol=1e-12), n
    assert max(shares) > 1  # some were clamped


@given(
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    state_dtype=st.sampled_from([None, torch.float32]),
    path=st.sampled_from(list(PATHS)),
    scale=st.floats(0.0, 1e6),
    lr=st.sampled_from([0.0, 1e-4, 1e-2]),
    seed=st.integers(0, 2**16),
)
def test_any_dtype_and_any_importance(dtype, state_dtype, path, scale, lr, seed):
    assume(dtype != torch.float16 or state_dtype is not None)
    generator = torch.Generator().manual_seed(seed)
    p = torch.nn.Parameter(torch.randn(5, generator=generator).to(dtype))
    anchor = torch.randn(5, generator=generator).to(dtype)
    importance = torch.rand(5, generator=generator) * scale
    twin = Twin(p.detach().double().clone(), anchor.double())
    opt = RecAdam(
        [("p", p)], lr=lr, gamma=10.0, anneal=Sigmoid(1.0, 3), eps=1e-3, anchors={"p": anchor},
        importance={"p": importance}, state_dtype=state_dtype, **PATHS[path],
    )  # fmt: skip
    for t in range(1, 6):
        g = torch.randn(5, generator=generator).to(dtype)
        p.grad = g.clone()
        opt.step()
        lam = sigmoid_lambda(t, 1.0, 3)
        twin.update(g.double(), lr=lr, lam=lam, gamma=10.0, eps=1e-3, F=importance.double())
    assert p.dtype == dtype
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5}.get(dtype, 3e-2)
    assert torch.allclose(p.double(), twin.theta, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("path", PATHS)
def test_ones_are_no_importance(path):
    nets = [make_net(), make_net()]
    ones = {n: torch.ones_like(p) for n, p in nets[0].named_parameters()}
    for net, importance in zip(nets, (ones, None), strict=True):
        opt = RecAdam(net.named_parameters(), importance=importance, **OPTIONS, **PATHS[path])
        train(net, opt, 0, 40)
    assert far(*nets) < 1e-14


def test_lambda_one_is_adamw_to_the_bit():
    nets = [make_net(torch.float32), make_net(torch.float32)]
    opts = (
        RecAdam(
            nets[0].named_parameters(), lr=1e-2, gamma=20.0, anneal=Constant(1.0),
            importance=importance_of(nets[0]),
        ),
        torch.optim.AdamW(nets[1].parameters(), lr=1e-2, weight_decay=0.0),
    )  # fmt: skip
    for net, opt in zip(nets, opts, strict=True):
        train(net, opt, 0, 10)
    assert far(*nets) == 0.0


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_pull_by_lists_and_by_tensor_rates(foreach, as_tensor):
    """What the CPU's steps do not reach: foreach operations, rates on the device."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        tuple(torch.randn(s, generator=generator, dtype=torch.float64) for _ in range(3))
        for s in ((3, 4), (5,), ())
    ]
    rows = [(p, a, f.exp()) for p, a, f in rows]
    expected = [p - (0.4 * f).clamp(max=1.0) * (p - a) for p, a, f in rows]
    c = torch.tensor(0.4, dtype=torch.float64) if as_tensor else 0.4
    pull(*(list(column) for column in zip(*rows, strict=True)), c, foreach=foreach)
    for (p, _, _), e in zip(rows, expected, strict=True):
        assert torch.allclose(p, e, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_compiled_and_with_a_tensor_for_lr(kind):
    torch._dynamo.reset()
    nets = [make_net(torch.float32), make_net(torch.float32)]
    importance = importance_of(nets[0])
    opts = [
        RecAdam(n.named_parameters(), importance=importance, **(OPTIONS | {"lr": lr}))
        for n, lr in zip(nets, (kind(1e-2), 1e-2), strict=True)
    ]
    step = torch.compile(opts[0].step, backend="eager")
    for t in range(12):
        backward(nets[0], t)
        step()
    train(nets[1], opts[1], 0, 12)
    assert far(*nets) < 1e-5
    torch._dynamo.reset()


class TestWhereItIsKept:
    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_copies_go_on_alike(self, how):
        net = make_net(torch.float32)
        opt = RecAdam(net.named_parameters(), importance=importance_of(net), **OPTIONS)
        train(net, opt, 0, 5)
        pair = (net, opt)
        other, again = (
            copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
        )
        train(net, opt, 5, 15)
        train(other, again, 5, 15)
        assert far(net, other) == 0.0

    def test_not_in_checkpoints_and_given_again_it_goes_on_to_the_bit(self, tmp_path):
        def make():
            net = make_net(torch.float32)
            return net, RecAdam(net.named_parameters(), importance=importance_of(net), **OPTIONS)

        (net, opt), (other, again) = make(), make()
        train(net, opt, 0, 7)
        torch.save([net.state_dict(), opt.state_dict()], tmp_path / "s.pt")
        weights, state = torch.load(tmp_path / "s.pt", weights_only=True)
        held = sum(t.numel() for s in state["state"].values() for t in s.values())
        assert held == 2 * sum(p.numel() for p in net.parameters()) + 6
        other.load_state_dict(weights)
        again.load_state_dict(state)
        train(net, opt, 7, 20)
        train(other, again, 7, 20)
        assert far(net, other) == 0.0

    def test_names_prefixes_identity_and_late_groups(self):
        net = make_net()
        importance = importance_of(net)
        prefixed = {f"module.{n}": f for n, f in importance.items()}
        bound = Reference(importance).bind(net)
        named = list(net.named_parameters())
        for params, given_ in ((named, prefixed), (list(net.parameters()), bound)):
            opt = RecAdam(params[:2], importance=given_, **OPTIONS)
            opt.add_param_group({"params": params[2:4]})
            opt.add_param_group({"params": params[4:], "anchored": False})
            found = [f for group in opt._anchors.importances[0] for f in group]
            for (n, _), f in zip(named[:4], found[:4], strict=True):
                assert torch.equal(f, importance[n])
            assert found[4:] == [None, None]

    def test_a_late_group_without_one_is_pulled_like_all(self):
        net = make_net()
        named = list(net.named_parameters())
        opt = RecAdam(named[:4], importance=importance_of(net, without=["head"]), **OPTIONS)
        opt.add_param_group({"params": named[4:]})
        assert opt._anchors.importances[0][1] == [None, None]


@pytest.mark.parametrize(
    ("importance", "error", "message"),
    [
        (
            {"foreign": torch.ones(2)},
            ValueError,
            "importance: no parameter has .*foreign",
        ),
        ({"head.bias": torch.ones(4)}, ValueError, r"importance: .*head\.bias is \(3,\)"),
        ({"head.bias": -torch.ones(3)}, ValueError, r"importance of head\.bias must be finite"),
        ({"head.bias": torch.full((3,), math.nan)}, ValueError, "must be finite and ≥ 0"),
        ([torch.ones(3)], TypeError, "importance must be a Reference"),
    ],
)
def test_refused(importance, error, message):
    net = make_net()
    with pytest.raises(error, match=message):
        RecAdam(net.named_parameters(), importance=importance)
