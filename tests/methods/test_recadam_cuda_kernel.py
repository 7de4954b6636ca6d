"""By the kernel: the same rule, without a wait, under scalers, with anchors of one number."""

import pytest
import torch

from holdfast import RecAdam
from holdfast.anneal import Sigmoid
from methods.on_cuda import (
    AMP,
    SETTINGS,
    SHAPES,
    make,
    set_gradients,
    tensors,
    twin_run,
    without_waiting,
    worst,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("wd", [0.0, 0.1])
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("anchor_device", ["cuda", "cpu"])
@pytest.mark.parametrize("capturable", [False, True])
def test_float32_by_the_kernel_follows_the_twin(wd, fused, anchor_device, capturable):
    pytest.importorskip("triton")
    params, opt = make(
        torch.float32, anchor_device, weight_decay=wd, fused=fused, capturable=capturable
    )
    for t in range(1, 61):
        set_gradients(params, t)
        opt.step()
    assert all(plan.kernel is not None for plan in opt._plans.values())
    assert worst(params, twin_run(60, wd, dtype=torch.float32)) <= 3e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_by_the_kernel_follows_the_twin(dtype):
    params, opt = make(dtype, state_dtype=torch.float32)
    for t in range(1, 41):
        set_gradients(params, t)
        opt.step()
    apart = 2**-5 if dtype == torch.bfloat16 else 2**-8
    assert worst(params, twin_run(40, dtype=dtype)) <= apart


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("state_dtype", [None, "8bit"], ids=str)
def test_a_step_does_not_wait_for_the_gpu(options, state_dtype):
    pytest.importorskip("triton")
    params, opt = make(torch.float32, state_dtype=state_dtype, **options)
    for t in range(8):
        grads = [g.cuda() for g in tensors(100 + t, torch.float32)]  # anew each time
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        if t < 2:
            opt.step()
            continue
        with without_waiting():
            opt.step()
    assert opt.recall_state()["updates"] == 8


def scaled_step(params, opt, scaler, t, infinite=False, unscale=False):
    opt.zero_grad()
    grads = tensors(100 + t, torch.float32)
    loss = sum((p * g.cuda()).sum() for p, g in zip(params, grads, strict=True))
    scaler.scale(loss).backward()
    if infinite:
        params[3].grad[1, 2] = torch.inf
    if unscale:
        scaler.unscale_(opt)
    with without_waiting():
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled before"])
@pytest.mark.parametrize("extra", [{}, {"state_dtype": "8bit"}, {"weight_decay": 0.1}], ids=str)
def test_under_a_scaler_nothing_waits_and_all_comes_out_as_without(unscale, extra):
    pytest.importorskip("triton")
    params, opt = make(torch.float32, **AMP, **extra)
    assert opt._step_supports_amp_scaling
    set_gradients(params, 100)
    opt.step()  # plans the update, which reads the counts of steps
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=1000)
    good = 1
    for t in range(1, 9):
        infinite = t in (1, 4, 5)
        before = [p.detach().clone() for p in params]
        scaled_step(params, opt, scaler, good, infinite, unscale)
        same = [torch.equal(p, b) for p, b in zip(params, before, strict=True)]
        assert same == [infinite] * len(params), t
        good += not infinite
    assert scaler.get_scale() == 2.0**8 / 8  # halved three times
    assert opt.recall_state()["updates"] == good == 6
    assert {int(s["step"]) for s in opt.state.values()} == {6}
    others, plain = make(torch.float32, **AMP, **extra)
    set_gradients(others, 100)
    plain.step()
    for t in range(1, 6):
        set_gradients(others, t)
        plain.step()
    # The scale is a power of 2, by which nothing is rounded. But it is another kernel, whose
    # compiler may fuse other sums and products.
    for p, other in zip(params, others, strict=True):
        torch.testing.assert_close(p, other, atol=1e-6, rtol=1e-6)


def test_under_a_scaler_what_is_not_anchored():
    """Which fused=True leaves to torch's kernel, if it is all of a group."""
    params = [torch.nn.Parameter(t.cuda()) for t in tensors(0, torch.float32)]
    groups = [{"params": params[:3], "anchored": False}, {"params": params[3:]}]
    opt = RecAdam(groups, **SETTINGS, **AMP)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
    set_gradients(params, 1)
    opt.step()
    for t in range(4):
        before = [p.detach().clone() for p in params]
        scaled_step(params, opt, scaler, t, infinite=bool(t % 2))
        moved = [not torch.equal(p, b) for p, b in zip(params, before, strict=True)]
        assert moved == [t % 2 == 0] * len(params)
    assert {int(s["step"]) for s in opt.state.values()} == {3}
    assert opt.recall_state()["updates"] == 3


def test_training_in_float16_under_a_scaler():
    """A real model under autocast, with clipping, as by torch's own AdamW path."""
    losses = {}
    for name, options in {"kernel": AMP, "torch": {"fused": False, "foreach": True}}.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
        ).cuda()
        opt = RecAdam(model.parameters(), lr=1e-2, gamma=10.0, anneal=Sigmoid(0.3, 10), **options)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)  # overflows at first
        for t in range(60):
            generator = torch.Generator().manual_seed(t)
            x = torch.randn(64, 32, generator=generator).cuda()
            with torch.autocast("cuda", torch.float16):
                loss = (model(x).squeeze(1) - x[:, 0].sin()).square().mean()
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
        assert scaler.get_scale() < 2.0**24
        assert opt.recall_state()["updates"] < 60
        losses[name] = loss.item()
    assert losses["kernel"] == pytest.approx(losses["torch"], rel=0.05)
    assert losses["kernel"] < 0.3


@pytest.mark.parametrize("anchor_device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_anchors_that_are_one_number(anchor_device, dtype):
    """As of LoRA's B: torch.zeros(()).expand(...)."""
    results = []
    for whole in (False, True):
        params = [torch.nn.Parameter(t.cuda()) for t in tensors(0, dtype)]
        zero = torch.zeros((), device=anchor_device)
        anchors = {str(i): zero.expand(s) for i, s in enumerate(SHAPES)}
        if whole:
            anchors = {name: a.clone() for name, a in anchors.items()}
        named = [(str(i), p) for i, p in enumerate(params)]
        opt = RecAdam(named, anchors=anchors, state_dtype=torch.float32, **SETTINGS)
        for t in range(10):
            set_gradients(params, t)
            opt.step()
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("anchor_device", ["cuda", "cpu"])
def test_anchors_that_are_one_number_take_no_memory(anchor_device):
    p = torch.nn.Parameter(torch.ones(4096, 4096, device="cuda"))
    anchor = torch.zeros((), device=anchor_device).expand(p.shape)
    opt = RecAdam([("p", p)], anchors={"p": anchor}, **SETTINGS)
    p.grad = torch.ones_like(p)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    opt.step()
    held = torch.cuda.memory_allocated() - before - 2 * p.nbytes  # the moments
    assert held < p.nbytes / 10
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    opt.step()
    assert torch.cuda.max_memory_allocated() - before < p.nbytes / 10
