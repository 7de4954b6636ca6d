"""The same rule on a CUDA device: paths, graphs, scalers and anchors that live elsewhere."""

import pytest
import torch

from holdfast import Reference
from holdfast.anneal import Constant
from methods.on_cuda import make, set_gradients, tensors, twin_run, worst
from methods.problems import PATHS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("path", [*PATHS, "default"])
@pytest.mark.parametrize("wd", [0.0, 0.1])
@pytest.mark.parametrize("anchor_device", ["cuda", "cpu"])
def test_float64_follows_the_twin(path, wd, anchor_device):
    params, opt = make(anchor_device=anchor_device, weight_decay=wd, **PATHS.get(path, {}))
    for t in range(1, 61):
        set_gradients(params, t)
        opt.step()
    assert worst(params, twin_run(60, wd)) <= 1e-12


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_neutral_pull_is_adamw_to_the_bit(path, dtype):
    shared = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.05, **PATHS[path]}
    params, opt = make(dtype, gamma=0.0, anneal=Constant(1.0), **shared)
    others = [torch.nn.Parameter(t.cuda()) for t in tensors(0, dtype)]
    adamw = torch.optim.AdamW(others, **shared)
    for t in range(20):
        set_gradients(params, t)
        set_gradients(others, t)
        opt.step()
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.parametrize("path", PATHS)
def test_state_in_float32(path):
    params, opt = make(torch.bfloat16, state_dtype=torch.float32, **PATHS[path])
    for t in range(1, 41):
        set_gradients(params, t)
        opt.step()
    assert {s["exp_avg"].dtype for s in opt.state.values()} == {torch.float32}
    # A weight that lies between two bf16 values may be rounded the other way: one ulp at 4.
    assert worst(params, twin_run(40, dtype=torch.bfloat16)) <= 2**-5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wd", [0.0, 0.1])
def test_a_captured_graph_anneals_as_it_replays(path, wd):
    lr = torch.tensor(1e-2, device="cuda")
    params, opt = make(lr=lr, capturable=True, weight_decay=wd, **PATHS[path])
    set_gradients(params, 1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        opt.step()  # makes the state
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    for t in range(2, 61):
        set_gradients(params, t)
        graph.replay()
    torch.cuda.synchronize()
    assert opt.recall_state()["updates"] == 60
    # torch keeps capturable steps and rates in float32.
    assert worst(params, twin_run(60, wd)) < 1e-5


def test_lambda_zero_is_no_nan_in_a_captured_step():
    params, opt = make(capturable=True, anneal=Constant(0.0), lr=torch.tensor(1e-2, device="cuda"))
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("path", PATHS)
def test_a_step_skipped_by_the_scaler_changes_nothing(path):
    params, opt = make(torch.float32, **PATHS[path])
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
    for t in range(4):
        before = [p.detach().clone() for p in params]
        opt.zero_grad()
        loss = sum(
            (p * g.cuda()).sum() for p, g in zip(params, tensors(t, torch.float32), strict=True)
        )
        scaler.scale(loss).backward()
        if t % 2:
            params[1].grad[0] = torch.inf
        scaler.step(opt)
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        assert same == bool(t % 2)
    assert opt.recall_state()["updates"] == 2


@pytest.mark.parametrize("path", PATHS)
def test_compiled(path):
    torch._dynamo.reset()
    graphs = 0

    def count(graph, _):
        nonlocal graphs
        graphs += 1
        return graph

    params, opt = make(torch.float32, **PATHS[path])
    step = torch.compile(opt.step, backend=count)
    for t in range(1, 41):
        set_gradients(params, t)
        opt.param_groups[0]["lr"] = 1e-2 / t
        step()
    assert graphs <= 2
    others, plain = make(torch.float32, **PATHS[path])
    for t in range(1, 41):
        set_gradients(others, t)
        plain.param_groups[0]["lr"] = 1e-2 / t
        plain.step()
    assert worst(params, [p.detach().cpu().double() for p in others]) < 1e-5


def test_resume_across_devices(tmp_path):
    params, opt = make(torch.float32, fused=True)
    for t in range(5):
        set_gradients(params, t)
        opt.step()
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    others, again = make(torch.float32, fused=True, anchor_device="cpu")
    with torch.no_grad():
        for a, b in zip(others, params, strict=True):
            a.copy_(b)
    again.load_state_dict(torch.load(tmp_path / "opt.pt", weights_only=True, map_location="cpu"))
    for o, p in ((opt, params), (again, others)):
        set_gradients(p, 9)
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_fingerprints_agree_between_devices():
    big = torch.randn(3000, 7000)
    assert Reference({"w": big}).fingerprint() == Reference({"w": big.cuda()}).fingerprint()
