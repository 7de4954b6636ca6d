"""Small settings in which every method of the registry can work: vectors, images, or texts."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast import RecAdamUpdate, Recipe, pad_collate
from holdfast.registry import entry_of, methods
from loops import tune

#: A recipe trains one model, so methods that merge several are not part of one.
ENTRIES = [entry for entry in methods() if getattr(entry.cls, "least_models", 1) == 1]
NAMES = [entry.name for entry in ENTRIES]
WRITING = {"auto", "self-replay"}  # methods that draw texts from the model
SEEING = {"features"}  # methods that vary images
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


class Vectors:
    """A classifier of vectors."""

    net = Net

    @classmethod
    def make_model(cls, dtype=torch.float64, dropout=0.1, seed=0, statistics=True):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = cls.net(dropout).to(dtype)
            if not statistics:  # batch statistics would depend on how an update is cut
                model.norm = nn.LayerNorm(8, dtype=dtype)
            return model

    @staticmethod
    def make_data(dtype=torch.float64, n=22, seed=1):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
        y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long() + (x[:, 3] > 1).long()
        return TensorDataset(x.to(dtype), y)

    @classmethod
    def options(cls, dtype):
        return {"task": "classification", "old_data": cls.make_data(dtype, n=7, seed=2)}

    @classmethod
    def outputs(cls, model):
        return model(cls.make_data().tensors[0])

    @staticmethod
    def first_layer(model):
        return model.stem


class SeeingNet(Net):
    """The mean over the pixels of an image with five channels."""

    def forward(self, x):
        return super().forward(x.square().mean((2, 3)))


class Images(Vectors):
    """A classifier of images."""

    net = SeeingNet

    @classmethod
    def make_data(cls, dtype=torch.float64, n=22, seed=1):
        vectors = Vectors.make_data(torch.float64, n, seed)
        x, y = vectors.tensors
        ramp = torch.linspace(-1, 1, 6, dtype=torch.float64)
        images = x[:, :, None, None] * ramp[:, None] + x.roll(1, 1)[:, :, None, None] * ramp
        return TensorDataset(images.to(dtype), y)


class Texts:
    """A language model, and token samples of several lengths."""

    @staticmethod
    def make_model(dtype=torch.float64, dropout=0.1, seed=0, statistics=True):
        pytest.importorskip("transformers", reason="the hf extra is not installed")
        from small import make_llama

        with torch.random.fork_rng():
            return make_llama(seed, limit=10, scale=0.2, attention_dropout=dropout).to(dtype)

    @staticmethod
    def make_data(dtype=None, n=22, seed=1):
        generator = torch.Generator().manual_seed(seed)
        rows = [torch.randint(4, 30, (3 + i % 4,), generator=generator).tolist() for i in range(n)]
        return [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in rows]

    @staticmethod
    def options(dtype):
        return {"collate": pad_collate}

    @classmethod
    def outputs(cls, model):
        return model(input_ids=pad_collate(cls.make_data())["input_ids"]).logits

    @staticmethod
    def first_layer(model):
        return model.get_input_embeddings()


def setting_of(*entries):
    """The setting for some methods of the registry."""
    names = {entry.name for entry in entries}
    return Texts if WRITING & names else Images if SEEING & names else Vectors


def method_of(entry):
    """The method with its defaults; a model that was never trained finds no token likely."""
    return entry.cls(**({"tau": 30.0} if entry.name == "stm" else {}))


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


def train(recipe, model=None, data=None, *, setting=None, **options):
    """Eight updates of it, without a word, in the setting that its methods need."""
    setting = setting or setting_of(*(entry_of(method) for _, method in recipe))
    model = setting.make_model() if model is None else model
    dtype = next(model.parameters()).dtype
    settings = {
        "lr": LR.get(entry_of(recipe.update).name, 0.01),
        "max_updates": 8,
        "batch_size": 6,
        **setting.options(dtype),
    }
    data = setting.make_data(dtype) if data is None else data
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
