"""Anchors that are let go when the pull is over."""

import copy
import gc
import math
import pickle
import warnings
import weakref

import pytest
import torch

from holdfast import RecAdam, Reference
from holdfast.anneal import Anneal, Constant, Linear, Sigmoid
from methods.problems import PATHS, backward, far, make_net

OPTIONS = {"lr": 1e-2, "gamma": 20.0, "anneal": Linear(5), "weight_decay": 0.01}


def train(net, opt, start, stop):
    for t in range(start, stop):
        backward(net, t)
        opt.step()


def living(anchors):
    """How many of these tensors somebody still holds."""
    gc.collect()
    return sum(anchor() is not None for anchor in anchors)


def watched(tensors):
    return [weakref.ref(t) for t in tensors if t is not None]


def make(dtype=torch.float64, anchors=None, **options):
    net = make_net(dtype)
    return net, RecAdam(net.named_parameters(), anchors=anchors, **(OPTIONS | options))


class TestTheAnchorsDie:
    @pytest.mark.parametrize("path", [None, *PATHS])
    @pytest.mark.parametrize("state_dtype", [None, "8bit"], ids=str)
    def test_copies_of_the_optimizers_own(self, path, state_dtype):
        options = {"state_dtype": state_dtype, **PATHS.get(path, {})}
        net, opt = make(torch.float32, release=True, **options)
        anchors = watched(opt._anchors.values[0])
        train(net, opt, 0, 4)
        assert living(anchors) == 6
        assert opt.distance() > 0
        train(net, opt, 4, 6)
        assert living(anchors) == 0

    def test_of_a_reference_that_the_caller_dropped(self):
        net = make_net()
        reference = Reference.of(net)
        anchors = watched(reference.values())
        opt = RecAdam(net.named_parameters(), anchors=reference, release=True, **OPTIONS)
        del reference
        train(net, opt, 0, 4)
        assert living(anchors) == 6
        train(net, opt, 4, 6)
        assert living(anchors) == 0

    def test_of_a_mapping_that_the_caller_dropped(self):
        net = make_net()
        given = {n: p.detach().clone() for n, p in net.named_parameters()}
        opt = RecAdam(net.named_parameters(), anchors=given, release=True, **OPTIONS)
        anchors = watched(opt._anchors.values[0])
        del given
        train(net, opt, 0, 4)
        assert living(anchors) == 6
        train(net, opt, 4, 6)
        assert living(anchors) == 0

    def test_not_those_that_somebody_holds(self):
        net = make_net()
        reference = Reference.of(net)
        opt = RecAdam(net.named_parameters(), anchors=reference, release=True, **OPTIONS)
        train(net, opt, 0, 6)
        assert far(make_net(), net) == pytest.approx(reference.distance(net).total)

    def test_not_unless_asked_to(self):
        net, opt = make()
        anchors = watched(opt._anchors.values[0])
        train(net, opt, 0, 8)
        assert living(anchors) == 6
        assert opt.distance() > 0

    def test_importances_too(self):
        net = make_net()
        importance = {n: torch.rand_like(p) for n, p in net.named_parameters()}
        opt = RecAdam(net.named_parameters(), importance=importance, release=True, **OPTIONS)
        weights = watched(opt._anchors.importances[0][0])
        del importance
        train(net, opt, 0, 4)
        assert living(weights) == 6
        train(net, opt, 4, 6)
        assert living(weights) == 0

    def test_of_all_groups_when_the_last_ones_pull_is_over(self):
        net = make_net()
        named = list(net.named_parameters())
        groups = [
            {"params": named[:2], "anneal": Linear(2)},
            {"params": named[2:4], "anneal": Linear(6)},
            {"params": named[4:], "anchored": False, "anneal": Constant(0.5)},
        ]
        opt = RecAdam(groups, release=True, **OPTIONS)
        anchors = [watched(found) for found in opt._anchors.values]
        train(net, opt, 0, 5)
        assert living(anchors[1]) == 2
        train(net, opt, 5, 6)
        assert living(anchors[0] + anchors[1]) == 0

    def test_not_by_a_step_that_changes_nothing(self):
        net, opt = make(release=True, anneal=Constant(1.0))
        net.zero_grad()
        opt.step()  # no gradients
        assert opt.distance() == 0.0

    def test_when_the_pull_is_lost_in_rounding(self):
        """A sigmoid never reaches 1: it is over when 1 − λ is nothing to the weights."""
        net, opt = make(torch.float32, release=True, anneal=Sigmoid(k=1.0, t0=3))
        anchors = watched(opt._anchors.values[0])
        train(net, opt, 0, 20)
        assert living(anchors) == 6  # 1 − λ = 4e-8
        train(net, opt, 20, 28)
        assert living(anchors) == 0  # 1 − λ = 1e-11


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_afterwards_it_is_torchs_adamw_to_the_bit(path, dtype):
    net, opt = make(dtype, release=True, eps=1e-5, **PATHS[path])
    train(net, opt, 0, 6)
    other = copy.deepcopy(net)
    adamw = torch.optim.AdamW(
        other.parameters(), lr=1e-2, weight_decay=0.01, eps=1e-5, **PATHS[path]
    )
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        adamw.state[q] = {name: t.clone() for name, t in opt.state[p].items()}
    before = copy.deepcopy(net)
    train(net, opt, 6, 16)
    train(other, adamw, 6, 16)
    assert far(net, other) == 0.0
    assert far(net, before) > 0


@pytest.mark.parametrize("path", PATHS)
def test_the_weights_are_those_without_release(path):
    nets = []
    for release in (False, True):
        net, opt = make(torch.float32, release=release, **PATHS[path])
        train(net, opt, 0, 12)
        nets.append(net)
    assert far(*nets) == 0.0


def test_the_distance_is_not_known():
    net, opt = make(release=True)
    train(net, opt, 0, 6)
    with pytest.raises(RuntimeError, match="the anchors were released"):
        opt.distance()
    assert math.isnan(opt.recall_state(distance=True)["distance"])  # a log does not stop the run
    assert opt.recall_state() == {"updates": 6, "lam": 1.0, "pull": 0.0}


class Returning(Anneal):
    """λ is 1 at first, and falls."""

    def _at(self, t):
        return 1.0 if float(t) < 5 else 0.5


def test_a_pull_that_may_come_back_keeps_its_anchors():
    net, opt = make(release=True, anneal=Returning())
    train(net, opt, 0, 8)
    assert opt.recall_state()["pull"] > 0
    assert opt.distance() > 0


def test_an_optimizer_that_had_no_anchors_let_none_go():
    net = make_net()
    opt = RecAdam([{"params": list(net.parameters()), "anchored": False}], release=True)
    assert opt.distance() == 0.0
    train(net, opt, 0, 2)
    assert opt.recall_state(distance=True)["distance"] == 0.0


@pytest.mark.parametrize("state_dtype", [None, "8bit"], ids=str)
def test_a_new_optimizer_with_anchors_goes_on(tmp_path, state_dtype):
    options = {"release": True, "state_dtype": state_dtype}
    net, opt = make(torch.float32, **options)
    fingerprint = make(torch.float32)[1].state_dict()["param_groups"][0]["anchor_fingerprint"]
    train(net, opt, 0, 7)
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    assert saved["opt"]["param_groups"][0]["anchor_fingerprint"] == fingerprint
    other, again = make(torch.float32, **options)
    other.load_state_dict(saved["net"])
    again.load_state_dict(saved["opt"])
    train(net, opt, 7, 12)
    train(other, again, 7, 12)
    assert far(net, other) == 0.0
    with pytest.raises(RuntimeError, match="released"):
        again.distance()


def test_other_anchors_are_still_refused():
    net, opt = make(torch.float32, release=True)
    train(net, opt, 0, 6)
    saved = copy.deepcopy(opt.state_dict())
    stranger = RecAdam(make_net(torch.float32, seed=1).named_parameters(), **OPTIONS)
    with pytest.raises(ValueError, match="other anchors"):
        stranger.load_state_dict(saved)


def test_a_refused_state_changes_nothing():
    """Once the anchors are gone no state is taken: it may need them."""
    net, opt = make(release=True)
    train(net, opt, 0, 6)
    saved = copy.deepcopy(opt.state_dict())
    expected, other = copy.deepcopy((net, opt))
    with pytest.raises(ValueError, match="the anchors were released"):
        opt.load_state_dict(saved)
    train(net, opt, 6, 9)
    train(expected, other, 6, 9)
    assert far(net, expected) == 0.0


def told(action):
    """What an action complains of, by an error or a warning."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            action()
        except (RuntimeError, ValueError) as error:
            return str(error)
    return " ".join(str(w.message) for w in seen)


def test_a_state_from_when_it_pulled_is_not_taken_in_silence():
    """The anchors are gone: weights that should be pulled would not be."""
    net, opt = make(release=True, anneal=Linear(5))
    train(net, opt, 0, 2)
    saved = copy.deepcopy(opt.state_dict())
    train(net, opt, 2, 6)

    def go_back():
        opt.load_state_dict(saved)
        train(net, opt, 2, 3)

    assert "anchors" in told(go_back)


def test_a_late_group_is_not_anchored_elsewhere_in_silence():
    """Its anchor was in the Reference that was let go."""
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    anchors = {name: torch.zeros(3) for name in ("p", "q")}
    opt = RecAdam([("p", p)], anchors=anchors, release=True, **(OPTIONS | {"anneal": Linear(1)}))
    p.grad = torch.zeros(3)
    opt.step()

    def add():
        opt.add_param_group({"params": [("q", q)], "anneal": Constant(0.0)})
        q.grad = torch.zeros(3)
        opt.step()

    assert "anchor" in told(add) or (q < 0.9).all()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("at", [2, 6])
def test_copies_let_go_too(how, at):
    run = make(release=True)
    train(*run, 0, at)
    clone = copy.deepcopy(run) if how == "deepcopy" else pickle.loads(pickle.dumps(run))
    train(*run, at, 9)
    train(*clone, at, 9)
    assert far(run[0], clone[0]) == 0.0
    assert not any(a is not None for found in clone[1]._anchors.values for a in found)


def test_groups_are_pulled_until_their_own_pull_is_over():
    """Whatever the others do: each as alone."""
    values, anchor = torch.randn(2, 5), torch.zeros(5)
    alone = []
    for value, t0 in zip(values, (2, 6), strict=True):
        p = torch.nn.Parameter(value.clone())
        opt = RecAdam([("p", p)], anchors={"p": anchor}, **(OPTIONS | {"anneal": Linear(t0)}))
        for _ in range(9):
            p.grad = torch.ones(5)
            opt.step()
        alone.append(p.detach())
    params = [torch.nn.Parameter(value.clone()) for value in values]
    groups = [
        {"params": [(str(t0), p)], "anneal": Linear(t0)}
        for p, t0 in zip(params, (2, 6), strict=True)
    ]
    anchors = {"2": anchor, "6": anchor}
    opt = RecAdam(groups, anchors=anchors, release=True, **OPTIONS)
    for _ in range(9):
        for p in params:
            p.grad = torch.ones(5)
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(params, alone, strict=True))


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32], ids=str)
def test_a_pull_that_float32_weights_feel_is_not_over_for_the_sake_of_others(first):
    """bfloat16 weights in the same group lose it, in whatever order."""
    results = []
    for others in ([], [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]):
        p = torch.nn.Parameter(torch.ones(3))
        rows = [("p", p), *((("q", q)) for q in others)]
        rows = rows[::-1] if first == torch.bfloat16 else rows
        anchors = {"p": torch.zeros(3), "q": torch.zeros(3)}
        opt = RecAdam(
            rows, lr=1e-2, gamma=100.0, anneal=Constant(1 - 1e-4), anchors=anchors, release=True
        )
        for _ in range(10):
            for _, x in rows:
                x.grad = torch.zeros_like(x)
            opt.step()
        results.append(p.detach())
    assert torch.equal(*results)
    assert (results[0] < 0.9995).all()


@pytest.mark.parametrize(("shift", "over"), [({"t0": 0.25, "width": 0.02}, True), ({}, False)])
def test_a_short_shift_ends_within_its_run_and_the_default_one_does_not(shift, over):
    p = torch.nn.Parameter(torch.ones(3))
    anneal = Sigmoid.over(60, **shift)
    opt = RecAdam([p], lr=1e-2, gamma=10.0, anneal=anneal, release=True)
    for _ in range(60):
        p.grad = torch.ones(3)
        opt.step()
    assert all(anchor is None for anchors in opt._anchors.values for anchor in anchors) == over
    assert (opt.recall_state()["pull"] < 1e-8) == over
