"""What methods of stage 1 are given: models of several kinds, and a run as they see it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from holdfast.reference import Reference

SMALL = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 99}


def make_run(model, *, data=None, task="classification", new=(), seed=0, reference=None, **more):
    """The part of a Run that ``prepare`` and ``anchors`` look at."""
    settings = {"recipe": SimpleNamespace(needs_reference=True), "collate": None} | more
    return SimpleNamespace(
        model=model, data=data, task=task, new=new, seed=seed, reference=reference, progress=False,
        **settings,
    )  # fmt: skip


def with_reference(model, **settings):
    new = settings.get("new", ())
    return make_run(model, reference=Reference.of(model, without=new), **settings)


def bert(layers=2, **more):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    config = transformers.BertConfig(
        num_attention_heads=4, num_hidden_layers=layers, **SMALL, **more
    )
    return transformers.BertForSequenceClassification(config)


def llama(layers=2, **more):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    config = transformers.LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=layers, **SMALL, **more
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(layers=2, **more):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=layers, n_head=4, vocab_size=99, n_positions=16, bos_token_id=0,
        eos_token_id=0, **more,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Block(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x):
        return x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))


class ResNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.layer1 = nn.Sequential(Block(4), Block(4))
        self.layer2 = nn.Sequential(Block(4), Block(4))
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(4, classes)

    def forward(self, x):
        x = self.layer2(self.layer1(self.conv1(x)))
        return self.fc(self.dropout(x.mean((2, 3))))


def images(n=24):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 1, 6, 6, generator=generator), torch.arange(n) % 3


def free(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
