"""DeepSpeed's ZeRO through Accelerate: two ranks equal one process, in float32 on gloo."""

import os

import pytest
import torch
from torch.utils.data import TensorDataset

from holdfast import L2SP, RecAdamUpdate, Recipe, Run
from holdfast.optim import slanted_triangular
from hosts.test_accelerate import SETTINGS, assert_close, train, whole_state
from hosts.test_accelerate import make_data as make_double_data
from hosts.test_accelerate import make_model as make_double_model
from loops import tune
from ranks import run_on_ranks

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("accelerate", reason="the hf extra is not installed")
pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
import accelerate
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from holdfast.hosts.accelerate import AccelerateLoop

CASES = [
    ("standard", 1), ("standard", 3), ("recadam", 2), ("l2-sp", 1), ("flow", 2), ("ewc+wise-ft", 1),
    ("flow+recadam+l2-sp+wise-ft", 2), ("l1-sp+sfa", 1), ("mas", 1), ("lora", 1), ("distill", 1),
]  # fmt: skip
STAGES = [1, 2, 3]


def make_model():
    return make_double_model().float()


def make_data():
    x, y = make_double_data().tensors
    return TensorDataset(x.float(), y)


def recipe_of(names):
    return Recipe() if names == "standard" else Recipe.preset(names)


def expected(names, batch, **options):
    tuned = tune(
        make_model(), recipe_of(names), make_data(), epochs=3, batch_size=batch,
        **(SETTINGS | options),
    )  # fmt: skip
    return whole_state(tuned)


def zero_accelerator(stage, accumulate=1, offload="none", **config):
    import deepspeed.comm.torch

    deepspeed.comm.torch.build_shm_op = lambda: None  # or it compiles a faster all-reduce
    # Accelerate takes DeepSpeed to be one process on CPUs; on any other device it does not look
    # at which. What it then does runs on gloo.
    PartialState(cpu=True)
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    zero = {
        "stage": stage, "sub_group_size": 60, "stage3_param_persistence_threshold": 10,
        "reduce_bucket_size": 1000, "allgather_bucket_size": 1000,
        "offload_optimizer": {"device": offload},
    }  # fmt: skip
    plugin = accelerate.DeepSpeedPlugin(
        hf_ds_config={
            "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False,
            "gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto",
            **config,
        },
        zero3_init_flag=False,
    )  # fmt: skip
    return accelerate.Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=accumulate)


def make_loop(accelerator, names, model=None, run=None, **options):
    recipe = recipe_of(names) if isinstance(names, str) else names
    model = make_model() if model is None else model
    made = Run(recipe, model, make_data(), **(SETTINGS | (run or {})))
    return AccelerateLoop(accelerator, made, **({"epochs": 3, "batch_size": 2} | options))


def on_ranks(stage, out):
    states = []
    for names, accumulate in CASES:
        loop = make_loop(zero_accelerator(int(stage), accumulate), names)
        assert (stage == "3") == any(hasattr(p, "ds_id") for p in loop.model.parameters())
        train(loop)
        tuned = loop.finish()
        assert not any(hasattr(p, "ds_id") for p in tuned.parameters())
        tuned(make_data().tensors[0]).sum().backward()  # a model like any other
        states.append(whole_state(tuned))
    if torch.distributed.get_rank() == 0:
        torch.save(states, out)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_are_one_process(stage, tmp_path):
    run_on_ranks(2, on_ranks, stage, tmp_path / "out.pt", folder=tmp_path)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    for (names, accumulate), state in zip(CASES, found, strict=True):
        assert_close(state, expected(names, 4 * accumulate), 1e-6)


DECAYED = Recipe(update=RecAdamUpdate(layer_decay=2.0, weight_decay=0.1), penalties=(L2SP(),))


def logs(out):
    rows = []
    for stage, offload in [(1, "none"), (2, "none"), (3, "none"), (2, "cpu"), (3, "cpu")]:
        accelerator = zero_accelerator(stage, offload=offload)
        loop = make_loop(accelerator, DECAYED, run={"new": "5"}, schedule=slanted_triangular)
        train(loop)
        rows.append((loop.run.log(distance=True), whole_state(loop.finish())))
    if torch.distributed.get_rank() == 0:
        torch.save(rows, out)


def test_logs_new_parts_and_schedules(tmp_path):
    run_on_ranks(2, logs, tmp_path / "out.pt", folder=tmp_path)
    run = Run(DECAYED, make_model(), make_data(), **SETTINGS, new="5")
    seen = []
    tuned = tune(
        make_model(), DECAYED, make_data(), epochs=3, batch_size=4, new="5", log_every=18,
        schedule=slanted_triangular, log=seen.append, **SETTINGS,
    )  # fmt: skip
    wanted = {name: seen[-1][name] for name in ("lam", "pull", "penalty/L2SP")}
    wanted["distance"] = run.anchors.distance(tuned).total
    for log, state in torch.load(tmp_path / "out.pt", weights_only=True):
        assert_close(state, whole_state(tuned), 1e-6)
        assert log == pytest.approx(wanted, rel=1e-4)


def stops(folder):
    for stage in STAGES:
        loop = make_loop(zero_accelerator(stage), "recadam+l2-sp")
        train(loop, until=7)
        loop.accelerator.save_state(f"{folder}/{stage}")


def goes_on(folder, out):
    states = []
    for stage in STAGES:
        other = make_model()
        other[0].bias.data += 1
        loop = make_loop(zero_accelerator(stage), "recadam+l2-sp", other)
        with pytest.raises(ValueError, match="other pretrained weights"):
            loop.accelerator.load_state(f"{folder}/{stage}")
        loop = make_loop(zero_accelerator(stage), "recadam+l2-sp")
        loop.accelerator.load_state(f"{folder}/{stage}")
        assert loop.done == 7
        train(loop)
        assert loop.run.optimizer.recall_state()["updates"] == 18
        states.append(whole_state(loop.finish()))
    if torch.distributed.get_rank() == 0:
        torch.save(states, out)


def test_two_ranks_resume(tmp_path):
    run_on_ranks(2, stops, tmp_path / "saved", folder=tmp_path)
    run_on_ranks(2, goes_on, tmp_path / "saved", tmp_path / "out.pt", folder=tmp_path)
    for state in torch.load(tmp_path / "out.pt", weights_only=True):
        assert_close(state, expected("recadam+l2-sp", 4), 1e-6)


def refuses():
    for message, recipe, stage, config in [
        ("MoFOUpdate compares the weights of a whole matrix", "mofo", 2, {}),
        ("SPDUpdate compares the weights of a whole matrix", "spd", 2, {}),
        ("FinchUpdate needs the loss before the step", "finch", 2, {}),
        ("GradualUnfreezing freezes parts", "gradual-unfreezing", 3, {}),
        ("stage 0 shards nothing", "recadam", 0, {}),
        ("NVMe is not supported", "recadam", 3, {"offload": "nvme"}),
        ("2 in the Accelerator and 3 in", "recadam", 2, {"gradient_accumulation_steps": 3}),
    ]:
        with pytest.raises(ValueError, match=message):
            make_loop(zero_accelerator(stage, 2, **config), recipe)
    import deepspeed

    model = make_model()
    deepspeed.zero.Init(module=model)
    with pytest.raises(ValueError, match="sharded before the run"):
        make_loop(zero_accelerator(3), "standard", model)
    accelerator = zero_accelerator(2)
    for state in (PartialState, AcceleratorState):
        state._shared_state["num_processes"] = 1
    with pytest.raises(ValueError, match="2 ranks, but Accelerate sees 1"):
        make_loop(accelerator, "standard")


def test_unsupported_settings_are_refused(tmp_path):
    run_on_ranks(2, refuses, folder=tmp_path)
