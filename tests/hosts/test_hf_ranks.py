"""The Trainer on two ranks, under DDP and FSDP2: an objective trains as on one process.

(With the Trainer's own loss, two ranks of a classifier differ from one process.)
"""

import pytest
import torch

from matrices import sampled
from ranks import run_on_ranks
from sharded import furthest, whole_state

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("datasets", reason="the hf extra is not installed")

from accelerate.state import PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from holdfast import Flow, Recipe  # noqa: E402
from holdfast.hosts.hf import HoldfastTrainer  # noqa: E402
from hosts import test_hf  # noqa: E402

FSDP2 = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]},
}
SAVING = {"save_strategy": "steps", "save_steps": 1}
# A hundredth of one step: Adam makes much of gradients that are 0 but for rounding.
CLOSE = 1e-4


def recipe_of(names):
    if names == "running median":  # a state of each rank's own
        return Recipe(objective=Flow(tau="running_median"))
    return Recipe.preset(names)


def make_trainer(names, folder, batch_size, kind="one", options=None, **more):
    given = {
        "per_device_train_batch_size": batch_size, "ddp_find_unused_parameters": False,
        "per_device_eval_batch_size": 3, **(FSDP2 if kind == "fsdp2" else {}), **(options or {}),
    }  # fmt: skip
    args = test_hf.make_args(folder, **given)
    if kind == "fsdp2":
        # Accelerate ignores FSDP on CPUs, without a word, and wraps the model in DDP; on any other
        # device it does not look at which. What it then does runs on gloo.
        assert args.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return HoldfastTrainer(
        model=test_hf.make_model(), recipe=recipe_of(names), args=args,
        train_dataset=test_hf.make_data(), eval_dataset=test_hf.make_data(12, seed=2), **more,
    )  # fmt: skip


def on_ranks(kind, names, folder, out):
    trainer = make_trainer(names, folder, 6, kind)
    trainer.train()
    sharded = any(hasattr(p, "full_tensor") for p in trainer.model.parameters())
    assert sharded == (kind == "fsdp2")
    if kind == "ddp":
        plain = transformers.Trainer(
            model=trainer.model, args=trainer.args, eval_dataset=trainer.eval_dataset
        )
        # transformers' own evaluation on several ranks need not be that of one: ours is the same.
        ours, theirs = (t.evaluate()["eval_loss"] for t in (trainer, plain))
        assert ours == pytest.approx(theirs)
    state = whole_state(trainer.model)
    if torch.distributed.get_rank() == 0:
        torch.save(state, out)


@pytest.mark.parametrize(
    ("kind", "names"),
    sampled(
        [
            ("ddp", "flow+l2-sp+wise-ft"), ("ddp", "lora+flow"), ("fsdp2", "recadam+flow"),
            ("fsdp2", "flow+l2-sp+wise-ft"), ("fsdp2", "flow+mofo"), ("fsdp2", "distill+ewc"),
            ("ddp", "dft"), ("fsdp2", "eaft"), ("ddp", "finch+flow"), ("fsdp2", "spd+flow"),
            ("ddp", "osft+flow"), ("fsdp2", "osft+flow"),
            ("fsdp2", "vera+flow+l2-sp+wise-ft"), ("fsdp2", "ia3+flow+wise-ft"),
        ],
        [("ddp", "flow+l2-sp+wise-ft"), ("fsdp2", "recadam+flow")],
    ),
)  # fmt: skip
def test_two_ranks_are_one_process(kind, names, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    single = make_trainer(names, tmp_path / "one", 12)
    single.train()
    run_on_ranks(2, on_ranks, kind, names, tmp_path / "two", tmp_path / "out.pt", folder=tmp_path)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert furthest(found, whole_state(single.model)) <= CLOSE


def stop_or_resume(kind, names, folder, out):
    callbacks = [] if out else [test_hf.StopAt(4)]
    trainer = make_trainer(names, folder, 6, kind, SAVING, callbacks=callbacks)
    if not out:
        with pytest.raises(test_hf.Stopped):
            trainer.train()
        return
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5
    state = whole_state(trainer.model)
    if torch.distributed.get_rank() == 0:
        torch.save(state, out)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_resume(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    names = "recadam+flow+wise-ft"
    single = make_trainer(names, tmp_path / "one", 12)
    single.train()
    for out in ("", tmp_path / "out.pt"):
        run_on_ranks(2, stop_or_resume, kind, names, tmp_path / "two", out, folder=tmp_path)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert furthest(found, whole_state(single.model)) <= CLOSE


@pytest.mark.soak
def test_each_rank_resumes_with_its_own_median(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    names, found = "running median", []
    run_on_ranks(2, on_ranks, "ddp", names, tmp_path / "whole", tmp_path / "w.pt", folder=tmp_path)
    for out in ("", tmp_path / "out.pt"):
        run_on_ranks(2, stop_or_resume, "ddp", names, tmp_path / "two", out, folder=tmp_path)
    found = [torch.load(tmp_path / name, weights_only=True) for name in ("out.pt", "w.pt")]
    assert furthest(*found) <= 1e-12
