"""A model on a CUDA device whose anchors are elsewhere."""

import pytest
import torch
from torch import nn

from holdfast import RecAdam, Reference
from holdfast.anneal import Sigmoid
from holdfast.kernels import available

NEEDS_A_GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or not available(torch.device("cuda")),
    reason="needs a CUDA device and Triton",
)
WIDTH = 300
SETTINGS = {"lr": 1e-2, "gamma": 20.0, "anneal": Sigmoid(0.3, 6)}
SMALL = 64 * 2**10  # bytes of a chunk: most tensors are larger
KINDS = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {"state_dtype": torch.float32}),
    "weight decay": (torch.float32, {"weight_decay": 0.1, "maximize": True}),
    "capturable": (torch.float32, {"capturable": True}),
}


def make_model(dtype=torch.float32, width=WIDTH, layers=4):
    torch.manual_seed(0)
    body = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*body, nn.Linear(width, 10)).to("cuda", dtype)


def anchors_of(model, where, tmp_path=None):
    reference = Reference.of(model)
    if where == "pinned":
        return reference.pinned()
    if where == "pinned, in half":
        return Reference({n: t.bfloat16() for n, t in reference.items()}).pinned()
    if where == "half":
        return Reference({n: t.bfloat16() for n, t in reference.items()})
    if where == "host":
        return Reference.of(model, device="cpu")
    if where == "mapped":
        reference.save(tmp_path / "model.safetensors")
        return Reference.open(tmp_path)
    return reference


def make(where, dtype=torch.float32, tmp_path=None, **options):
    model = make_model(dtype)
    anchors = anchors_of(model, where, tmp_path)
    with torch.no_grad():  # away from them
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model, RecAdam(model.named_parameters(), anchors=anchors, **(SETTINGS | options))


def backward(model, t, size=32):
    first = next(model.parameters())
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(size, first.shape[1], generator=generator).to(first)
    model(x).square().mean().backward()


def train(model, opt, start, stop, accumulate=lambda t: 1):
    for t in range(start, stop):
        for i in range(accumulate(t)):
            backward(model, 10 * t + i)
        opt.step()
        opt.zero_grad()


def assert_same(ours, theirs):
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def fetchings(opt):
    return [f for plan in opt._plans.values() for f in plan.kernel._fetching]


def under_way(opt):
    return sum(len(f._fetched) for f in fetchings(opt))
