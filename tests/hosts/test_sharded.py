"""Two ranks equal one process: DDP and FSDP2, on gloo, in float64."""

import pytest
import torch

from holdfast import Reference
from holdfast.evaluate.watch import effective_distance
from ranks import run_on_ranks
from sharded import (
    RECIPES,
    STEPS,
    begin,
    furthest,
    on_one_process,
    on_two_ranks,
    train,
    whole_state,
    wrapped,
)

MORE = ["l1-sp", "mas", "sfa", "flow+recadam+l2-sp+wise-ft", "mixout", "lines", "fapm", "slerp"]


def sharded(names):
    from torch.distributed.fsdp import fully_shard

    run = begin(names, torch.float64)
    model = fully_shard(run.model)
    run.make_optimizer(STEPS)
    return run, model


def go_on(names, folder, begins_at, steps, out):
    """Load what there is, train for a while, and save: as many ranks as there are."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    run, model = sharded(names)
    if int(begins_at):
        weights, state = get_state_dict(model, run.optimizer)
        saved = {"model": weights, "optimizer": state}
        checkpoint.load(saved, checkpoint_id=folder)
        set_state_dict(
            model,
            run.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
    train(run, model, int(steps), rank, world, start=int(begins_at))
    if out:
        state = whole_state(model)
        if rank == 0:
            torch.save(state, out)
    else:
        weights, state = get_state_dict(model, run.optimizer)
        checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("names", ["recadam", "l2-sp", "mofo", "spd", "finch"])
def test_a_checkpoint_of_two_ranks_resumes_on_other_numbers_of_ranks(names, world, tmp_path):
    single = begin(names, torch.float64)
    single.make_optimizer(STEPS)
    train(single, single.model, 20)
    folder, out = tmp_path / "saved", tmp_path / "out.pt"
    run_on_ranks(2, go_on, names, folder, 0, 12, "", folder=tmp_path)
    run_on_ranks(world, go_on, names, folder, 12, 8, out, folder=tmp_path)
    found = torch.load(out, weights_only=True)
    assert furthest(found, whole_state(single.model)) <= 1e-9


@pytest.mark.parametrize(
    ("kind", "recipes"),
    [
        ("fsdp2", [*RECIPES, "spd", "finch"]),
        pytest.param("ddp", [*RECIPES, "spd", "finch", *MORE], marks=pytest.mark.soak),
        pytest.param("fsdp2", MORE, marks=pytest.mark.soak),
    ],
)
def test_two_ranks_are_one_process(kind, recipes, tmp_path):
    found = on_two_ranks(kind, recipes, torch.float64, tmp_path)
    for names in recipes:
        assert furthest(found[names], on_one_process(names, torch.float64)) <= 1e-9, names


ADAPTERS = ["vera+l2-sp+wise-ft", "dora", "oft"]


def tuned_adapters(names, rank=0, world=1):
    """The effective distance before the run is finished, and the weights after."""
    if names == "dora" and world > 1:
        run, _ = sharded(names)  # it reads the weight of its base layer, which cannot be a unit
    else:
        run = begin(names, torch.float64)
        wrapped("fsdp2", run) if world > 1 else run.make_optimizer(STEPS)
    train(run, run.model, 3, rank, world)
    distance = effective_distance(run.model, Reference({}))
    return distance, whole_state(run.finish())


def adapters_on_ranks(out):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = {names: tuned_adapters(names, rank, world) for names in ADAPTERS}
    if rank == 0:
        torch.save(found, out)


@pytest.mark.filterwarnings("ignore:Invalid `oft_block_size`")
def test_adapters_that_are_sharded(tmp_path):
    pytest.importorskip("peft", reason="the peft extra is not installed")
    run_on_ranks(2, adapters_on_ranks, tmp_path / "out.pt", folder=tmp_path)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    for names in ADAPTERS:
        distance, weights = tuned_adapters(names)
        assert distance > 0
        assert found[names][0] == pytest.approx(distance, rel=1e-5), names
        assert furthest(found[names][1], weights) <= 1e-9, names
