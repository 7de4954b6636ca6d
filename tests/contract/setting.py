"""One small setting in which every method of the registry can work."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast import RecAdamUpdate, Recipe
from holdfast.registry import entry_of, methods
from loops import tune

ENTRIES = methods()
NAMES = [entry.name for entry in ENTRIES]
LR = {"sgd": 0.05}  # for the others, which are Adam's kin: 0.01


class Net(nn.Module):
    """Layers to freeze, adapt and mix, a norm with statistics, dropout that draws numbers."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.stem(x))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def make_model(dtype=torch.float64, dropout=0.1, seed=0, statistics=True):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Net(dropout).to(dtype)
        if not statistics:  # batch statistics would depend on how an update is cut
            model.norm = nn.LayerNorm(8, dtype=dtype)
        return model


def make_data(dtype=torch.float64, n=22, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long() + (x[:, 3] > 1).long()
    return TensorDataset(x.to(dtype), y)


def recipe_of(*chosen):
    """A recipe of methods, in their slots; with RandomInit comes what it needs."""
    slots = {}
    for method in chosen:
        stage = entry_of(method).stage
        slots[stage] = (*slots.get(stage, ()), method) if stage == "penalties" else method
    pulled = "update" in slots or "penalties" in slots
    if "start" in slots and slots["start"].needs_reference and not pulled:
        slots["update"] = RecAdamUpdate()
    return Recipe(**slots)


def train(recipe, model=None, data=None, **options):
    """Eight updates of it, without a word."""
    model = make_model() if model is None else model
    dtype = next(model.parameters()).dtype
    settings = {
        "lr": LR.get(entry_of(recipe.update).name, 0.01),
        "task": "classification",
        "max_updates": 8,
        "batch_size": 6,
        "old_data": make_data(dtype, n=7, seed=2),
    }
    data = make_data(dtype) if data is None else data
    return tune(model, recipe, data, **(settings | options))


class Stopped(Exception):
    """The power went out."""


def stop_at(update):
    def log(values):
        if values["update"] == update + 1:  # the checkpoint of `update` is written by then
            raise Stopped

    return log


def assert_same_bits(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different
