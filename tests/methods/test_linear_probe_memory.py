import gc

import torch
from torch import nn

from holdfast import linear_probe


def test_features_are_in_memory_once(monkeypatch):
    from holdfast.methods import linear_probe as module

    found = []

    def fit(head, features, *_):
        tensors = (x for x in gc.get_objects() if type(x) is torch.Tensor)
        found.extend(x for x in tensors if x.dtype == torch.float64 and x.shape == (23, 5))
        assert features is found[0]
        return 0.0, 0.0

    monkeypatch.setattr(module, "_fit", fit)
    x, model = torch.randn(23, 3), nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    linear_probe(model, "1", [(x, torch.arange(23) % 2)], progress=False)
    assert len(found) == 1
