"""MoFO's kernels, in Triton's interpreter or on a GPU, against the float64 twin."""

import copy
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from golden.mofo import Twin  # noqa: E402
from holdfast.kernels import mofo as mofo_step  # noqa: E402
from holdfast.kernels.mofo import MoFOStep, takes  # noqa: E402
from holdfast.methods.mofo import largest  # noqa: E402
from holdfast.optim import MoFO  # noqa: E402
from matrices import sampled  # noqa: E402

CLOSE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(1, 1), (2, 1), (7, 73), (27, 19), (31, 50), (300,), (5, 1, 3)]


@pytest.fixture
def small(monkeypatch):
    """Programs so small that tensors have several."""
    monkeypatch.setattr(mofo_step, "BLOCK", 256)
    monkeypatch.setattr(mofo_step, "LOOPS", 2)


class Run:
    """Some tensors and what the kernels and the twin make of them."""

    def __init__(self, params, fraction=0.15, maximize=False, capturable=False):
        self.params, self.fraction = params, fraction
        self.ms = [torch.zeros_like(p) for p in params]
        self.vs = [torch.zeros_like(p) for p in params]
        self.counts = [torch.zeros((), device=DEVICE) for _ in params]
        self.twins = [Twin(p.double().cpu()) for p in params]
        self.options = ADAM | {"maximize": maximize, "capturable": capturable}
        if capturable:
            self.options["lr"] = torch.tensor(ADAM["lr"], device=DEVICE)
        self.step = MoFOStep()

    def update(self, grads):
        """One step, checked: which weights moved, and where all of them are."""
        before = [p.clone() for p in self.params]
        rest = self.step(
            self.params, grads, self.ms, self.vs, self.counts,
            fraction=self.fraction, **self.options,
        )  # fmt: skip
        assert rest == []
        t = float(self.counts[0])
        for p, old, m, v in zip(self.params, before, self.ms, self.vs, strict=True):
            k = max(1, round(self.fraction * p.numel())) if p.dim() > 1 else p.numel()
            chosen = largest(m.abs(), k)
            assert torch.equal(p[~chosen], old[~chosen])
            m, v = m.double() / (1 - 0.9**t), v.double() / (1 - 0.99**t)
            new = old.double() * (1 - 1e-3) - 1e-2 * m / (v.sqrt() + 1e-8)
            near = CLOSE[p.dtype] * (1 + new.abs())
            assert ((p.double() - new).abs() <= near)[chosen].all()
            if p.dtype == torch.float32:
                assert torch.equal(p != old, chosen)

    def follow(self, grads, maximize=False):
        """The twins' step."""
        for twin, g in zip(self.twins, grads, strict=True):
            g = -g.double().cpu() if maximize else g.double().cpu()
            twin.update(g, lr=1e-2, fraction=self.fraction, beta2=0.99, wd=0.1)


def randoms(shapes, dtype=torch.float32):
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("maximize", "capturable"),
    sampled(product([False, True], repeat=2), [(False, False), (True, True)]),
)
def test_it_is_the_float64_twin(small, maximize, capturable):
    torch.manual_seed(maximize)
    run = Run(randoms(SHAPES), maximize=maximize, capturable=capturable)
    for _ in range(3):
        grads = randoms(SHAPES)
        run.update(grads)
        run.follow(grads, maximize)
    for p, m, v, twin in zip(run.params, run.ms, run.vs, run.twins, strict=True):
        torch.testing.assert_close(p.double().cpu(), twin.theta, atol=3e-6, rtol=0)
        torch.testing.assert_close(m.double().cpu(), twin.m, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(v.double().cpu(), twin.v, atol=1e-6, rtol=1e-5)
    assert {float(count) for count in run.counts} == {3.0}


@pytest.mark.parametrize(
    ("dtype", "fraction"),
    sampled(
        product([torch.bfloat16, torch.float16], [0.3, 0.9999]),
        [(torch.bfloat16, 0.3), (torch.float16, 0.9999)],
    ),
)
def test_half_precision(small, dtype, fraction):
    run = Run(randoms(SHAPES, dtype), fraction)
    for _ in range(2):
        run.update(randoms(SHAPES, dtype))


@pytest.mark.parametrize("fraction", [1e-9, 0.05, 0.999, 1.0])
def test_one_and_all(small, fraction):
    run = Run(randoms([(1, 511), (40, 30)]), fraction)
    run.update(randoms([(1, 511), (40, 30)]))


def grid(shape):
    """Few different values, most of them 0."""
    return torch.randint(-3, 4, shape, device=DEVICE).float() * (torch.rand(shape) < 0.3).to(DEVICE)


TIES = {
    "equal": lambda shape: torch.ones(shape, device=DEVICE),
    "zeros": lambda shape: torch.zeros(shape, device=DEVICE),
    "few": grid,
    "opposite": lambda shape: torch.randn(shape, device=DEVICE).sign(),
    "rows": lambda shape: torch.eye(shape[0], shape[1], device=DEVICE),
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    sampled(
        product(TIES, [torch.float32, torch.bfloat16]),
        [*product(["zeros", "opposite", "rows"], [torch.float32]), ("few", torch.bfloat16)],
    ),
)
def test_of_equal_ones_the_first_move(small, kind, dtype):
    shapes = [(3, 400), (31, 20), (2, 2)]
    run = Run(randoms(shapes, dtype), 0.3)
    for _ in range(2):
        run.update([TIES[kind](shape).to(dtype) for shape in shapes])


@pytest.mark.parametrize(
    "scales", [[1e-38, 1e-38], [1e-44, 1e-20], [1e15, 1e15], [1e-12, 1e12, 1e-3], [0.0, 1.0, 0.0]]
)
def test_any_magnitude(scales):
    """Denormals too, and steps that are far from the one before."""
    shapes = [(40, 30), (1, 600)]
    run = Run(randoms(shapes))
    for scale in scales:
        before = [p.clone() for p in run.params]
        run.step(
            run.params, [g * scale for g in randoms(shapes)], run.ms, run.vs, run.counts,
            fraction=0.15, **{**run.options, "weight_decay": 0.5, "lr": 0.5},
        )  # fmt: skip
        for p, old, m in zip(run.params, before, run.ms, strict=True):
            assert torch.equal(p != old, largest(m.abs(), round(0.15 * p.numel())))


@pytest.mark.parametrize("spread", [0.0, 1e-6, 30.0])
def test_any_distribution(spread):
    """All in one bin, or as far apart as float32 goes."""
    run = Run(randoms([(60, 50)]))
    for _ in range(2):
        exponents = torch.randn(60, 50, device=DEVICE) * spread
        run.update([exponents.clamp(-30, 15).exp2()])


def test_unaligned_tensors_and_what_lies_around_them(small):
    poison = [torch.full((3000,), float("nan"), device=DEVICE) for _ in range(4)]
    p, m, v, g = (t[101:1501].view(70, 20) for t in poison)
    p.normal_(), m.zero_(), v.zero_(), g.normal_()
    run = Run([p])
    run.ms, run.vs = [m], [v]
    run.update([g])
    run.update([torch.randn(20, 70, device=DEVICE).t()])  # a gradient that lies otherwise
    for t in poison:
        assert t[101:1501].isfinite().all()
        assert t[:101].isnan().all()
        assert t[1501:].isnan().all()


def test_what_the_kernels_leave_to_others():
    assert takes(torch.zeros(3, 4, device=DEVICE))
    assert not takes(torch.zeros(3, 4, device=DEVICE).t())
    image = torch.zeros(2, 3, 4, 5, device=DEVICE)
    assert not takes(image.to(memory_format=torch.channels_last))
    assert not takes(torch.zeros(3, 4, device=DEVICE, dtype=torch.float64))
    assert not takes(torch.zeros(0, 4, device=DEVICE))


def make(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 30), torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(30, 1)
    ).to(DEVICE, dtype)
    model[1].to(memory_format=torch.channels_last)
    return model, MoFO(model.parameters(), lr=1e-2, weight_decay=0.1, **options)


def train(model, optimizer, first, last):
    for t in range(first, last):
        generator = torch.Generator().manual_seed(t)
        for p in model.parameters():
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        optimizer.step()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("capturable", [False, True])
def test_the_optimizer_takes_it(capturable):
    plain, fused = make(foreach=False, fused=False), make(fused=True, capturable=capturable)
    for model, optimizer in (plain, fused):
        train(model, optimizer, 0, 4)
    assert fused[1]._kernels[0]._launches
    assert fused[1]._kernels[0]._rest == [2]  # the convolution does not lie in rows
    torch.testing.assert_close(weights(fused[0]), weights(plain[0]), atol=1e-6, rtol=1e-5)


def test_all_of_it_is_torchs():
    model, optimizer = make(fused=True, fraction=1.0)
    train(model, optimizer, 0, 2)
    assert not optimizer._kernels


def test_resume_to_the_bit():
    (model, optimizer), (other, again) = make(fused=True), make(fused=True)
    train(model, optimizer, 0, 3)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied = copy.deepcopy((model, optimizer))
    for pair in ((model, optimizer), (other, again), copied):
        train(*pair, 3, 5)
    assert torch.equal(weights(model), weights(other))
    assert torch.equal(weights(model), weights(copied[0]))


def test_the_fraction_may_change_and_parameters_may_come_later():
    model, optimizer = make(fused=True)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(20, 20, device=DEVICE))]})
    train(model, optimizer, 0, 1)
    late = optimizer.param_groups[1]
    late["params"][0].grad = torch.randn(20, 20, device=DEVICE)
    late["fraction"] = 0.5
    train(model, optimizer, 1, 2)
    assert int((late["params"][0] != 0).sum()) == 200
    late["fraction"] = 0.01
    before = late["params"][0].detach().clone()
    train(model, optimizer, 2, 3)
    assert int((late["params"][0] != before).sum()) == 4


if DEVICE == "cuda":

    def test_a_captured_graph():
        lr = torch.tensor(1e-2, device=DEVICE)
        plain, fused = make(foreach=False, fused=False), make(fused=True, capturable=True)
        fused[1].param_groups[0]["lr"] = lr
        train(*plain, 0, 6)
        train(*fused, 0, 2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fused[1].step()
        for t in range(2, 6):
            generator = torch.Generator().manual_seed(t)
            for p in fused[0].parameters():
                p.grad.copy_(torch.randn(p.shape, generator=generator))
            graph.replay()
        torch.testing.assert_close(weights(fused[0]), weights(plain[0]), atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize(
    ("dtype", "broken"),
    sampled(
        product(CLOSE, [1, 300, 1500]),
        [(torch.float32, 300), (torch.bfloat16, 1), (torch.float16, 1500)],
    ),
)
def test_a_nan_gradient_shows_in_the_weights(small, dtype, broken):
    (p,), (m, v) = randoms([(40, 50)], dtype), torch.zeros(2, 40, 50, device=DEVICE, dtype=dtype)
    twin, count, step = Twin(p.double().cpu()), torch.zeros((), device=DEVICE), MoFOStep()
    for t in range(3):
        (g,) = randoms([(40, 50)], dtype)
        if t == 1:
            g.view(-1)[: broken - 1] = torch.nan
            g.view(-1)[-1] = -torch.inf
        step([p], [g], [m], [v], [count], fraction=0.15, maximize=False, capturable=False, **ADAM)
        twin.update(g.double().cpu(), lr=1e-2, fraction=0.15, beta2=0.99, wd=0.1)
    assert torch.equal(p.isnan().cpu(), twin.theta.isnan())
    assert int(p.isnan().sum()) == min(broken, 300)
    assert not int((p.isinf()).sum())
