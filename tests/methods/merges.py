"""Vectors to merge: a base and models that were tuned from it."""

import torch

from holdfast.stages import Where

WHERE = Where("layers.0.weight", 0.5)


def vectors(models=1, n=40, seed=0, noise=0.3, dtype=torch.float64):
    """A base and some tuned models, which have moved in similar directions."""
    generator = torch.Generator().manual_seed(seed)
    base, common = torch.randn(2, n, generator=generator, dtype=torch.float64)
    own = torch.randn(models, n, generator=generator, dtype=torch.float64)
    return base.to(dtype), [(base + noise * (common + x)).to(dtype) for x in own]


def assert_equals(merged, golden):
    assert torch.allclose(merged, torch.tensor(golden, dtype=torch.float64), rtol=0, atol=1e-12)


def numbers(base, models):
    return base.tolist(), [model.tolist() for model in models]
