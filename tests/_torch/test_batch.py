"""The mode of a model while it is evaluated."""

import torch
from torch import nn

from holdfast._torch.batch import evaluating


class Caches(nn.Linear):
    """Keeps something in eval mode, and frees it in training mode, as some image models do."""

    kept = None

    def train(self, mode=True):
        super().train(mode)
        self.kept = None
        return self

    def forward(self, x):
        if not self.training:
            self.kept = self.kept or self.weight.sum()
        return super().forward(x)


def test_the_modes_are_restored_and_what_is_kept_for_them_is_freed():
    model = nn.Sequential(Caches(2, 2), nn.Dropout())
    model[1].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        model(torch.ones(1, 2))
        assert model[0].kept is not None
    assert [module.training for module in model.modules()] == [True, True, False]
    assert model[0].kept is None
