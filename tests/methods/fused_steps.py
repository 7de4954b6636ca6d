"""Some updates by RecAdam's fused step on tensors of chosen shapes."""

import pytest
import torch

from holdfast import RecAdam
from holdfast.anneal import Constant


def draw(shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def run(
    shapes,
    *,
    dtype=torch.float32,
    anchor_dtype=None,
    weighted=False,
    layout=None,
    steps=4,
    **options,
):
    """Parameters and states after some updates."""
    options = {"lr": 1e-2, "gamma": 20.0, "eps": 1e-4, "anneal": Constant(0.3)} | options
    lay = layout or (lambda t: t)
    start = [draw(shape, i, dtype) for i, shape in enumerate(shapes)]
    names = [str(i) for i in range(len(shapes))]
    params = [torch.nn.Parameter(lay(t)) for t in start]
    anchors = {
        n: draw(s, 100 + int(n), anchor_dtype or dtype) for n, s in zip(names, shapes, strict=True)
    }
    importance = {
        n: draw(s, 200 + int(n), torch.float32).abs() for n, s in zip(names, shapes, strict=True)
    }
    if weighted:
        options["importance"] = {n: importance[n] for n in names[::2]}
    opt = RecAdam(
        zip(names, params, strict=True), anchors={n: lay(a) for n, a in anchors.items()},
        **({"fused": True} | options),
    )  # fmt: skip
    for t in range(steps):
        for i, p in enumerate(params):
            p.grad = draw(p.shape, 1000 * (t + 1) + i, dtype)
        opt.step()
    states = [opt.state[p] for p in params]
    return [p.detach() for p in params], states


def check_that_nothing_around_is_touched(length):
    """A step writes the values of its parameter, and none before or behind them."""
    base, anchor = torch.full((length + 34,), torch.nan), torch.full((length + 34,), torch.nan)
    base[17:-17], anchor[17:-17] = 1.0, 2.0
    p = torch.nn.Parameter(base[17:-17])
    opt = RecAdam(
        [("p", p)], lr=1e-2, gamma=20.0, anneal=Constant(0.3), anchors={"p": anchor[17:-17]},
        fused=True,
    )  # fmt: skip
    p.grad = torch.ones_like(p)
    opt.step()
    assert p.isfinite().all()
    assert p.unique().numel() == 1
    assert base.isnan().sum() == 34


def check_that_autograd_knows_of_the_change(length):
    p = torch.nn.Parameter(torch.ones(length))
    opt = RecAdam([p], lr=1e-2, gamma=20.0, anneal=Constant(0.3), fused=True)
    loss = (p * p).sum()
    p.grad = torch.ones_like(p)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
