"""Some updates by RecAdam's fused step on tensors of chosen shapes."""

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
