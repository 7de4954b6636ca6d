from types import SimpleNamespace

import pytest
import torch
from torch import nn

from holdfast import L2SP, RecAdamUpdate
from holdfast.anneal import Constant
from holdfast.methods.adapter import Adapter
from holdfast.methods.gradual_unfreezing import GradualUnfreezing
from holdfast.methods.hft import HFT
from holdfast.methods.identity import Full, Keep, NoRecall, Pretrained
from holdfast.methods.linear_probe import LinearProbe
from holdfast.methods.lora import LoRA
from holdfast.methods.lp_ft import LPFT
from holdfast.methods.mixout import Mixout
from holdfast.methods.osft import OSFT
from holdfast.methods.random_init import RandomInit
from holdfast.methods.wise_ft import WiseFT
from methods.stand_ins import make_run, same, state

FREEZING = [LinearProbe(), LPFT(), HFT(), GradualUnfreezing(), OSFT(), LoRA(), Adapter()]


def recipe(trainable=Full(), *, pulls=True, penalties=(), merging=Keep()):  # noqa: B008
    update = SimpleNamespace(pulls=pulls)
    return SimpleNamespace(
        trainable=trainable, recall=NoRecall(), update=update, penalties=penalties, merging=merging
    )


@pytest.mark.parametrize("method", FREEZING)
def test_a_random_start_makes_no_sense_for_what_freezes(method):
    reason = RandomInit().conflict(recipe(method))
    assert reason.startswith(type(method).__name__)
    assert "RandomInit" in reason


@pytest.mark.parametrize("method", [Full(), Mixout()])
def test_a_random_start_is_fine_where_all_may_change(method):
    assert RandomInit().conflict(recipe(method)) is None


def test_a_random_start_needs_a_pull():
    start = RandomInit()
    assert start.needs_reference
    assert "nothing in the recipe pulls back" in start.conflict(recipe(pulls=False))
    assert start.conflict(recipe()) is None
    assert start.conflict(recipe(pulls=False, penalties=(L2SP(),))) is None
    assert start.conflict(recipe(pulls=False, penalties=(L2SP(0.0),)))
    assert not RecAdamUpdate(pull=0.0).pulls
    assert not RecAdamUpdate(anneal=Constant(1.0)).pulls


def test_dora_cannot_be_interpolated():
    assert "not linear in B" in LoRA(dora=True).conflict(recipe(merging=WiseFT()))
    assert LoRA().conflict(recipe(merging=WiseFT())) is None
    assert LoRA(dora=True).conflict(recipe()) is None


def test_identities():
    model = nn.Linear(3, 2)
    before, run = state(model), make_run(model, reference="θ*")
    assert Full().prepare(run) is model
    assert Full().anchors(run) == "θ*"
    Full().advance(model, 1, 2)
    assert Full().finish(model) is model
    Pretrained().apply(run)
    assert same(before, state(model))
    assert Full.neutral == Pretrained.neutral == {}


def test_random_init_has_the_runs_seed_or_its_own():
    def start(method, seed):
        model = nn.Linear(3, 2)
        method.apply(make_run(model, seed=seed))
        return model.weight

    assert torch.equal(start(RandomInit(), 1), start(RandomInit(), 1))
    assert not torch.equal(start(RandomInit(), 1), start(RandomInit(), 2))
    assert torch.equal(start(RandomInit(seed=1), 2), start(RandomInit(), 1))
    with pytest.raises(ValueError, match="seed must be at least 0"):
        RandomInit(seed=-1)
