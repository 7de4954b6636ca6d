"""RecAdam's kernel, in Triton's interpreter or on a GPU, against the float64 twin."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from holdfast import RecAdam  # noqa: E402
from holdfast._optim.backends import Columns  # noqa: E402
from holdfast.anneal import Sigmoid  # noqa: E402
from holdfast.kernels.recadam import Operands, RecAdamStep, takes  # noqa: E402
from holdfast.methods.recadam import _Plan  # noqa: E402

# Of three updates. Triton's interpreter truncates to bfloat16, by up to 2⁻⁷ of a weight per update.
HALVES = {torch.float32: 3e-6, torch.bfloat16: 2.4e-2, torch.float16: 3e-3}
OPTIONS = {"gamma": 60.0, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}


def views(size, dtype):
    """Tensors of a size as hosts have them: whole, unaligned, transposed."""
    flat = torch.randn(size, device=DEVICE).to(dtype)
    shifted = torch.randn(size + 1, device=DEVICE).to(dtype)[1:]
    turned = torch.randn(3, size, device=DEVICE).to(dtype).t()
    return [flat, shifted, turned]


def rows_of(sizes, dtype, state, anchored, weighted):
    rows = []
    for size in sizes:
        for p in views(size, dtype):
            m = torch.zeros_like(p, dtype=state)
            anchor = torch.randn(p.shape, device=DEVICE).to(anchored) if anchored else None
            weight = 3 * torch.rand(p.shape, device=DEVICE) if weighted and anchored else None
            count = torch.zeros((), device=DEVICE)
            rows.append(Operands(p, m, torch.zeros_like(m), count, anchor, weight))
    return rows


def twin(row, state, grad, t, lr, lam, maximize=False):
    """The same in float64, one parameter."""
    o, lam = OPTIONS, lam if row.anchor is not None else 1.0
    g = -grad.double() if maximize else grad.double()
    p, m, v = state
    m = o["beta1"] * m + (1 - o["beta1"]) * g
    v = o["beta2"] * v + (1 - o["beta2"]) * g * g
    p = p - lr * o["weight_decay"] * p
    root = (v / (1 - o["beta2"] ** t)).sqrt() + o["eps"]
    p = p - lr * lam * (m / (1 - o["beta1"] ** t)) / root
    if row.anchor is not None:
        f = 1.0 if row.weight is None else row.weight.double()
        c = torch.as_tensor(lr * (1 - lam) * o["gamma"] * f).clamp(max=1.0).to(p.device)
        p = p - c * (p - row.anchor.double())
    return p, m, v


@settings(max_examples=settings().max_examples // 3)
@given(
    st.lists(st.sampled_from([1, 2, 15, 511, 512, 513, 1500]), min_size=1, max_size=3),
    st.sampled_from([(torch.float32,) * 2, (torch.bfloat16, torch.float32)]),
    st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(), st.booleans(), st.booleans(), st.floats(0, 1),
)  # fmt: skip
def test_it_is_the_float64_twin(sizes, dtypes, anchored, weighted, on_device, maximize, lam):
    torch.manual_seed(len(sizes))
    rows, lr = rows_of(sizes, *dtypes, anchored, weighted), 1e-2
    known = [(r.p.double().clone(), r.m.double(), r.v.double()) for r in rows]
    largest = [float(p.abs().max()) + 1e-3 for p, *_ in known]
    step = RecAdamStep(rows)
    assert all(takes(row) for row in rows)
    for t in range(1, 4):
        grads = [torch.randn(r.p.shape, device=DEVICE).to(r.p.dtype) for r in rows]
        rates = [torch.tensor(x, dtype=torch.float64, device=DEVICE) if on_device else x
                 for x in (lr, lam)]  # fmt: skip
        step(grads, lr=rates[0], lam=rates[1], maximize=maximize, **OPTIONS)
        known = [
            twin(r, state, g, t, lr, lam, maximize)
            for r, state, g in zip(rows, known, grads, strict=True)
        ]
        largest = [
            max(most, float(p.abs().max())) for most, (p, *_) in zip(largest, known, strict=True)
        ]
    for row, (p, m, v), scale in zip(rows, known, largest, strict=True):
        close = HALVES[row.p.dtype]
        torch.testing.assert_close(row.p.double(), p, atol=close * scale, rtol=0)
        torch.testing.assert_close(row.m.double(), m, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(row.v.double(), v, atol=1e-5, rtol=1e-5)
        assert float(row.step) == 3


def test_nothing_beyond_a_tensor_is_written():
    poison = torch.full((3000,), float("nan"), device=DEVICE)
    p = poison[100:1500]
    p.zero_()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    row = Operands(p, m, v, torch.zeros((), device=DEVICE), torch.ones_like(p))
    RecAdamStep([row])([torch.ones_like(p)], lr=0.1, lam=0.5, **OPTIONS)
    assert p.isfinite().all()
    assert poison[:100].isnan().all()
    assert poison[1500:].isnan().all()


def test_an_infinite_gradient_changes_nothing_and_is_no_step():
    p = torch.randn(700, device=DEVICE)
    before, count = p.clone(), torch.zeros((), device=DEVICE)
    row = Operands(p, torch.zeros_like(p), torch.zeros_like(p), count)
    step, rates = RecAdamStep([row]), {**OPTIONS, "weight_decay": 0.0, "lam": 1.0}
    rates["lr"] = torch.tensor(0.1, device=DEVICE)
    rates["grad_scale"] = torch.tensor(4.0, device=DEVICE)
    step([torch.full_like(p, 4.0)], found_inf=torch.ones((), device=DEVICE), **rates)
    assert torch.equal(p, before)
    assert float(count) == 0
    step([torch.full_like(p, 4.0)], found_inf=torch.zeros((), device=DEVICE), **rates)
    assert float(count) == 1
    assert torch.allclose(row.m, torch.full_like(p, 0.1))  # of a gradient of 1: it was unscaled


def test_stochastic_rounding_is_right_on_average():
    p = torch.ones(4096, dtype=torch.bfloat16, device=DEVICE)
    m, v = torch.zeros(4096, device=DEVICE), torch.zeros(4096, device=DEVICE)
    row = Operands(p, m, v, torch.zeros((), device=DEVICE))
    lr = 2.0**-10  # an eighth of the way to the next value below 1: 1 − 2⁻⁸
    rates = {**OPTIONS, "weight_decay": 0.0, "lr": lr, "lam": 1.0}
    RecAdamStep([row])([torch.ones_like(p)], stochastic=True, seed=7, **rates)
    assert set(p.float().unique().tolist()) <= {1.0, 1 - 2.0**-8}
    assert float((p.float() < 1).float().mean()) == pytest.approx(0.25, abs=0.05)


def packed_row(size, anchored, dtype=torch.float32):
    p = torch.randn(size, device=DEVICE).to(dtype)
    codes = torch.zeros(2, size, dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros(2, -(-size // 256), device=DEVICE)
    anchor = torch.randn(size, device=DEVICE).bfloat16() if anchored else None
    count = torch.zeros((), device=DEVICE)
    return Operands(p, codes[0], codes[1], count, anchor, None, scales[0], scales[1])


def take_over(row, other):
    for mine, theirs in zip(row, other, strict=True):
        if mine is not None:
            mine.copy_(theirs)


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("size", [1, 255, 256, 257, 1300])
def test_moments_of_8_bits_are_those_of_torchs_operations(size, anchored):
    torch.manual_seed(size)
    row, other = (packed_row(size, anchored) for _ in range(2))
    take_over(other, row)
    group = {
        "lr": 1e-2, "gamma": 60.0, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8,
        "maximize": False, "foreach": False, "fused": False, "capturable": False,
        "stochastic_rounding": False, "updates": torch.tensor(3),
    }  # fmt: skip
    by_kernel = _Plan(0, {**group, "fused": True}, Columns(*([t] for t in row)), [])
    by_torch = _Plan(0, group, Columns(*([t] for t in other)), [])
    assert by_kernel.kernel
    assert not by_torch.kernel
    for step in range(5):
        group["updates"].fill_(step)
        row.p.grad = torch.randn(size, device=DEVICE) * 10.0 ** torch.randint(-3, 3, (size,)).to(
            DEVICE
        )
        other.p.grad = row.p.grad.clone()
        for plan, grad in ((by_kernel, row.p.grad), (by_torch, other.p.grad)):
            plan.update(group, [grad], 0.7, None, None)
        torch.testing.assert_close(row.p, other.p, atol=1e-6, rtol=1e-5)
        for a, b in ((row.m, other.m), (row.v, other.v)):  # rounding may turn at the last bit
            assert (a.int() - b.int()).abs().max() <= 1
            assert (a != b).float().mean() <= 0.01 + 1 / size
        take_over(other, row)


def model_after(updates, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 1)).to(DEVICE)
    optimizer = RecAdam(model.parameters(), lr=1e-2, gamma=30, anneal=Sigmoid(k=2, t0=5), **options)
    for _ in range(updates):
        model(torch.randn(8, 40, device=DEVICE)).pow(2).mean().backward()
        optimizer.step(), optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer


@pytest.mark.parametrize("updates", [5, 25])  # while it recalls, and when the pull is over
def test_the_optimizer_takes_it(updates):
    plain, _ = model_after(updates, foreach=False, fused=False, weight_decay=0.1)
    fused, optimizer = model_after(updates, fused=True, weight_decay=0.1)
    assert all(bool(plan.kernel) == (updates == 5) for plan in optimizer._plans.values())
    torch.testing.assert_close(fused, plain, atol=1e-6, rtol=1e-5)
