"""RecAdam's fused step on the CPU, part by part: nothing but the order in memory may change."""

import itertools
import multiprocessing
import sys

import pytest
import torch

from golden.recadam import Twin
from holdfast import RecAdam
from holdfast._optim import backends
from holdfast._optim.backends import STRIDE, cache_sized_parts
from holdfast.anneal import Constant
from holdfast.kernels import recadam_cpu
from holdfast.methods import recadam
from matrices import sampled
from methods.fused_steps import (
    check_that_autograd_knows_of_the_change,
    check_that_nothing_around_is_touched,
    draw,
    run,
)

SIZE = 4 * STRIDE
SETTINGS = list(
    itertools.product(
        [torch.float32, torch.float64, torch.bfloat16, torch.float16],
        [{}, {"maximize": True}, {"weight_decay": 0.1}],
    )
)
LENGTHS = [0, 1, 63, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 3 * SIZE + 17, 10 * SIZE + 1]


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(recadam_cpu, "library", lambda _: None)  # as without a C compiler
    monkeypatch.setattr(backends, "SHARE", SIZE // torch.get_num_threads())


def same(ours, theirs):
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert all(torch.equal(a[key], b[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def at_once(monkeypatch, *args, **options):
    """The same by one call for all tensors and a pull after it."""
    with monkeypatch.context() as patch:
        patch.setattr(recadam, "_in_parts", lambda *_: False)
        return run(*args, **options)


class TestParts:
    @pytest.mark.parametrize("length", LENGTHS)
    def test_they_make_up_the_whole(self, length):
        p, step = torch.arange(float(length)), torch.tensor(3.0)
        found = list(cache_sized_parts([[p], [None], [step]], SIZE))
        assert torch.equal(torch.cat([t for column, _, _ in found for t in column]), p)
        for column, nothing, counts in found:
            assert len(column) == 1
            assert nothing == [None]
            assert counts[0] is step
            assert column[0].numel() <= SIZE
            assert column[0].data_ptr() % (STRIDE * 4) == p.data_ptr() % (STRIDE * 4)

    def test_short_ones_go_together(self):
        params = [torch.zeros(SIZE // 4) for _ in range(10)]
        assert [len(part) for (part,) in cache_sized_parts([params], SIZE)] == [4, 4, 2]

    @pytest.mark.parametrize(
        "odd",
        [
            torch.zeros(SIZE, 4).t(),
            torch.zeros(4, 1).expand(4, SIZE),
            torch.zeros(4, SIZE).to_sparse(),
            torch.zeros(4, SIZE, device="meta"),
        ],
        ids=["transposed", "expanded", "sparse", "elsewhere"],
    )
    def test_what_is_not_in_one_piece_stays_whole(self, odd):
        row = (torch.zeros(4, SIZE), odd, torch.tensor(1.0))
        ((p, other, _),) = cache_sized_parts([[t] for t in row], SIZE)
        assert p[0] is row[0]
        assert other[0] is odd

    def test_a_part_for_each_thread(self, monkeypatch):
        monkeypatch.setattr(backends, "SHARE", STRIDE)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        assert len(list(cache_sized_parts([[torch.zeros(8 * STRIDE)]]))) == 4


@pytest.mark.usefixtures("small_parts")
class TestTheSameToTheBit:
    @pytest.mark.parametrize(
        ("dtype", "options"),
        sampled(SETTINGS, [(d, o) for d, o in SETTINGS if not o or d == torch.float32]),
    )
    def test_lengths_and_dtypes(self, monkeypatch, count_calls, dtype, options):
        shapes = [(n,) for n in LENGTHS] + [(), (3, SIZE), (0, 5)]
        ours = run(shapes, dtype=dtype, **options)
        assert max(count_calls) < 2 * SIZE
        same(ours, at_once(monkeypatch, shapes, dtype=dtype, **options))
        assert max(count_calls) > 10 * SIZE

    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("anchor_dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_anchors_of_another_dtype_and_importance(self, monkeypatch, anchor_dtype, weighted):
        shapes = [(n,) for n in LENGTHS]
        options = {"anchor_dtype": anchor_dtype, "weighted": weighted}
        same(run(shapes, **options), at_once(monkeypatch, shapes, **options))

    def test_weight_decay_where_lambda_leaves_nothing_to_divide_by(self, monkeypatch):
        options = {"anneal": Constant(1e-9), "weight_decay": 0.1}
        same(run([(3 * SIZE,)], **options), at_once(monkeypatch, [(3 * SIZE,)], **options))

    def test_non_contiguous(self, monkeypatch):
        def transposed(t):
            return t.t().contiguous().t()

        shapes = [(9, SIZE), (SIZE, 3)]
        options = {"layout": transposed, "dtype": torch.float64}
        ours = run(shapes, **options)
        same(ours, at_once(monkeypatch, shapes, **options))

    def test_one_thread(self, monkeypatch):
        shapes, threads = [(n,) for n in LENGTHS], torch.get_num_threads()
        expected = run(shapes)
        torch.set_num_threads(1)
        try:
            same(run(shapes), expected)
        finally:
            torch.set_num_threads(threads)

    def test_moments_are_adamws(self):
        """Whatever the pull does to the weights, Adam sees the gradients alone."""
        _, ours = run([(10 * SIZE + 1,)])
        _, torchs = run([(10 * SIZE + 1,)], anneal=Constant(1.0))
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(ours[0][key], torchs[0][key])


@pytest.mark.usefixtures("small_parts")
class TestTheRule:
    @pytest.mark.parametrize("weighted", [False, True])
    def test_the_twin(self, weighted):
        shape = (3 * SIZE + 17,)
        (p,), _ = run([shape], dtype=torch.float64, weighted=weighted, weight_decay=0.1)
        f = draw(shape, 200, torch.float32).abs().double() if weighted else 1.0
        twin = Twin(draw(shape, 0, torch.float64), draw(shape, 100, torch.float64))
        for t in range(4):
            g = draw(shape, 1000 * (t + 1), torch.float64)
            twin.update(g, lr=1e-2, lam=0.3, gamma=20.0, eps=1e-4, wd=0.1, F=f)
        assert torch.allclose(p, twin.theta, rtol=0, atol=1e-13)

    def test_single_tensors(self):
        shapes = [(n,) for n in LENGTHS]
        ours, _ = run(shapes)
        single, _ = run(shapes, fused=False, foreach=False)
        for a, b in zip(ours, single, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)

    def test_nothing_around_a_parameter_is_touched(self):
        check_that_nothing_around_is_touched(3 * SIZE + 17)

    def test_autograd_knows_that_the_weights_changed(self):
        check_that_autograd_knows_of_the_change(3 * SIZE)

    @pytest.mark.parametrize("options", [{"gamma": 0.0}, {"anneal": Constant(1.0)}], ids=str)
    def test_without_a_pull_it_is_one_call(self, count_calls, options):
        run([(3 * SIZE,), (5 * SIZE,)], steps=1, **options)
        assert count_calls == [8 * SIZE]

    def test_errors_arrive(self):
        p = torch.nn.Parameter(torch.ones(3 * SIZE))
        opt = RecAdam([p], lr=1e-2, gamma=20.0, anneal=Constant(0.3), fused=True)
        p.grad = torch.ones(3 * SIZE).to_sparse()
        with pytest.raises((RuntimeError, NotImplementedError)):
            opt.step()


def _in_a_child(queue):
    torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
    (p,), _ = run([(10 * SIZE + 1,)])
    queue.put(p.sum().item())


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process(small_parts):
    (p,), _ = run([(10 * SIZE + 1,)])
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_a_child, args=(queue,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == pytest.approx(p.sum().item(), rel=1e-6)
