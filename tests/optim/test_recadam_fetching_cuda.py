"""Anchors in the host's memory, fetched while the backward pass runs: against those on the GPU."""

import copy
import gc

import pytest
import torch
from torch import nn

from holdfast import Constant, Linear, RecAdam, Reference, Sigmoid
from holdfast.kernels import available, fetching

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not available(torch.device("cuda")),
    reason="needs a CUDA device and Triton",
)

WIDTH = 300
SETTINGS = {"lr": 1e-2, "gamma": 20.0, "anneal": Sigmoid(0.3, 6)}
SMALL = 64 * 2**10  # bytes of a chunk: most tensors are larger
KINDS = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {"state_dtype": torch.float32}),
    "weight decay": (torch.float32, {"weight_decay": 0.1, "maximize": True}),
    "capturable": (torch.float32, {"capturable": True}),
}


@pytest.fixture(params=["one chunk", "many chunks"])
def chunk(request, monkeypatch):
    if request.param == "many chunks":
        monkeypatch.setattr(fetching, "CHUNK", SMALL)
    return fetching.CHUNK


def make_model(dtype=torch.float32, width=WIDTH, layers=4):
    torch.manual_seed(0)
    body = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*body, nn.Linear(width, 10)).to("cuda", dtype)


def anchors_of(model, where, tmp_path=None):
    reference = Reference.of(model)
    if where == "pinned":
        return reference.pinned()
    if where == "pinned, in half":
        return Reference({n: t.bfloat16() for n, t in reference.items()}).pinned()
    if where == "half":
        return Reference({n: t.bfloat16() for n, t in reference.items()})
    if where == "host":
        return Reference.of(model, device="cpu")
    if where == "mapped":
        reference.save(tmp_path / "model.safetensors")
        return Reference.open(tmp_path)
    return reference


def make(where, dtype=torch.float32, tmp_path=None, **options):
    model = make_model(dtype)
    anchors = anchors_of(model, where, tmp_path)
    with torch.no_grad():  # away from them
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model, RecAdam(model.named_parameters(), anchors=anchors, **(SETTINGS | options))


def backward(model, t, size=32):
    first = next(model.parameters())
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(size, first.shape[1], generator=generator).to(first)
    model(x).square().mean().backward()


def train(model, opt, start, stop, accumulate=lambda t: 1):
    for t in range(start, stop):
        for i in range(accumulate(t)):
            backward(model, 10 * t + i)
        opt.step()
        opt.zero_grad()


def assert_same(ours, theirs):
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def fetchings(opt):
    return [f for _, update in opt._updates.values() for f in update._kernel._fetching]


def under_way(opt):
    return sum(len(f._fetched) for f in fetchings(opt))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["pinned", "host", "mapped"])
def test_the_same_weights_to_the_bit(where, kind, chunk, tmp_path):
    dtype, options = KINDS[kind]
    ours, opt = make(where, dtype, tmp_path, **options)
    theirs, plain = make("device", dtype, **options)
    start = copy.deepcopy(ours)
    train(ours, opt, 0, 8)
    train(theirs, plain, 0, 8)
    assert fetchings(opt)
    assert not fetchings(plain)
    assert len(fetchings(opt)[0].chunks) > (10 if chunk == SMALL else 0)
    assert_same(ours, theirs)
    assert opt.distance() == pytest.approx(plain.distance(), rel=1e-6)
    moved = zip(ours.parameters(), start.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_anchors_in_half_precision(dtype, chunk):
    ours, opt = make("pinned, in half", dtype, state_dtype=torch.float32)
    theirs, plain = make("half", dtype, state_dtype=torch.float32)
    train(ours, opt, 0, 6)
    train(theirs, plain, 0, 6)
    assert {a.dtype for a in opt._anchors[0]} == {torch.bfloat16}
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", ["8 bits", "at random"])
def test_random_bits_do_not_depend_on_where_anchors_are(kind, chunk):
    dtype = torch.bfloat16 if kind == "at random" else torch.float32
    options = {"state_dtype": "8bit"}
    if kind == "at random":
        options = {"state_dtype": torch.float32, "stochastic_rounding": True}
    ours, opt = make("pinned", dtype, **options)
    theirs, plain = make("device", dtype, **options)
    train(ours, opt, 0, 4)
    train(theirs, plain, 0, 4)
    assert_same(ours, theirs)


@pytest.mark.parametrize("anneal", [Sigmoid(0.3, 6), Constant(0.3)], ids=str)
def test_an_importance_goes_with_them(anneal, chunk):
    torch.manual_seed(1)
    importance = {n: 3 * torch.rand_like(p) for n, p in make_model().named_parameters()}
    ours, opt = make("pinned", importance=importance, anneal=anneal)
    theirs, plain = make("device", importance=importance, anneal=anneal)
    train(ours, opt, 0, 5)
    train(theirs, plain, 0, 5)
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    "accumulate", [lambda t: 3, lambda t: [1, 3, 3, 2, 1, 4, 4, 1][t]], ids=["3", "varying"]
)
def test_several_backward_passes_an_update(accumulate, chunk):
    ours, opt = make("pinned")
    theirs, plain = make("device")
    train(ours, opt, 0, 8, accumulate)
    train(theirs, plain, 0, 8, accumulate)
    assert_same(ours, theirs)


def test_they_come_in_the_last_backward_pass():
    """Before it, activations need the memory."""
    model, opt = make("pinned")
    train(model, opt, 0, 2, lambda t: 3)
    for i in range(3):
        assert under_way(opt) == 0
        backward(model, i)
    assert under_way(opt) > 0
    opt.step()
    assert under_way(opt) == 0


def test_they_come_while_the_backward_pass_runs(chunk):
    model, opt = make("pinned")
    train(model, opt, 0, 2)
    backward(model, 2)
    assert 0 < under_way(opt) <= len(fetchings(opt)[0].chunks)
    opt.zero_grad()
    assert under_way(opt) == 0


@pytest.mark.parametrize("how", ["before", "after"])
def test_parameters_without_gradients_now_and_then(how, chunk):
    """They leave the update: frozen before the backward pass, or skipped when it is done."""
    runs = [make("pinned"), make("device")]
    for model, opt in runs:
        params = list(model.parameters())
        for t in range(9):
            without = [params[i] for i in ([], [2, 3], [2], [], [0], [], [7, 1], [7, 1], [])[t]]
            for p in without if how == "before" else ():
                p.requires_grad_(False)
            backward(model, t)
            for p in without:
                p.grad = None
                p.requires_grad_(True)
            opt.step()
            opt.zero_grad()
    assert_same(runs[0][0], runs[1][0])
    params = list(runs[0][0].parameters())
    assert [int(runs[0][1].state[p]["step"]) for p in params[:4]] == [8, 7, 7, 8]


@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_gradients_that_are_dropped_without_a_step(by, chunk):
    runs = [make("pinned"), make("device")]
    for model, opt in runs:
        train(model, opt, 0, 2)
        for t in range(2, 9):
            backward(model, t)
            if t % 3:
                opt.step()
            (opt if by == "optimizer" else model).zero_grad()
    assert_same(runs[0][0], runs[1][0])


def test_a_step_on_another_stream(chunk):
    ours, opt = make("pinned")
    theirs, plain = make("device")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(ours, opt, 0, 6)
    torch.cuda.current_stream().wait_stream(side)
    train(theirs, plain, 0, 6)
    assert_same(ours, theirs)


def test_weights_that_lie_otherwise_than_their_anchors(chunk):
    runs = []
    for where in ("pinned", "device"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(16, 48, 5), nn.Tanh(), nn.Conv2d(48, 32, 3)).cuda()
        anchors = anchors_of(model, where)
        model = model.to(memory_format=torch.channels_last)
        opt = RecAdam(model.named_parameters(), anchors=anchors, **SETTINGS)
        for t in range(5):
            generator = torch.Generator().manual_seed(t)
            x = torch.randn(4, 16, 9, 9, generator=generator).cuda()
            # Not by the model: cuDNN may sum in another order each time.
            for p in model.parameters():
                p.grad = torch.empty_like(p).copy_(x.sum() * torch.sin(t + 50 * p.detach()))
            opt.step()
        runs.append(model)
    assert not runs[0][0].weight.is_contiguous()
    assert_same(*runs)


def test_resume_to_the_bit(tmp_path, chunk):
    model, opt = make("pinned")
    train(model, opt, 0, 4)
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "run.pt")
    backward(model, 999)  # fetched for a step that is not made
    opt.load_state_dict(torch.load(tmp_path / "run.pt", weights_only=True)["opt"])
    opt.zero_grad()
    train(model, opt, 4, 8)
    other, again = make("pinned")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["opt"])
    train(other, again, 4, 8)
    assert_same(model, other)


def peak(where, size, layers=24, width=2048):
    """The peak of memory in MiB, beyond what was there before, and the anchors' size."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = make_model(width=width, layers=layers)
    if where == "none":
        groups = [{"params": list(model.named_parameters()), "anchored": False}]
        opt = RecAdam(groups, **SETTINGS)
    else:
        opt = RecAdam(model.named_parameters(), anchors=anchors_of(model, where), **SETTINGS)
    weights = sum(p.nbytes for p in model.parameters())
    x = torch.randn(size, width, device="cuda")
    highest = 0
    for t in range(5):
        if t == 2:
            torch.cuda.reset_peak_memory_stats()
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
        highest = torch.cuda.max_memory_allocated() - before
    torch.cuda.synchronize()
    return highest / 2**20, weights / 2**20


@pytest.mark.parametrize("size", [8192, 8], ids=["activations", "hardly any activations"])
def test_the_peak_of_memory_does_not_have_the_anchors(size):
    without, weights = peak("none", size)
    on_device, _ = peak("device", size)
    pinned, _ = peak("pinned", size)
    assert weights > 380
    assert on_device > without + 0.9 * weights  # or there is nothing to spare
    # In the backward pass SLACK at most, in the step three chunks more.
    room = (fetching.SLACK + (fetching.NEXT + 1) * fetching.CHUNK) / 2**20
    assert pinned < without + room + 16


def test_nothing_is_left_after_a_step(chunk):
    model, opt = make("pinned")
    train(model, opt, 0, 3)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    train(model, opt, 3, 8)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def hooks_of(model):
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def test_hooks_go_with_the_optimizer(chunk):
    model, opt = make("pinned")
    assert hooks_of(model) == 0
    train(model, opt, 0, 3)
    first = hooks_of(model)
    assert first > 0
    for t in range(3, 9):  # they do not pile up when the update is planned anew
        backward(model, t)
        if t % 2:
            model[0].weight.grad = None
        opt.step()
    assert hooks_of(model) <= first + 1
    backward(model, 9)
    del opt
    gc.collect()
    assert hooks_of(model) == 0
    backward(model, 10)


def test_hooks_go_with_the_pull():
    model, opt = make("pinned", anneal=Linear(3), release=True)
    train(model, opt, 0, 2)
    assert hooks_of(model) > 0
    train(model, opt, 2, 5)
    gc.collect()
    assert hooks_of(model) == 0


def test_there_are_no_hooks_for_memory_that_is_not_page_locked(tmp_path):
    model, opt = make("mapped", tmp_path=tmp_path)
    train(model, opt, 0, 2)
    assert hooks_of(model) == 0


@pytest.mark.parametrize("how", ["deepcopy", "anew"])
def test_copies_go_on_alike(how, chunk):
    run = make("pinned")
    train(*run, 0, 3)
    if how == "deepcopy":
        clone = copy.deepcopy(run)
    else:
        clone = make("pinned")
        clone[0].load_state_dict(run[0].state_dict())
        clone[1].load_state_dict(copy.deepcopy(run[1].state_dict()))
    train(*run, 3, 6)
    train(*clone, 3, 6)
    assert_same(run[0], clone[0])


DROPPED = ["another update", "load_state_dict", "the optimizer is deleted"]


@pytest.mark.parametrize("how", DROPPED)
def test_memory_is_nobody_elses_while_a_copy_is_under_way(how, chunk):
    """What was fetched is dropped without a step: the copies must not land in new tensors."""
    model, opt = make("pinned")
    weight = model[0].weight
    for t in range(6):  # everything is compiled, with and without one gradient
        backward(model, t)
        if t == 2:
            weight.grad = None
        opt.step()
        opt.zero_grad()
    streams = [fetched._stream for fetched in fetchings(opt)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(3 * 10**9)  # a busy bus: more than a second
    backward(model, 6)
    sizes = [buffer.numel() for f in fetchings(opt) for buffer, _ in f._fetched.values()]
    assert sizes
    assert not all(stream.query() for stream in streams)  # not there yet
    if how == "another update":
        weight.grad = None
        opt.step()
    elif how == "load_state_dict":
        opt.load_state_dict(opt.state_dict())
    else:
        del opt
        gc.collect()
    probes = []
    for size in sizes * 20:  # who takes the memory that was let go
        probe = torch.empty(size, dtype=torch.uint8, device="cuda")
        probes.append(probe.fill_(123))
    torch.cuda.synchronize()
    assert all(bool((probe == 123).all()) for probe in probes)


def test_an_update_that_changes_under_a_slow_copy_has_the_right_anchors(chunk):
    runs = [make("pinned"), make("device")]
    for model, opt in runs:
        weight = model[0].weight
        for t in range(6):
            backward(model, t)
            if t == 2:
                weight.grad = None
            opt.step()
            opt.zero_grad()
        for fetched in fetchings(opt):
            with torch.cuda.stream(fetched._stream):
                torch.cuda._sleep(10**9)
        backward(model, 6)
        weight.grad = None
        opt.step()
        opt.zero_grad()
        train(model, opt, 7, 9)
    assert_same(runs[0][0], runs[1][0])


# Last, as a capture that fails may spoil what comes after it.


@pytest.mark.parametrize("what", ["the whole update", "the step alone"])
def test_a_captured_graph(what, chunk):
    lr = torch.tensor(1e-2, device="cuda")
    results = []
    for where in ("pinned", "device"):
        model, opt = make(where, lr=lr.clone(), capturable=True)
        x = torch.zeros(32, WIDTH, device="cuda")

        def give(t, x=x):
            x.copy_(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(t)))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for t in range(3):
                give(t)
                opt.zero_grad()
                model(x).square().mean().backward()
                opt.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if what == "the whole update":
            opt.zero_grad()
            with torch.cuda.graph(graph):
                model(x).square().mean().backward()
                opt.step()
        else:
            model.zero_grad(set_to_none=False)
            give(3)
            model(x).square().mean().backward()
            with torch.cuda.graph(graph):
                opt.step()
        for t in range(3, 9):
            give(t)
            if what == "the step alone":
                model.zero_grad(set_to_none=False)
                model(x).square().mean().backward()
            graph.replay()
        torch.cuda.synchronize()
        assert opt.recall_state()["updates"] == 9
        results.append(model)
    for a, b in zip(results[0].parameters(), results[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
