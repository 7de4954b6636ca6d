"""One small run, on one process or on two gloo ranks under DDP and FSDP2: are they the same?

For tests/hosts/test_sharded.py and benchmarks/ranks.py.
"""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast import Recipe, Run
from ranks import run_on_ranks

RECIPES = ["recadam", "mofo", "l2-sp", "ewc", "flow"]
KINDS = ["ddp", "fsdp2"]
STEPS = 50
SEEDS = {"model": 0, "data": 1}


def make_model():
    torch.manual_seed(SEEDS["model"])
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))


def make_data(dtype):
    generator = torch.Generator().manual_seed(SEEDS["data"])
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
        for i in range(2, 2 + len(run.criterion.columns)):
            batch.append(torch.stack([torch.as_tensor(s[i]) for s in samples]))
        loss = run.criterion.loss(model, tuple(batch), len(rows) / world, update)
        run.observe(loss)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def whole_state(model):
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in model.named_parameters()
    }


def on_one_process(names, dtype):
    run = begin(names, dtype)
    run.make_optimizer(STEPS)
    train(run, run.model, STEPS)
    return whole_state(run.finish())


def on_two_ranks(kind, recipes, dtype, folder):
    """The weights of each recipe, by its names."""
    out = Path(folder) / "out.pt"
    run_on_ranks(2, _on_rank, kind, ",".join(recipes), str(dtype), out, folder=folder)
    return torch.load(out, weights_only=True)


def _on_rank(kind, recipes, dtype, out):
    states = {}
    for names in recipes.split(","):
        run = begin(names, getattr(torch, dtype.removeprefix("torch.")))
        model = wrapped(kind, run)
        train(run, model, STEPS, torch.distributed.get_rank(), torch.distributed.get_world_size())
        run.log(distance=True)
        states[names] = whole_state(run.finish())
    if torch.distributed.get_rank() == 0:
        torch.save(states, out)


def wrapped(kind, run):
    """The model of a run, under DDP, or with each linear layer sharded by itself."""
    from torch.distributed.fsdp import fully_shard

    if kind == "ddp":
        run.make_optimizer(STEPS)
        return nn.parallel.DistributedDataParallel(run.model)
    for layer in reversed([*run.model.modules()]):  # children before their parents
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    model = fully_shard(run.model)
    run.make_optimizer(STEPS)
    return model


def furthest(ours, theirs):
    """max |Δ| over all weights."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
