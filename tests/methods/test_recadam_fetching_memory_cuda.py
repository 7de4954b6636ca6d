"""Anchors in CPU memory: what they take on the GPU, hooks, copies, graphs."""

import copy
import gc

import pytest
import torch

from holdfast import RecAdam
from holdfast.anneal import Linear
from holdfast.kernels import fetching
from methods.fetching_cuda import (
    NEEDS_A_GPU,
    SETTINGS,
    WIDTH,
    anchors_of,
    assert_same,
    backward,
    fetchings,
    make,
    make_model,
    train,
)

pytestmark = NEEDS_A_GPU


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
