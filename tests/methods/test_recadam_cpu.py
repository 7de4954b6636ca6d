"""RecAdam's fused step on the CPU by a kernel in C, beside the same step by torch's operations."""

import io
import logging
import multiprocessing
import shutil
import sys

import pytest
import torch

from golden.recadam import Twin
from holdfast import RecAdam
from holdfast.anneal import Constant
from holdfast.kernels import compiled, recadam_cpu
from methods.fused_steps import (
    check_that_autograd_knows_of_the_change,
    check_that_nothing_around_is_touched,
    draw,
    run,
)

SHAPES = [(), (1,), (0, 5), (63,), (64,), (7, 33), (100_003,)]
#: Everything that the kernel distinguishes.
CASES = {
    "plain": {},
    "maximize": {"maximize": True},
    "weight decay": {"weight_decay": 0.1},
    "weight decay where λ is too small to divide by": {
        "weight_decay": 0.1, "anneal": Constant(1e-9),
    },
    "bfloat16 anchors": {"anchor_dtype": torch.bfloat16},
    "importance": {"weighted": True},
    "importance and bfloat16 anchors": {"weighted": True, "anchor_dtype": torch.bfloat16},
    "a strong pull": {"gamma": 100.0},
    "a clamped pull": {"gamma": 1e6, "weighted": True},
    "short averages": {"betas": (0.3, 0.5)},
}  # fmt: skip
#: The kernel leaves these to torch's operations.
OTHERS = {
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16 anchors": {"anchor_dtype": torch.float16},
    "moments of another dtype": {"state_dtype": torch.float64},
    "rates on the device": {"capturable": True},
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:lr.gamma"),  # the clamped pull
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("cc") is None, reason="needs a C compiler"
    ),
]


def by_torch(monkeypatch, *args, **options):
    with monkeypatch.context() as patch:
        patch.setattr(recadam_cpu, "library", lambda _: None)
        return run(*args, **options)


def close(ours, theirs, **tolerances):
    for a, b in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(a, b, **tolerances)
    for a, b in zip(ours[1], theirs[1], strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(a[key], b[key], **tolerances)


@pytest.mark.parametrize("case", CASES)
def test_the_step_of_torchs_operations(monkeypatch, count_calls, case):
    ours = run(SHAPES, **CASES[case])
    assert not count_calls
    theirs = by_torch(monkeypatch, SHAPES, **CASES[case])
    assert count_calls
    close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", OTHERS)
def test_what_it_does_not_support(monkeypatch, case):
    close(
        run(SHAPES, **OTHERS[case]), by_torch(monkeypatch, SHAPES, **OTHERS[case]), rtol=0, atol=0
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_the_twin(weighted):
    shape = (4097,)
    (p,), _ = run([shape], weighted=weighted, weight_decay=0.1)
    f = draw(shape, 200, torch.float32).abs().double() if weighted else 1.0
    twin = Twin(*(draw(shape, seed, torch.float32).double() for seed in (0, 100)))
    for t in range(4):
        g = draw(shape, 1000 * (t + 1), torch.float32).double()
        twin.update(g, lr=1e-2, lam=0.3, gamma=20.0, eps=1e-4, wd=0.1, F=f)
    torch.testing.assert_close(p.double(), twin.theta, rtol=0, atol=2e-6)


def test_the_number_of_threads_changes_nothing():
    threads = torch.get_num_threads()
    found = []
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            found.append(run(SHAPES, weighted=True))
    finally:
        torch.set_num_threads(threads)
    close(found[1], found[0], rtol=0, atol=0)
    close(found[2], found[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "neutral", [{"gamma": 0.0}, {"anneal": Constant(1.0)}, {"lr": 0.0}], ids=str
)
def test_without_a_pull_it_is_torchs(count_calls, neutral):
    run(SHAPES, steps=1, **neutral)
    assert len(count_calls) == 1


@pytest.mark.parametrize("same", [True, False], ids=["laid out alike", "laid out differently"])
@pytest.mark.parametrize("which", ["gradient", "anchor"])
def test_layouts(count_calls, which, same):
    def transposed(t):
        return t.t().contiguous().t()

    start, anchor, grad = (draw((9, 130), seed, torch.float32) for seed in range(3))
    found = []
    for lay in (transposed, lambda t: t):
        p = torch.nn.Parameter(lay(start.clone()))
        laid = {"anchor": anchor, "gradient": grad}
        laid = {name: lay(t) if same or name != which else t for name, t in laid.items()}
        opt = RecAdam(
            [("p", p)], lr=1e-2, gamma=20.0, anneal=Constant(0.3), anchors={"p": laid["anchor"]},
            fused=True,
        )  # fmt: skip
        p.grad = laid["gradient"]
        opt.step()
        found.append(p.detach())
        if lay is transposed:
            assert bool(count_calls) != same
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_parameters_that_move_and_gradients_that_come_and_go():
    """The kernel has addresses: a plan of the last step must not outlive its tensors."""

    def trained(moved, **options):
        params = [torch.nn.Parameter(draw((257,), i, torch.float32)) for i in range(3)]
        opt = RecAdam(params, lr=1e-2, gamma=20.0, anneal=Constant(0.3), **options)
        for t in range(6):
            for i, p in enumerate(params):
                if moved:
                    p.data = p.data.clone()
                p.grad = draw((257,), 10 * t + i, torch.float32) if (t + i) % 3 else None
            opt.step()
            if t == 3:
                saved = io.BytesIO()
                torch.save(opt.state_dict(), saved)
                saved.seek(0)
                opt.load_state_dict(torch.load(saved))
        return [p.detach() for p in params]

    expected = trained(moved=False, foreach=False, fused=False)
    for moved in (False, True):
        torch.testing.assert_close(trained(moved, fused=True), expected, rtol=1e-6, atol=1e-6)


def test_nothing_around_a_parameter_is_touched():
    check_that_nothing_around_is_touched(966)


def test_autograd_knows_that_the_weights_changed(count_calls):
    check_that_autograd_knows_of_the_change(100)
    assert not count_calls


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such-compiler -x", "there is no 'no-such-compiler'"), ("false", "non-zero exit status")],
)
def test_without_a_working_compiler(monkeypatch, caplog, count_calls, compiler, reason):
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(recadam_cpu, "library", compiled._compiled.__wrapped__)
    with caplog.at_level(logging.INFO, logger="holdfast"):
        run([(64,)], steps=1)
    assert count_calls == [64]
    (line,) = caplog.messages
    assert line.startswith("torch's operations are used, not recadam_cpu.c")
    assert reason in line


def _in_a_child(queue):
    torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
    (p,), _ = run([(4097,)])
    queue.put(p.sum().item())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process():
    (p,), _ = run([(4097,)])
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_a_child, args=(queue,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == p.sum().item()
