"""Anchors in CPU memory, fetched while the backward pass runs: against those on the GPU."""

import copy

import pytest
import torch
from torch import nn

from holdfast import RecAdam
from holdfast.anneal import Constant, Sigmoid
from methods.fetching_cuda import (
    KINDS,
    NEEDS_A_GPU,
    SETTINGS,
    SMALL,
    anchors_of,
    assert_same,
    backward,
    fetchings,
    make,
    make_model,
    train,
    under_way,
)

pytestmark = NEEDS_A_GPU


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
    assert {a.dtype for a in opt._anchors.values[0]} == {torch.bfloat16}
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
