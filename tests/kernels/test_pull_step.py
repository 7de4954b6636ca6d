"""The penalties' kernel, in Triton's interpreter or on a GPU, against the float64 twin."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from holdfast import (  # noqa: E402
    EWC,
    L1SP,
    L2SP,
    MAS,
    SFA,
    Reference,
)
from holdfast.kernels.pull import Pulled, PullStep, takes  # noqa: E402
from holdfast.optim import attach_penalties  # noqa: E402
from matrices import sampled  # noqa: E402

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BITS = {F32: torch.int32, BF16: torch.int16, F16: torch.int16}
NEAREST = 0.5 if DEVICE == "cuda" else 1.0  # the interpreter cuts off where a GPU rounds


def views(size, dtype):
    """Tensors of a size as hosts have them: whole, unaligned, transposed."""
    flat = torch.randn(size, device=DEVICE).to(dtype)
    shifted = torch.randn(size + 1, device=DEVICE).to(dtype)[1:]
    turned = torch.randn(3, size, device=DEVICE).to(dtype).t()
    return [flat, shifted, turned]


def rows_of(sizes, dtype, anchored, weighted, coupled):
    """Rows of two groups; anchors and importances lie as they like."""
    rows = []
    for size in sizes:
        for i, p in enumerate(views(size, dtype)):
            anchor = (p.float() + 0.5 * torch.randn(p.shape, device=DEVICE)).to(anchored)
            weight = 3 * torch.rand(p.shape, device=DEVICE).to(weighted) if weighted else None
            grad = torch.empty_like(p).copy_(torch.randn(p.shape)) if coupled else None
            rows.append(Pulled(i % 2, p, anchor.contiguous(), weight, grad))
    return rows


def assert_rounded_once(found, exact):
    """As near as a value of its dtype can be, and float32 arithmetic lets it."""
    room = NEAREST * torch.finfo(found.dtype).eps * exact.abs() + 1e-6
    assert bool(((found.double() - exact).abs() <= room).all())


SIZES = st.lists(st.sampled_from([1, 15, 511, 512, 513, 1024, 1025, 1500]), min_size=1, max_size=3)
DTYPES = st.sampled_from([F32, BF16])
ANCHORS = st.sampled_from([F32, BF16, F16])
WEIGHTS = st.sampled_from([None, F32, BF16])


@settings(max_examples=20, deadline=None)
@given(SIZES, DTYPES, ANCHORS, WEIGHTS, st.sampled_from([1e-4, 0.1, 0.7, 1.0, 5.0]))
def test_decoupled_it_is_the_float64_twin(sizes, dtype, anchored, weighted, c):
    rows = rows_of(sizes, dtype, anchored, weighted, coupled=False)
    before = [row.p.double().clone() for row in rows]
    assert all(takes(row) for row in rows)
    rates = [c, c / 3]
    PullStep(rows)(rates)
    for row, p in zip(rows, before, strict=True):
        f = torch.ones_like(p) if row.weight is None else row.weight.double()
        exact = p + (rates[row.group] * f).clamp(max=1.0) * (row.anchor.double() - p)
        assert_rounded_once(row.p, exact)


@settings(max_examples=20, deadline=None)
@given(SIZES, DTYPES, ANCHORS, WEIGHTS, st.sampled_from([0.3, 5.0]), st.booleans(), st.booleans())
def test_coupled_it_is_the_float64_twin(sizes, dtype, anchored, weighted, c, maximize, scaled):
    rows = rows_of(sizes, dtype, anchored, weighted, coupled=True)
    scale = torch.tensor(64.0, device=DEVICE) if scaled else None
    rates = [-c, -c / 3] if maximize else [c, c / 3]
    step, weights = PullStep(rows), [row.p.clone() for row in rows]
    for _ in range(2):  # the second time they lie elsewhere
        grads = [torch.randn_like(row.p) for row in rows]
        before = [g.double() for g in grads]
        step(rates, grads, scale)
        for row, p, g, found in zip(rows, weights, before, grads, strict=True):
            f = 1.0 if row.weight is None else row.weight.double()
            way = row.p.double() - row.anchor.double()
            added = rates[row.group] * f * way * (64.0 if scaled else 1.0)
            room = NEAREST * torch.finfo(dtype).eps * (g + added).abs() + 1e-6 * (1 + added.abs())
            assert bool(((found.double() - g - added).abs() <= room).all())
            assert torch.equal(row.p, p)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_not_moved_keeps_its_bits(dtype, weighted):
    p = torch.randn(2000, device=DEVICE).to(dtype)
    p[::5] = -0.0
    anchor, weight = torch.randn(2000, device=DEVICE).to(dtype), None
    if weighted:
        weight = torch.rand(2000, device=DEVICE) * (torch.arange(2000, device=DEVICE) % 2)
        stays = weight == 0
        p[2] = torch.inf
    else:
        stays = torch.arange(2000, device=DEVICE) % 2 == 0
        anchor[stays] = p[stays]
    before = p.clone()
    PullStep([Pulled(0, p, anchor, weight)])([0.3])
    same = p.view(BITS[dtype]) == before.view(BITS[dtype])
    assert bool(same[stays].all())
    assert float(same[~stays].float().mean()) < 0.1


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_all_the_way_is_the_anchor(dtype):
    p, anchor = (torch.randn(700, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.rand(700, device=DEVICE).add(0.5)
    PullStep([Pulled(0, p, anchor, weight)])([2.0])
    assert torch.equal(p, anchor)


@pytest.mark.parametrize("coupled", [False, True])
def test_nothing_beyond_a_tensor_is_written(coupled):
    poison = torch.full((3000,), float("nan"), device=DEVICE)
    out = poison[100:1500]
    out.zero_()
    other = torch.zeros_like(out)
    p, grad = (other, out) if coupled else (out, None)
    PullStep([Pulled(0, p, torch.ones_like(p), None, grad)])([0.5], [out] if coupled else None)
    assert bool((out == (-0.5 if coupled else 0.5)).all())
    assert poison[:100].isnan().all()
    assert poison[1500:].isnan().all()


def test_what_it_does_not_take():
    p = torch.randn(8, 6, device=DEVICE)
    assert takes(Pulled(0, p, p.double().float()))
    assert takes(Pulled(0, p, torch.randn(6, 8, device=DEVICE).t()))
    assert not takes(Pulled(0, p.double(), p))
    assert not takes(Pulled(0, p, p.double()))
    assert not takes(Pulled(0, p[:, ::2], p[:, ::2].clone()))
    assert not takes(Pulled(0, p[:1].expand(8, 6), p))
    assert not takes(Pulled(0, p, p, None, torch.randn(6, 8, device=DEVICE).t()))
    assert not takes(Pulled(0, p, p, None, p.to_sparse()))
    assert not takes(Pulled(0, p, p.to("meta")))
    PullStep([Pulled(0, p[:0], p[:0])])([0.1])  # nothing to do


SETS = {
    "l2": [L2SP(20.0)],
    "ewc": [EWC(20.0)],
    "l2 coupled": [L2SP(10.0, coupled=True)],
    "ewc coupled": [EWC(10.0, coupled=True)],
    "several": [EWC(9.0), L2SP(2.0, coupled=True), L2SP(5.0), MAS(9.0)],
    "with slow ones": [L1SP(0.1), L2SP(20.0), SFA(every=0.5), L1SP(0.1, coupled=True)],
    "averaged": [SFA(every=0.25), L2SP(20.0)],
}


def weights_after(updates, penalties, dtype, cls=torch.optim.SGD, awkward=False, **options):
    """Two groups with learning rates of their own, one of them without a gradient at times."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(n, m) for n, m in [(40, 30), (30, 9), (9, 1)]))
    model = model.to(DEVICE, dtype)
    named = list(model.named_parameters())
    rates = {name: 5 * torch.rand_like(p, dtype=F32) for name, p in named}
    anchors = Reference.of(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape).to(p))
    groups = [{"params": named[:3]}, {"params": named[3:], "lr": 3e-3}]
    optimizer = cls(groups, lr=1e-2, **options)
    attach_penalties(optimizer, penalties, anchors, Reference(rates), total_updates=updates)
    generator = torch.Generator().manual_seed(1)
    for t in range(updates):
        x = torch.randn(8, 40, generator=generator).to(DEVICE, dtype)
        model(x).pow(2).mean().backward()
        if awkward and t % 3 == 1:
            model[1].weight.grad = None
            optimizer.param_groups[0]["lr"] *= 0.5
        if awkward and t == 4:  # as a host may do: elsewhere, and its gradients otherwise
            model[0].weight.data = model[0].weight.data.clone()
            grad = model[0].weight.grad
            model[0].weight.grad = grad.t().contiguous().t()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


ATTACHED = list(itertools.product(SETS, [F32, BF16], [False, True]))
SAMPLE = [(n, d, a) for n, d, a in ATTACHED if a and (d == F32 or n == "averaged")]


@pytest.mark.parametrize(("name", "dtype", "awkward"), sampled(ATTACHED, SAMPLE))
def test_attached_penalties_take_it(name, dtype, awkward, monkeypatch):
    penalties = SETS[name]
    calls, step = [], PullStep.__call__
    monkeypatch.setattr(PullStep, "__call__", lambda *args: calls.append(step(*args)))
    kernel = weights_after(8, penalties, dtype, awkward=awkward)
    assert bool(calls) == (not any(isinstance(p, L1SP) for p in penalties))
    calls.clear()
    monkeypatch.setattr("holdfast._optim.penalties.available", lambda _: False)
    plain = weights_after(8, penalties, dtype, awkward=awkward)
    free = weights_after(8, [], dtype, awkward=awkward)
    assert not calls
    room = {"atol": 1e-6, "rtol": 1e-5} if dtype == F32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(kernel, plain, **room)
    assert float((plain - free).abs().max()) > 0.1


@pytest.mark.parametrize("penalty", [L2SP(3.0), L2SP(3.0, coupled=True)], ids=repr)
def test_gradients_go_up_with_maximize(penalty, monkeypatch):
    kernel = weights_after(4, [penalty], F32, torch.optim.AdamW, maximize=True)
    monkeypatch.setattr("holdfast._optim.penalties.available", lambda _: False)
    plain = weights_after(4, [penalty], F32, torch.optim.AdamW, maximize=True)
    torch.testing.assert_close(kernel, plain, atol=1e-6, rtol=1e-5)


def test_a_model_that_is_cast_is_planned_anew():
    """Its parameters are the same objects, in another dtype."""
    model = torch.nn.Linear(30, 20).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach_penalties(optimizer, [L2SP(5.0)], Reference.of(model))
    star = [p.detach().clone() for p in model.parameters()]
    for dtype in (F32, BF16):
        model.to(dtype)
        for p, s in zip(model.parameters(), star, strict=True):
            p.data.copy_(s + 1)
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for p, s in zip(model.parameters(), star, strict=True):
            exact = 0.5 * (s + 1).to(dtype).double() + 0.5 * s.double()
            assert_rounded_once(p.detach(), exact)


def test_gradients_that_are_still_scaled(monkeypatch):
    for use in (True, False):
        monkeypatch.setattr("holdfast._optim.penalties.available", lambda _, use=use: use)
        p = torch.nn.Parameter(torch.ones(600, device=DEVICE))
        optimizer = torch.optim.SGD([("p", p)], lr=0.1, fused=True)
        star = Reference({"p": torch.zeros(600, dtype=F16, device=DEVICE)})
        attach_penalties(optimizer, [L2SP(2.0, coupled=True)], star)
        p.grad = torch.full_like(p, 8.0)
        optimizer.grad_scale = torch.tensor(8.0, device=DEVICE)
        optimizer.found_inf = torch.zeros((), device=DEVICE)
        optimizer.step()
        torch.testing.assert_close(p.detach(), torch.full_like(p, 1 - 0.1 * (1 + 2)))
