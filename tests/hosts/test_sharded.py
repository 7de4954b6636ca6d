"""Two ranks equal one process: DDP and FSDP2, on gloo, in float64."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast import Recipe, Run
from ranks import run_on_ranks

RECIPES = ["recadam", "mofo", "l2-sp", "ewc", "flow"]
MORE = ["l1-sp", "mas", "sfa", "flow+recadam+l2-sp+wise-ft", "mixout"]
STEPS = 50


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))


def make_data(dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(dtype), (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def begin(names, dtype):
    """A run on the whole model, as every rank makes it before anything is sharded."""
    recipe = Recipe.preset(names)
    if "mixout" in names:
        recipe = Recipe.from_dict({"trainable": {"name": "mixout", "p": 0.0}})
    model = make_model().to(dtype)
    return Run(
        recipe, model, make_data(dtype), lr=0.01, task="classification", cache=False,
        progress=False,
    )  # fmt: skip


def train(run, model, steps, rank=0, world=1, start=0):
    for update in range(start + 1, start + steps + 1):
        run.advance(update)
        rows = [(5 * update + i) % 24 for i in range(8)]  # the same on all ranks; each has a part
        mine = rows[rank::world]
        samples = [run.criterion.data[i] for i in mine]
        batch = [torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])]
        if run.criterion.column:
            batch.append(torch.tensor([s[2] for s in samples]))
        loss = run.criterion.loss(model, tuple(batch), len(rows) / world, update)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def on_ranks(kind, names, dtype, out):
    from torch.distributed.fsdp import fully_shard

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    run = begin(names, getattr(torch, dtype))
    if kind == "ddp":
        run.make_optimizer(STEPS)
        wrapped = nn.parallel.DistributedDataParallel(run.model)
    else:
        for layer in run.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        wrapped = fully_shard(run.model)
        run.make_optimizer(STEPS)
    train(run, wrapped, STEPS, rank, world)
    run.log(distance=True)
    model = run.finish()
    state = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in model.named_parameters()
    }
    if rank == 0:
        torch.save(state, out)


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
        state = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        if rank == 0:
            torch.save(state, out)
    else:
        weights, state = get_state_dict(model, run.optimizer)
        checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize(
    "names",
    ["recadam", *(pytest.param(n, marks=pytest.mark.soak) for n in ("l2-sp", "mofo"))],
)
def test_a_checkpoint_of_two_ranks_goes_on_with_others(names, world, tmp_path):
    single = begin(names, torch.float64)
    single.make_optimizer(STEPS)
    train(single, single.model, 20)
    folder, out = tmp_path / "saved", tmp_path / "out.pt"
    run_on_ranks(2, go_on, names, folder, 0, 12, "", folder=tmp_path)
    run_on_ranks(world, go_on, names, folder, 12, 8, out, folder=tmp_path)
    found = torch.load(out, weights_only=True)
    for name, p in single.model.named_parameters():
        assert (found[name] - p).abs().max() <= 1e-9, name


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    "names", [*RECIPES, *(pytest.param(n, marks=pytest.mark.soak) for n in MORE)]
)
def test_two_ranks_are_one_process(names, kind, tmp_path):
    single = begin(names, torch.float64)
    single.make_optimizer(STEPS)
    train(single, single.model, STEPS)
    expected = single.finish().state_dict()
    run_on_ranks(2, on_ranks, kind, names, "float64", tmp_path / "out.pt", folder=tmp_path)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-9, name
