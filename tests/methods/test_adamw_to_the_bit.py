"""Optimizers with neutral settings equal torch's AdamW to the last bit."""

import pytest
import torch

from holdfast.optim import SPD, Finch, MoFO
from methods.problems import PATHS, backward, far, make_net

NEUTRAL = [(MoFO, {"fraction": 1.0}), (SPD, {"lam": 0.0}), (Finch, {"power": 0.0})]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cls", "neutral"), NEUTRAL, ids=[cls.__name__ for cls, _ in NEUTRAL])
def test_neutral_settings(cls, neutral, path, dtype):
    nets = [make_net(dtype), make_net(dtype)]
    shared = {"lr": 1e-2, "weight_decay": 0.1, **PATHS[path]}
    opts = (
        cls(nets[0].parameters(), **neutral, **shared),
        torch.optim.AdamW(nets[1].parameters(), **shared),
    )
    for t in range(20):
        for net, opt in zip(nets, opts, strict=True):
            backward(net, t)
            opt.step()
    assert far(*nets) == 0.0
