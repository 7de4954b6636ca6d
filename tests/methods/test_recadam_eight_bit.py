"""RecAdam with moments in 8 bits, by torch's operations."""

import copy
import pickle

import pytest
import torch

from contract.setting import Stopped, Vectors, assert_same_bits, stop_at
from contract.setting import train as finetune
from holdfast import RecAdam, RecAdamUpdate, Recipe, Reference, Run
from holdfast._optim import backends as codec
from holdfast._optim.backends import BLOCK, SIGNED, UNSIGNED
from holdfast.anneal import Constant, Sigmoid
from methods.problems import PATHS, backward, batch, far, make_net


def make_run(dtype=torch.float32, path=None, seed=0, **options):
    """Several groups, one of them not anchored."""
    net = make_net(dtype, seed)
    named = list(net.named_parameters())
    groups = [
        {"params": named[:3], "weight_decay": 0.01},
        {"params": named[3:4], "gamma": 5.0, "anneal": Constant(0.7)},
        {"params": named[4:], "anchored": False, "lr": 2e-2},
    ]
    options = {"state_dtype": "8bit"} | options | PATHS.get(path, {})
    return net, RecAdam(groups, lr=1e-2, gamma=10.0, anneal=Sigmoid(0.1, 40), **options)


def train(net, opt, start, stop):
    for t in range(start, stop):
        backward(net, t)
        opt.step()


def loss_of(net):
    pairs = [batch(5000 + i) for i in range(20)]
    return sum((net.double()(x) - y).square().mean().item() for x, y in pairs) / len(pairs)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.soak)], ids=str
)
def test_it_learns_as_well(dtype):
    losses = {}
    for state_dtype in (torch.float32, "8bit"):
        found = []
        for seed in range(3):
            net, opt = make_run(dtype, seed=seed, state_dtype=state_dtype)
            train(net, opt, 0, 150)
            found.append(loss_of(net))
        losses[state_dtype] = sum(found) / len(found)
    before = sum(loss_of(make_net(seed=seed)) for seed in range(3)) / 3
    assert losses[torch.float32] < 0.6 * before
    assert losses["8bit"] < 1.15 * losses[torch.float32]


def test_slow_averages_move():
    """√v grows by a twentieth of a unit of its last place a step: rounded to nearest, it stays."""
    p = torch.nn.Parameter(torch.zeros(4096))
    opt = RecAdam([p], lr=1e-3, gamma=1.0, betas=(0.99, 0.999), state_dtype="8bit")
    for t in range(1, 401):
        p.grad = torch.ones(4096)
        p.grad[::BLOCK] = 2.0  # so that the others are not the largest of their block
        opt.step()
        if t in (50, 400):
            state = opt.state[p]
            m = codec.decode(state["exp_avg"], state["exp_avg_scale"], SIGNED)
            root = codec.decode(state["exp_avg_sq"], state["exp_avg_sq_scale"], UNSIGNED)
            ones = p.grad == 1
            assert m[ones].mean().item() == pytest.approx(1 - 0.99**t, rel=0.02)
            assert root[ones].mean().item() == pytest.approx((1 - 0.999**t) ** 0.5, rel=0.02)
            assert root[ones].square().mean().item() == pytest.approx(1 - 0.999**t, rel=0.06)


def test_memory():
    net = torch.nn.Sequential(torch.nn.Linear(700, 300), torch.nn.Linear(300, 500))
    opt = RecAdam(net.parameters(), state_dtype="8bit")
    net(torch.randn(4, 700)).sum().backward()
    opt.step()
    held = sum(t.nbytes for state in opt.state.values() for t in state.values())
    assert held <= 2.1 * sum(p.numel() for p in net.parameters())
    assert {s[k].dtype for s in opt.state.values() for k in ("exp_avg", "exp_avg_sq")} == {
        torch.uint8
    }


def assert_same_state(ours, theirs):
    for a, b in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype
            assert torch.equal(a[key], b[key])


@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize(
    ("dtype", "stochastic"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["float32", "bfloat16", "bfloat16 at random"],
)
@pytest.mark.parametrize("at", [0, 1, 6])
def test_resume_to_the_bit(tmp_path, path, dtype, stochastic, at):
    options = {"path": path, "stochastic_rounding": stochastic}
    net, opt = make_run(dtype, **options)
    train(net, opt, 0, at)
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, tmp_path / "run.pt")
    train(net, opt, at, 12)

    other, again = make_run(dtype, **options)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    other.load_state_dict(saved["net"])
    again.load_state_dict(saved["opt"])
    train(other, again, at, 12)
    assert far(net, other) == 0.0
    assert_same_state(opt, again)
    assert far(net, make_net(dtype)) > 0


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alike(how):
    run = make_run(torch.bfloat16, stochastic_rounding=True)
    train(*run, 0, 4)
    clone = copy.deepcopy(run) if how == "deepcopy" else pickle.loads(pickle.dumps(run))
    train(*run, 4, 9)
    assert far(run[0], clone[0]) > 0  # they share no weight
    train(*clone, 4, 9)
    assert far(run[0], clone[0]) == 0.0
    assert_same_state(run[1], clone[1])


@pytest.mark.parametrize("own", ["8bit", None, torch.float32], ids=str)
def test_other_moments_are_refused_and_nothing_changes(own):
    theirs = None if own == "8bit" else "8bit"
    net, opt = make_run(state_dtype=theirs)
    train(net, opt, 0, 2)
    saved = copy.deepcopy(opt.state_dict())
    other, mine = make_run(state_dtype=own)
    train(other, mine, 0, 3)
    before, values = copy.deepcopy(mine.state_dict()), copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=f"with state_dtype={theirs!r}$") as raised:
        mine.load_state_dict(saved)
    assert str(raised.value).count("\n") == 0
    after = mine.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, state in before["state"].items():
        assert all(torch.equal(state[key], after["state"][index][key]) for key in state)
    assert all(torch.equal(values[name], t) for name, t in other.state_dict().items())
    train(other, mine, 3, 4)  # and it can go on


def test_a_state_without_moments_suits_both():
    _, eight = make_run()
    _, full = make_run(state_dtype=None)
    eight.load_state_dict(full.state_dict())
    net, again = make_run()
    again.load_state_dict(eight.state_dict())
    train(net, again, 0, 1)


LAYOUTS = {
    "transposed": ((48, 21), lambda t: t.t()),
    "channels last": ((5, 3, 4, 9), lambda t: t.permute(0, 3, 1, 2)),
}


@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_are_of_elements_as_they_lie(layout, dtype, path):
    """A parameter that is laid out otherwise is the same one, seen otherwise: to the bit."""
    shape, turned = LAYOUTS[layout]
    start, anchor = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    params, optimizers = [], []
    for view in (lambda t: t, turned):
        p = torch.nn.Parameter(view(start.clone()))
        anchors = {"p": view(anchor).contiguous()}
        options = {"lr": 1e-2, "gamma": 5.0, "anneal": Constant(0.6), **PATHS.get(path, {})}
        params.append(p)
        optimizers.append(RecAdam([("p", p)], anchors=anchors, state_dtype="8bit", **options))
    assert not params[1].is_contiguous()
    for t in range(6):
        grad = torch.randn(shape).to(dtype)
        if t == 3:  # a checkpoint in between
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        for p, view, opt in zip(params, (lambda t: t, turned), optimizers, strict=True):
            # As they like; torch's fused Adam of the CPU would take the gradients of others.
            p.grad = view(grad) if path == "fused" else view(grad).contiguous()
            opt.step()
    assert optimizers[1].state[params[1]]["exp_avg"].stride() == params[1].stride()
    assert torch.equal(params[1], turned(params[0]))
    assert not torch.equal(params[0], start)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (257,)], ids=str)
def test_sizes(shape):
    p = torch.nn.Parameter(torch.ones(shape))
    plain = torch.nn.Parameter(torch.ones(shape))
    steps = [
        RecAdam([p], lr=1e-2, gamma=1.0, anneal=Constant(0.5), state_dtype="8bit"),
        RecAdam([plain], lr=1e-2, gamma=1.0, anneal=Constant(0.5)),
    ]
    for _ in range(5):
        for q, opt in zip((p, plain), steps, strict=True):
            q.grad = torch.full(shape, 2.0)
            opt.step()
    torch.testing.assert_close(p, plain, rtol=0, atol=1e-4)
    assert p.numel() == 0 or (p < 0.99).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_without_gradients_nothing_is_rounded(dtype):
    """The pull, with importance and weight decay, is that of other moments to the bit."""
    values, importance = torch.randn(3, 700).to(dtype), 5 * torch.rand(3, 700)
    results = []
    # In float32 or wider, and rounded once at the end.
    for state_dtype in ("8bit", torch.promote_types(dtype, torch.float32)):
        p = torch.nn.Parameter(values.clone())
        opt = RecAdam(
            [("p", p)], lr=1e-2, gamma=30.0, anneal=Constant(0.4), weight_decay=0.1,
            anchors={"p": torch.ones(3, 700)}, importance={"p": importance},
            state_dtype=state_dtype, foreach=False, fused=False,
        )  # fmt: skip
        for _ in range(3):
            p.grad = torch.zeros_like(p)
            opt.step()
        results.append(p.detach())
    assert torch.equal(*results)
    assert not torch.equal(results[0], values)


def test_float64_weights_keep_their_digits():
    p = torch.nn.Parameter(torch.full((300,), 1 / 3, dtype=torch.float64))
    opt = RecAdam([p], lr=1e-12, gamma=1.0, anneal=Constant(1.0), state_dtype="8bit")
    p.grad = torch.ones_like(p)
    opt.step()
    assert (1 / 3 - p).abs().max().item() == pytest.approx(1e-12, rel=0.15, abs=0)


def test_an_importance_weighs_the_pull():
    p = torch.nn.Parameter(torch.ones(600))
    importance = torch.tensor([0.0, 1.0, 1e6]).repeat(200)
    opt = RecAdam(
        [("p", p)], lr=1e-2, gamma=10.0, anneal=Constant(0.0), anchors={"p": torch.zeros(600)},
        importance={"p": importance}, state_dtype="8bit",
    )  # fmt: skip
    p.grad = torch.randn(600)
    opt.step()
    torch.testing.assert_close(p.detach().view(-1, 3), torch.tensor([[1.0, 0.9, 0.0]] * 200))


def test_what_is_not_anchored_is_adamw_as_exactly_as_8_bits_are():
    p, q = (torch.nn.Parameter(torch.zeros(2000)) for _ in range(2))
    ours = RecAdam([{"params": [p], "anchored": False}], lr=1e-2, state_dtype="8bit")
    adamw = torch.optim.AdamW([q], lr=1e-2, weight_decay=0.0)
    moved = torch.zeros(2000)
    for _ in range(30):
        p.grad = torch.randn(2000) + 0.5
        q.grad = p.grad.clone()
        before = q.detach().clone()
        ours.step(), adamw.step()
        moved += (q.detach() - before).abs()
    assert (p - q).abs().mean() < 0.06 * moved.mean()
    assert (p - q).mean().abs() < 0.003 * moved.mean()  # to neither side


def test_noise_differs_between_parameters_and_updates():
    """Anchored ones and others in one group, and in two groups: each is rounded on its own."""
    values, grads = torch.zeros(2000), torch.randn(2, 2000)
    params = [torch.nn.Parameter(values.clone()) for _ in range(4)]
    named = [(str(i), p) for i, p in enumerate(params)]
    groups = [{"params": named[:3]}, {"params": named[3:]}]
    anchors = dict.fromkeys(("0", "1", "3"), values)
    with pytest.warns(UserWarning, match="1 parameters have no anchor"):
        opt = RecAdam(groups, lr=1e-3, gamma=0.0, anchors=anchors, state_dtype="8bit")
    seen = []
    for grad in grads:
        for p in params:
            p.grad = grad.clone()
        opt.step()
        seen.append([opt.state[p]["exp_avg"].clone() for p in params])
    for codes in seen:
        for i, a in enumerate(codes):
            assert not any(torch.equal(a, b) for b in codes[:i]), i


def test_parameters_that_join_later():
    net, opt = make_run()
    plain_net, plain = make_run(state_dtype=None)
    for t in range(8):
        for n, o in ((net, opt), (plain_net, plain)):
            backward(n, t)
            if t < 5:
                n.body[0].weight.grad = None
            o.step()
    assert opt.state[net.body[0].weight]["step"] == 3
    assert far(net, plain_net) < 0.1 * far(plain_net, make_net())


class TestInARecipe:
    def test_it_is_made_of_it(self):
        recipe = Recipe(update=RecAdamUpdate(eight_bit=True))
        assert Recipe.from_yaml(recipe.to_yaml()) == recipe
        run = Run(
            recipe,
            Vectors.make_model(),
            Vectors.make_data(),
            lr=0.01,
            task="classification",
            progress=False,
        )
        opt = run.make_optimizer(10)
        assert opt.state_dtype == "8bit"
        plain = Run(
            Recipe(update=RecAdamUpdate()), Vectors.make_model(), Vectors.make_data(), lr=0.01,
            task="classification", progress=False,
        )  # fmt: skip
        assert plain.make_optimizer(10).state_dtype is None

    @pytest.mark.parametrize("bad", [1, "yes", None, "8bit"])
    def test_other_values_are_refused(self, bad):
        with pytest.raises(TypeError, match="eight_bit must be True or False"):
            RecAdamUpdate(eight_bit=bad)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    def test_it_trains_about_as_with_full_moments(self, dtype):
        nets = [
            finetune(
                Recipe(update=RecAdamUpdate(t0=0.1, eight_bit=eight_bit)),
                Vectors.make_model(dtype, dropout=0.0), max_updates=20,
            )
            for eight_bit in (False, True)
        ]  # fmt: skip
        assert 0 < far(*nets) < 0.2 * far(nets[0], Vectors.make_model(dtype))
        assert {p.dtype for p in nets[1].parameters()} == {dtype}

    @pytest.mark.parametrize("stop", [1, 5])
    def test_a_stopped_run_goes_on_to_the_bit(self, tmp_path, stop):
        recipe, options = Recipe(update=RecAdamUpdate(eight_bit=True)), {"log_every": 1}
        whole = finetune(recipe, Vectors.make_model(torch.float32), **options)
        options |= {"checkpoint": tmp_path / "run.pt", "save_every": 1}
        with pytest.raises(Stopped):
            finetune(recipe, Vectors.make_model(torch.float32), log=stop_at(stop), **options)
        assert_same_bits(finetune(recipe, Vectors.make_model(torch.float32), **options), whole)


@pytest.mark.parametrize(
    "bad", ["8-bit", "8BIT", "int8", 8, torch.uint8, torch.int8, torch.float8_e4m3fn, True], ids=str
)
def test_other_state_dtypes_are_refused(bad):
    with pytest.raises(ValueError, match="state_dtype must be None, '8bit' or one of") as raised:
        RecAdam(make_net().parameters(), state_dtype=bad)
    assert repr(bad) in str(raised.value)


def test_anchors_of_the_checkpoint_are_still_checked():
    net, opt = make_run()
    train(net, opt, 0, 2)
    late = RecAdam(net.parameters(), state_dtype="8bit")
    with pytest.raises(ValueError, match="parameters per group"):
        late.load_state_dict(opt.state_dict())
    other = RecAdam(
        make_net(torch.float32, seed=1).named_parameters(),
        anchors=Reference.of(make_net(torch.float32, seed=1)), state_dtype="8bit",
    )  # fmt: skip
    same = RecAdam(make_net(torch.float32).named_parameters(), state_dtype="8bit")
    with pytest.raises(ValueError, match="other anchors"):
        other.load_state_dict(same.state_dict())
