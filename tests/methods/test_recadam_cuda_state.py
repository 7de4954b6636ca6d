"""What a run keeps on a CUDA device: moments of 8 bits, parameters that move, graphs in turns."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast import RecAdam
from holdfast.anneal import Constant
from methods.on_cuda import AMP, SETTINGS, make, set_gradients, tensors, worst
from methods.problems import PATHS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("capturable", [False, True])
def test_8_bits_on_both_devices(dtype, stochastic, capturable):
    """The same codes, but for a few that lie on the edge; the random bits are the same."""
    pytest.importorskip("triton")
    start, anchor = torch.randn(3, 1000).to(dtype), torch.randn(3, 1000).to(dtype)
    runs = []
    for device in ("cpu", "cuda"):
        p = torch.nn.Parameter(start.clone().to(device))
        opt = RecAdam(
            [("p", p)], anchors={"p": anchor.to(device)}, state_dtype="8bit",
            stochastic_rounding=stochastic, capturable=capturable and device == "cuda", **SETTINGS,
        )  # fmt: skip
        runs.append((p, opt))
    (p, opt), (q, other) = runs
    for t in range(12):
        grad = torch.randn(3, 1000, generator=torch.Generator().manual_seed(t)).to(dtype)
        p.grad, q.grad = grad.clone(), grad.cuda()
        opt.step(), other.step()
        for name in ("exp_avg", "exp_avg_sq"):
            mine, theirs = opt.state[p][name].int(), other.state[q][name].cpu().int()
            assert (mine != theirs).float().mean() < 0.02, t
            # The largest of each block is exact, though a GPU's division may not be.
            most = 127 if name == "exp_avg" else 255
            assert all(int((c & most).max()) == most for c in theirs.flatten().split(256)), t
        apart = (p.detach().double() - q.detach().cpu().double()).abs()
        if dtype == torch.float32:
            assert apart.max() < 1e-4, t
        else:
            assert (apart > 0).double().mean() < 0.02, t
        with torch.no_grad():  # from the same place again: what differs is one step
            q.copy_(p)
            for name, tensor in other.state[q].items():
                tensor.copy_(opt.state[p][name])


def test_8_bits_learn_as_on_the_cpu():
    results = []
    for device in ("cpu", "cuda"):
        p = torch.nn.Parameter(torch.zeros(5000, device=device))
        opt = RecAdam([p], lr=1e-2, gamma=1.0, anneal=Constant(0.9), state_dtype="8bit")
        for t in range(40):
            grad = torch.randn(5000, generator=torch.Generator().manual_seed(t)) + 0.3
            p.grad = grad.to(device)
            opt.step()
        results.append(p.detach().cpu())
    assert (results[0] - results[1]).abs().mean() < 0.05 * results[0].abs().mean()


def test_a_state_of_8_bits_goes_on_on_another_device(tmp_path):
    params, opt = make(torch.float32, state_dtype="8bit", fused=True)
    for t in range(4):
        set_gradients(params, t)
        opt.step()
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    others, again = make(torch.float32, state_dtype="8bit", fused=True)
    with torch.no_grad():
        for a, b in zip(others, params, strict=True):
            a.copy_(b)
    again.load_state_dict(torch.load(tmp_path / "opt.pt", weights_only=True, map_location="cpu"))
    for t in range(4, 8):
        set_gradients(params, t), set_gradients(others, t)
        opt.step(), again.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


MOVES = {
    "new memory": lambda p: p.data.clone(),
    "to the host and back": lambda p: p.data.cpu().cuda(),
    "one buffer": None,
    "half": lambda p: p.data.bfloat16(),
    "double": lambda p: p.data.double(),
}


@pytest.mark.parametrize("how", MOVES)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_parameters_that_are_moved_on_the_way(how, options):
    runs = [make(torch.float32, **options), make(torch.float32, fused=False, foreach=False)]
    for params, opt in runs:
        for t in range(10):
            if t == 5:
                old = [p.data for p in params]
                if how == "one buffer":
                    buffer = torch.cat([p.data.flatten() for p in params])
                    sizes = [p.numel() for p in params]
                    for p, part in zip(params, buffer.split(sizes), strict=True):
                        p.data = part.view(p.shape)
                else:
                    for p in params:
                        p.grad, p.data = None, MOVES[how](p)
                for value in old:
                    value.fill_(torch.nan)  # nobody may read it now
            set_gradients(params, t)
            opt.step()
        assert all(value.isnan().all() for value in old)
        assert {s["exp_avg"].dtype for s in opt.state.values()} == {torch.float32}
    apart = 2**-5 if how == "half" else 1e-5
    assert worst(runs[0][0], [p.detach().cpu().double() for p in runs[1][0]]) <= apart


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("state_dtype", [None, torch.float64, "8bit"], ids=str)
def test_a_parameter_that_joins_later(options, state_dtype):
    """And after a resume, which puts counts of steps onto the device for fused=True."""
    extra = {"state_dtype": state_dtype, **options}
    params, opt = make(torch.float32, **extra)
    plain_options = {"fused": False, "foreach": False}
    others, plain = make(torch.float32, **plain_options)
    for t in range(1, 9):
        if t == 4:
            opt.load_state_dict(opt.state_dict())
        for ps in (params, others):
            set_gradients(ps, t)
            if t < 5:
                ps[2].grad = ps[3].grad = None
        opt.step(), plain.step()
    assert [int(opt.state[p]["step"]) for p in params] == [8, 8, 4, 4, 8, 8]
    apart = 2e-2 if state_dtype == "8bit" else 1e-5
    assert worst(params, [p.detach().cpu().double() for p in others]) <= apart


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"], ids=str)
def test_random_bits_differ_between_updates(path, capturable, state_dtype):
    p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device="cuda"))
    opt = RecAdam(
        [p], lr=2.0**-10, gamma=0.0, anneal=Constant(0.999), state_dtype=state_dtype,
        stochastic_rounding=True, capturable=capturable, **PATHS[path],
    )  # fmt: skip
    seen = []
    for _ in range(4):
        p.data.fill_(1.0)
        p.grad = torch.ones_like(p)
        opt.step()
        seen.append((p.detach() != 1).float())
    together = torch.corrcoef(torch.stack(seen)).cpu()
    assert (together - torch.eye(4)).abs().max() < 0.1


def test_capturable_never_lets_go():
    params, opt = make(torch.float32, anneal=Constant(1.0), release=True, capturable=True)
    for t in range(3):
        set_gradients(params, t)
        opt.step()
    assert opt.distance() > 0


@pytest.mark.parametrize("fused", [None, True])
def test_released_it_is_adamw(fused):
    params, opt = make(torch.float32, anneal=Constant(1.0), release=True, fused=fused)
    others = [torch.nn.Parameter(t.cuda()) for t in tensors(0, torch.float32)]
    adamw = torch.optim.AdamW(others, lr=1e-2, weight_decay=0.0, fused=fused)
    for t in range(20):
        set_gradients(params, t), set_gradients(others, t)
        opt.step(), adamw.step()
    with pytest.raises(RuntimeError, match="released"):
        opt.distance()
    apart = worst(params, [p.detach().cpu().double() for p in others])
    assert apart <= (0.0 if fused else 5e-6)


def test_release_frees_the_memory():
    p = torch.nn.Parameter(torch.ones(4096, 4096, device="cuda"))
    opt = RecAdam([p], release=True, **(SETTINGS | {"anneal": Constant(1.0)}))
    p.grad = torch.ones_like(p)
    before = torch.cuda.memory_allocated()
    opt.step()  # makes two moments, and lets the anchors go
    assert torch.cuda.memory_allocated() - before < 1.1 * p.nbytes


def test_a_group_on_two_devices():
    """In a process of its own: a kernel that reads CPU memory takes all down with it."""
    code = """
import torch
from holdfast import RecAdam
from holdfast.anneal import Constant
params = [torch.nn.Parameter(torch.ones(300, device=d)) for d in ("cuda", "cpu", "cuda", "cpu")]
opt = RecAdam(params, lr=1e-2, gamma=1.0, anneal=Constant(0.9))
for _ in range(3):
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
torch.cuda.synchronize()
values = [p.detach().cpu() for p in params]
assert all(torch.allclose(v, values[0], atol=1e-6) and (v < 0.99).all() for v in values), values
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


# Last, as a capture that fails may spoil what comes after it.


@pytest.mark.parametrize("extra", [{}, {"state_dtype": "8bit"}], ids=str)
def test_graphs_and_eager_steps_take_turns(extra):
    """Each graph has gradients of its own, which lie elsewhere."""
    pytest.importorskip("triton")
    options = {"lr": torch.tensor(1e-2, device="cuda"), **AMP, **extra}
    params, opt = make(torch.float32, **options)
    homes = [[torch.zeros_like(p) for p in params] for _ in range(3)]

    def live_in(home, t=None):
        for p, g in zip(params, homes[home], strict=True):
            p.grad = g
        if t is not None:
            set_gradients(params, t)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        live_in(0, 0)
        opt.step()
    torch.cuda.current_stream().wait_stream(side)
    graphs = []
    for home in (0, 1):
        live_in(home)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            opt.step()
    others, plain = make(torch.float32, **{**options, "lr": options["lr"].clone()})
    set_gradients(others, 0)
    plain.step()
    for t, home in enumerate([0, 1, 0, 2, 0, 2, 1, 1, 0, 2, 2, 0], 1):
        live_in(home, t)
        if home == 2:
            opt.step()
        else:
            graphs[home].replay()
        set_gradients(others, t)
        plain.step()
        torch.cuda.synchronize()
        assert worst(params, [p.detach().cpu().double() for p in others]) < 1e-6, t
    assert opt.recall_state()["updates"] == 13


def test_a_whole_update_in_a_graph():
    """Forward, backward and step: gradients are allocated in the graph's own memory, twice."""
    lr = torch.tensor(1e-2, device="cuda")
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1)
        ).cuda()
        models.append(model)
        optimizers.append(RecAdam(model.parameters(), **(SETTINGS | {"lr": lr.clone()}), **AMP))
    (model, other), (opt, plain) = models, optimizers
    x = torch.zeros(16, 20, device="cuda")

    def give(t):
        x.copy_(torch.randn(16, 20, generator=torch.Generator().manual_seed(t)))

    def update(model, opt):
        model(x).square().mean().backward()
        opt.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for t in range(3):
            give(t)
            opt.zero_grad()
            update(model, opt)
    torch.cuda.current_stream().wait_stream(side)
    graphs = []
    for _ in range(2):
        opt.zero_grad()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            update(model, opt)
    for t in range(3, 12):
        give(t)
        graphs[t % 2].replay()
    for t in range(12):
        give(t)
        plain.zero_grad()
        update(other, plain)
    torch.cuda.synchronize()
    assert opt.recall_state()["updates"] == 12
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=0)
