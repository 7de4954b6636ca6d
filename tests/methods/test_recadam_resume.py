"""Save, load in a new process, go on: to the bit."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast import RecAdam, Reference
from holdfast.anneal import Linear, Sigmoid
from methods.problems import PATHS, backward, far, make_net

TESTS = Path(__file__).parents[1]


def make_run(dtype, state_dtype, path):
    net = make_net(dtype)
    groups = [
        {"params": list(net.body.named_parameters()), "weight_decay": 0.01},
        {"params": list(net.head.named_parameters()), "lr": 5e-2, "anneal": Linear(9)},
    ]
    for prefix, group in zip(("body", "head"), groups, strict=True):
        group["params"] = [(f"{prefix}.{n}", p) for n, p in group["params"]]
    opt = RecAdam(
        groups, lr=1e-2, gamma=20.0, eps=1e-4, anneal=Sigmoid(0.3, 10),
        state_dtype=state_dtype, **PATHS[path],
    )  # fmt: skip
    return net, opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 30)


def train(net, opt, scheduler, start, stop):
    for t in range(start, stop):
        backward(net, t)
        opt.step()
        scheduler.step()


def save(file, net, opt, scheduler):
    state = {"net": net.state_dict(), "opt": opt.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(state, file)


def resume_and_finish(file, dtype, state_dtype, path, start, stop, out):
    """What the new process runs."""
    net, opt, scheduler = make_run(dtype, state_dtype, path)
    saved = torch.load(file, weights_only=True)
    net.load_state_dict(saved["net"])
    opt.load_state_dict(saved["opt"])
    scheduler.load_state_dict(saved["scheduler"])
    train(net, opt, scheduler, start, stop)
    save(out, net, opt, scheduler)


def assert_same(a, b):
    """Equal to the bit, dtypes included."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


CASES = [
    (torch.float32, None, "single"),
    (torch.float32, None, "foreach"),
    (torch.float32, None, "fused"),
    (torch.bfloat16, torch.float32, "single"),
    (torch.bfloat16, torch.float32, "foreach"),
    (torch.bfloat16, torch.float32, "fused"),
    (torch.bfloat16, None, "fused"),
    (torch.float16, torch.float32, "foreach"),
]


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "path"),
    [pytest.param(*case, marks=[pytest.mark.soak] * (case != CASES[5])) for case in CASES],
)
def test_a_new_process_goes_on_to_the_bit(tmp_path, dtype, state_dtype, path):
    run = make_run(dtype, state_dtype, path)
    train(*run, 0, 13)
    save(tmp_path / "at13.pt", *run)
    train(*run, 13, 30)
    save(tmp_path / "whole.pt", *run)
    arguments = (
        f"{str(tmp_path / 'at13.pt')!r}, {dtype}, {state_dtype}, {path!r}, 13, 30, "
        f"{str(tmp_path / 'resumed.pt')!r}"
    )
    code = (
        f"import sys, torch; sys.path.insert(0, {str(TESTS)!r}); torch.set_num_threads(1)\n"
        f"from methods.test_recadam_resume import resume_and_finish\n"
        f"resume_and_finish({arguments})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert_same(torch.load(tmp_path / "resumed.pt"), torch.load(tmp_path / "whole.pt"))


@pytest.mark.parametrize(("dtype", "state_dtype", "path"), CASES)
@pytest.mark.parametrize(
    "at", [pytest.param(n, marks=() if n in (0, 7) else pytest.mark.soak) for n in range(30)]
)
def test_any_step_can_be_the_one(tmp_path, dtype, state_dtype, path, at):
    run = make_run(dtype, state_dtype, path)
    train(*run, 0, at)
    save(tmp_path / "part.pt", *run)
    train(*run, at, 30)
    save(tmp_path / "whole.pt", *run)
    resume_and_finish(
        tmp_path / "part.pt", dtype, state_dtype, path, at, 30, tmp_path / "resumed.pt"
    )
    assert_same(torch.load(tmp_path / "resumed.pt"), torch.load(tmp_path / "whole.pt"))


def test_float32_state_of_bfloat16_parameters_stays_float32():
    net, opt, scheduler = make_run(torch.bfloat16, torch.float32, "foreach")
    train(net, opt, scheduler, 0, 3)
    _, other, _ = make_run(torch.bfloat16, None, "foreach")
    other.load_state_dict(opt.state_dict())
    assert {s["exp_avg"].dtype for s in other.state.values()} == {torch.float32}


@pytest.mark.parametrize("path", PATHS)
def test_a_state_dtype_given_at_resume_is_taken(path):
    net, opt, scheduler = make_run(torch.bfloat16, None, path)
    train(net, opt, scheduler, 0, 3)
    _, other, _ = make_run(torch.bfloat16, torch.float32, path)
    other.load_state_dict(opt.state_dict())
    assert {s["exp_avg"].dtype for s in other.state.values()} == {torch.float32}
    assert {s["step"].item() for s in other.state.values()} == {3.0}
    assert {s["step"].dtype for s in other.state.values()} == {torch.float32}


def test_the_live_models_names_stay():
    net, opt, scheduler = make_run(torch.float32, None, "single")
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        group["param_names"] = [f"old.{n}" for n in group["param_names"]]
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["param_names"][0] == "body.0.weight"


def test_hooks_see_and_change_what_is_saved_and_loaded():
    net, opt, scheduler = make_run(torch.float32, None, "single")
    train(net, opt, scheduler, 0, 3)
    seen = []
    opt.register_state_dict_post_hook(lambda _, state: seen.append(state["param_groups"][0]))
    saved = copy.deepcopy(opt.state_dict())
    assert seen[0]["updates"] == 3
    assert seen[0]["anneal"] == {"name": "Sigmoid", "k": 0.3, "t0": 10.0}

    def forget_moments(_, state):
        for values in state["state"].values():
            values["exp_avg"] = torch.zeros_like(values["exp_avg"])

    opt.register_load_state_dict_pre_hook(forget_moments)
    opt.load_state_dict(saved)
    assert all(s["exp_avg"].abs().max() == 0 for s in opt.state.values())


def test_numpy_numbers_do_not_spoil_a_checkpoint(tmp_path):
    net = make_net()
    opt = RecAdam(
        net.parameters(),
        lr=np.float64(1e-3),
        gamma=np.float32(50),
        anneal=Sigmoid.over(np.int64(9)),
    )
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    opt.load_state_dict(torch.load(tmp_path / "opt.pt", weights_only=True))


def test_the_state_holds_no_copy_of_the_anchors_and_only_plain_values():
    net, opt, scheduler = make_run(torch.float32, None, "single")
    train(net, opt, scheduler, 0, 3)
    state = opt.state_dict()

    def leaves(x):
        if isinstance(x, dict):
            for v in x.values():
                yield from leaves(v)
        elif isinstance(x, (list, tuple)):
            for v in x:
                yield from leaves(v)
        else:
            yield x

    kinds = {type(x) for x in leaves(state)}
    assert kinds <= {torch.Tensor, int, float, bool, str, type(None)}
    held = sum(x.numel() for x in leaves(state) if isinstance(x, torch.Tensor))
    n_params = len(list(net.parameters()))
    assert held == 2 * sum(p.numel() for p in net.parameters()) + n_params  # m, v and the steps


def test_a_saved_state_does_not_change_with_the_optimizer():
    net, opt, scheduler = make_run(torch.float32, None, "single")
    train(net, opt, scheduler, 0, 3)
    saved = opt.state_dict()["param_groups"]
    train(net, opt, scheduler, 3, 5)
    assert [g["updates"] for g in saved] == [3, 3]


class TestTheAnchorsAreNeverTakenFromTunedWeights:
    def test_made_after_the_tuned_weights_were_loaded(self):
        net, opt, scheduler = make_run(torch.float32, None, "single")
        train(net, opt, scheduler, 0, 3)
        saved = copy.deepcopy(opt.state_dict())
        late = RecAdam(
            [{"params": list(m.parameters())} for m in (net.body, net.head)], lr=1e-2, gamma=20.0
        )
        before = copy.deepcopy(late.state_dict())
        with pytest.raises(ValueError, match="pass the pretrained Reference"):
            late.load_state_dict(saved)
        assert_same(late.state_dict(), before)

    def test_a_new_head_is_named_as_the_reason(self):
        net, opt, scheduler = make_run(torch.float32, None, "single")
        saved = opt.state_dict()
        torch.nn.init.normal_(net.head.weight)
        named = list(net.named_parameters())
        drawn_anew = RecAdam([{"params": named[:4]}, {"params": named[4:]}])
        with pytest.raises(ValueError, match=r"for head\.weight of group 1\. .* without="):
            drawn_anew.load_state_dict(saved)

    def test_a_head_left_out_from_the_start_can_be_drawn_anew(self):
        states = []
        for seed in (1, 2):
            net = make_net(torch.float32)
            torch.manual_seed(seed)
            torch.nn.init.normal_(net.head.weight)
            anchors = Reference.of(net, without="head")
            with pytest.warns(UserWarning, match=r"head\.weight, head\.bias"):
                opt = RecAdam(net.named_parameters(), anchors=anchors)
            states.append((opt, opt.state_dict()))
        states[1][0].load_state_dict(states[0][1])

    def test_with_the_pretrained_reference_it_goes_on(self, tmp_path):
        net, opt, scheduler = make_run(torch.float32, None, "single")
        Reference.of(net).save(tmp_path / "model.safetensors")
        train(net, opt, scheduler, 0, 3)
        names = [
            [f"{m}.{n}" for n, _ in getattr(net, m).named_parameters()] for m in ("body", "head")
        ]
        params = dict(net.named_parameters())
        late = RecAdam(
            [{"params": [(n, params[n]) for n in group]} for group in names],
            lr=1e-2, gamma=20.0, anchors=Reference.open(tmp_path),
        )  # fmt: skip
        late.load_state_dict(opt.state_dict())
        assert late.distance() == opt.distance() > 0


class TestRefusedStates:
    def test_of_another_model(self):
        opt = RecAdam(make_net(torch.float32).parameters())
        with pytest.raises(ValueError, match="other anchors"):
            opt.load_state_dict(RecAdam(make_net(torch.float32, seed=1).parameters()).state_dict())
        with pytest.raises(ValueError, match=r"\[2\] parameters per group, .* \[6\]"):
            opt.load_state_dict(RecAdam(torch.nn.Linear(2, 2).parameters()).state_dict())

    def test_of_another_optimizer(self):
        net = make_net()
        with pytest.raises(ValueError, match="not RecAdam's"):
            RecAdam(net.parameters()).load_state_dict(
                torch.optim.AdamW(net.parameters()).state_dict()
            )

    def test_shapes_of_unanchored_parameters_count_too(self):
        a, b = (
            RecAdam([{"params": [torch.nn.Parameter(torch.zeros(n))], "anchored": False}])
            for n in (2, 3)
        )
        with pytest.raises(ValueError, match="other anchors"):
            a.load_state_dict(b.state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alike(how):
    run = make_run(torch.bfloat16, torch.float32, "foreach")
    train(*run, 0, 5)
    # Together, so that the copied optimizer holds the copied network's parameters.
    clone = copy.deepcopy(run) if how == "deepcopy" else pickle.loads(pickle.dumps(run[:2]))
    if how == "pickle":
        clone = (*clone, torch.optim.lr_scheduler.CosineAnnealingLR(clone[1], 30, last_epoch=4))
        clone[2].load_state_dict(run[2].state_dict())
    train(*run, 5, 15)
    train(*clone, 5, 15)
    assert far(run[0], clone[0]) == 0.0
    assert clone[1].recall_state(distance=True) == run[1].recall_state(distance=True)
