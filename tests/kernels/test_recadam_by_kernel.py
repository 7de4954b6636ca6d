"""RecAdam with its kernel, in Triton's interpreter or on a GPU, in what hosts do with it."""

import copy
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from holdfast import RecAdam  # noqa: E402
from holdfast.anneal import Constant, Linear, Sigmoid  # noqa: E402
from matrices import sampled  # noqa: E402

KINDS = {
    "float32": (torch.float32, {}),
    "8 bits": (torch.float32, {"state_dtype": "8bit"}),
    "bfloat16": (torch.bfloat16, {"state_dtype": torch.float32}),
    "bfloat16, at random": (
        torch.bfloat16, {"state_dtype": torch.float32, "stochastic_rounding": True}
    ),
    "bfloat16, 8 bits, at random": (
        torch.bfloat16, {"state_dtype": "8bit", "stochastic_rounding": True}
    ),
}  # fmt: skip
SHAPES = [(), (5,), (20, 15), (520,), (3, 4, 2, 2)]
#: The last kind has what the others have: half precision, moments of 8 bits, random bits.
some_kinds = pytest.mark.parametrize("kind", sampled(KINDS, ["float32", [*KINDS][-1]]))


def drawn(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in SHAPES]
    made[-1] = made[-1].to(memory_format=torch.channels_last)
    return made


def make(kind="float32", anchors=None, **options):
    dtype, kinds = KINDS[kind]
    params = [torch.nn.Parameter(t) for t in drawn(0, dtype)]
    settings = {"lr": 1e-2, "gamma": 20.0, "anneal": Sigmoid(0.3, 4), "fused": True}
    anchors = {str(i): t for i, t in enumerate(drawn(1, dtype))} if anchors is None else anchors
    named = [(str(i), p) for i, p in enumerate(params)]
    return params, RecAdam(named, anchors=anchors, **(settings | kinds | options))


def step(params, opt, t, without=()):
    for i, (p, g) in enumerate(zip(params, drawn(100 + t, params[0].dtype), strict=True)):
        p.grad = None if i in without else g.to(p.dtype)
    opt.step()


def assert_same(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def assert_close(ours, theirs, kind="float32"):
    """To what rounding leaves: bfloat16 numbers up to 4 are 2⁻⁶ apart.

    Triton's interpreter cuts them off, where a GPU rounds them: a whole one at each step.
    """
    half = 2.0**-6 if DEVICE == "cuda" else 2.0**-4
    atol = 2e-6 if KINDS[kind][0] == torch.float32 else half
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), atol=atol, rtol=1e-5)


def assert_by_kernel(opt, yes=True):
    assert opt._plans
    assert all((plan.kernel is not None) == yes for plan in opt._plans.values())


@pytest.mark.parametrize(
    ("kind", "at"), sampled(product(KINDS, [0, 2]), [*product(KINDS, [2]), ("float32", 0)])
)
def test_resume_to_the_bit(kind, at, tmp_path):
    params, opt = make(kind)
    for t in range(at):
        step(params, opt, t)
    torch.save([opt.state_dict(), [p.detach() for p in params]], tmp_path / "run.pt")
    for t in range(at, 4):
        step(params, opt, t)
    others, again = make(kind)
    state, values = torch.load(tmp_path / "run.pt", weights_only=True)
    again.load_state_dict(state)
    with torch.no_grad():
        for p, value in zip(others, values, strict=True):
            p.copy_(value)
    for t in range(at, 4):
        step(others, again, t)
    assert_by_kernel(again)
    assert_same(params, others)
    for a, b in zip(opt.state.values(), again.state.values(), strict=True):
        assert_same(a.values(), b.values())


@some_kinds
def test_a_parameter_that_joins_after_a_resume(kind):
    params, opt = make(kind)
    for t in range(2):
        step(params, opt, t, without=[1, 2])
    others, again = make(kind)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    with torch.no_grad():
        for p, q in zip(others, params, strict=True):
            p.copy_(q)
    for t in range(2, 4):
        step(params, opt, t), step(others, again, t)
    assert [int(opt.state[p]["step"]) for p in params] == [4, 2, 2, 4, 4]
    assert_same(params, others)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_unequal_counts_of_steps(kind):
    """Each parameter's own bias correction, as by torch's operations."""
    runs = [make(kind), make(kind, fused=False, foreach=False)]
    for params, opt in runs:
        for t in range(7):
            step(params, opt, t, without=[[1], [2, 3], [], [0], [1], [], [4]][t])
    assert_by_kernel(runs[0][1])
    assert_close(runs[0][0], runs[1][0], kind)


@some_kinds
def test_parameters_that_move(kind):
    """Hosts that lay weights out anew, in one piece of memory: .data is exchanged."""
    params, opt = make(kind)
    others, plain = make(kind)
    for t in range(4):
        if t == 2:
            old = [p.data for p in params]
            for p in params:
                p.data = p.data.clone(memory_format=torch.preserve_format)
            for value in old:
                value.fill_(torch.nan)  # nobody may read or write them now
        step(params, opt, t), step(others, plain, t)
    assert_by_kernel(opt)
    assert_same(params, others)
    assert all(value.isnan().all() for value in old)


def test_moments_that_move():
    params, opt = make()
    others, plain = make()
    for t in range(5):
        if t == 2:
            for state in opt.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    old, state[name] = state[name], state[name].clone()
                    old.fill_(torch.nan)
        step(params, opt, t), step(others, plain, t)
    assert_same(params, others)


def test_a_model_that_becomes_half_on_the_way():
    runs = [make(), make(fused=False, foreach=False)]
    for params, opt in runs:
        for t in range(6):
            if t == 3:
                for p in params:
                    p.grad = None
                    p.data = p.data.bfloat16()
            step(params, opt, t)
        assert {p.dtype for p in params} == {torch.bfloat16}
        assert {s["exp_avg"].dtype for s in opt.state.values()} == {torch.float32}
    assert_by_kernel(runs[0][1])
    assert_close(runs[0][0], runs[1][0], "bfloat16")


@pytest.mark.parametrize("kind", sampled(["float32", "8 bits", "bfloat16"], ["8 bits", "bfloat16"]))
def test_anchors_that_are_one_number(kind):
    """As LoRA's B has: they take no memory, and are what whole ones are."""
    results = []
    for whole in (False, True):
        anchors = {str(i): torch.zeros((), device=DEVICE).expand(s) for i, s in enumerate(SHAPES)}
        if whole:
            anchors = {name: a.clone() for name, a in anchors.items()}
        params, opt = make(kind, anchors)
        for t in range(3):
            step(params, opt, t)
        assert_by_kernel(opt)
        results.append(params)
    if kind == "8 bits":  # other kinds of tensors may have other random bits
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=0)
    else:
        assert_same(*results)


def scaled_run(bad=(), unscale=False, **options):
    params, opt = make(anneal=Sigmoid(0.3, 4), **options)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8, growth_interval=1000)
    good = 0
    for t in range(5):
        opt.zero_grad()
        # A step that is skipped is made up for, with the gradients of the next one.
        grads = drawn(100 + good)
        loss = sum((p * g).sum() for p, g in zip(params, grads, strict=True))
        scaler.scale(loss).backward()
        if t in bad:
            params[2].grad[0, 0] = torch.inf
        else:
            good += 1
        if unscale:
            scaler.unscale_(opt)
            if t not in bad:
                torch.nn.utils.clip_grad_norm_(params, 1e9)  # changes nothing
        before = [p.detach().clone() for p in params]
        scaler.step(opt)
        scaler.update()
        same = all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
        assert same == (t in bad), t
    return params, opt, good


AMP = {"capturable": True, "fused": True}


BAD = [((), None), ((0, 3), None), ((0, 1, 4), "8bit")]


@pytest.mark.parametrize(
    ("unscale", "bad", "state_dtype"),
    sampled(
        [(unscale, *rest) for unscale, rest in product([False, True], BAD)],
        [(False, (0, 3), None), (True, (0, 3), None), (True, (0, 1, 4), "8bit")],
    ),
)
def test_under_a_scaler(unscale, bad, state_dtype):
    """The scale is a power of 2: what comes out is what comes out without one.

    But for the last bit: it is another kernel, whose compiler may fuse other sums and products.
    """
    params, opt, good = scaled_run(bad, unscale, state_dtype=state_dtype, **AMP)
    assert opt._step_supports_amp_scaling
    assert good == 5 - len(bad)
    assert opt.recall_state()["updates"] == good
    assert {int(s["step"]) for s in opt.state.values()} == {good}
    others, plain = make(state_dtype=state_dtype, **AMP)
    for t in range(good):
        step(others, plain, t)
    if state_dtype == "8bit":  # where a last bit may turn a code
        assert_close(params, others)
    for p, other in zip(params, others, strict=True):
        if state_dtype is None:
            torch.testing.assert_close(p, other, atol=1e-6, rtol=1e-6)


def test_a_float64_parameter_under_a_scaler_says_what_to_do():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64, device=DEVICE))
    opt = RecAdam([p], lr=1e-2, gamma=1.0, **AMP)
    p.grad = torch.ones_like(p)
    opt.grad_scale = torch.tensor(2.0, device=DEVICE)
    opt.found_inf = torch.tensor(0.0, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"a parameter of torch\.float64 cannot be updated"):
        opt.step()


def test_capturable_never_lets_go():
    """What a graph has captured reads the anchors for ever."""
    params, opt = make(anneal=Linear(1), release=True, **AMP)
    for t in range(4):
        step(params, opt, t)
    assert opt.distance() > 0
    assert_by_kernel(opt)


def test_released_it_goes_on_without_anchors():
    params, opt = make(anneal=Linear(3), release=True, fused=None if DEVICE == "cuda" else True)
    others, plain = make(anneal=Linear(3), fused=False, foreach=False)
    for t in range(7):
        step(params, opt, t), step(others, plain, t)
    with pytest.raises(RuntimeError, match="released"):
        opt.distance()
    assert_close(params, others)


@pytest.mark.parametrize("options", [{}, AMP], ids=["", "capturable"])
def test_random_bits_differ_between_parameters_and_updates(options):
    """With an anchor, with one of another dtype, with one number, and with none."""
    size = 2048
    kinds = [torch.ones(size), torch.ones(size).bfloat16(), torch.ones(()).expand(size), None]
    params = [
        torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16, device=DEVICE)) for _ in range(8)
    ]
    anchors = {str(i): a.to(DEVICE) for i, a in enumerate(kinds * 2) if a is not None}
    anchors["2"] = anchors["6"] = torch.ones((), device=DEVICE).expand(size)
    with pytest.warns(UserWarning, match="2 parameters have no anchor"):
        opt = RecAdam(
            [(str(i), p) for i, p in enumerate(params)], lr=2.0**-10, gamma=0.0,
            anneal=Constant(0.999), anchors=anchors, state_dtype=torch.float32,
            **({"fused": True} | options), stochastic_rounding=True,
        )  # fmt: skip
    seen = []
    for _ in range(2):
        for p in params:
            p.data.fill_(1.0)
            p.grad = torch.ones_like(p)
        opt.step()
        seen += [(p.detach() != 1).float() for p in params]
    assert_by_kernel(opt)
    drawn_bits = torch.stack(seen)
    assert drawn_bits.mean(1).tolist() == [pytest.approx(0.25, abs=0.05)] * 16
    together = torch.corrcoef(drawn_bits).cpu()
    assert (together - torch.eye(16)).abs().max() < 0.15


def test_gradients_that_lie_otherwise():
    params, opt = make()
    others, plain = make()
    for t in range(3):
        for p, q, g in zip(params, others, drawn(100 + t), strict=True):
            q.grad = torch.empty_like(q).copy_(g)
            p.grad = g.contiguous() if g.dim() != 2 else g.t().contiguous().t()
        opt.step(), plain.step()
    assert_by_kernel(opt)
    assert_same(params, others)
