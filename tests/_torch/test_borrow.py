"""A test in the middle of a training leaves no trace."""

import torch
from torch import nn

from holdfast._torch.borrow import borrowed


def test_values_dtypes_buffers_and_modes_come_back():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()).to(torch.bfloat16)
    model[1].eval()
    parameters, before = (
        [*model.parameters()],
        {k: v.clone() for k, v in model.state_dict().items()},
    )
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    with borrowed(model) as copy:
        assert copy is model
        copy.float().train()
        copy(torch.randn(8, 3))  # changes the running statistics
        with torch.no_grad():
            for p in copy.parameters():
                p.zero_()
        copy.eval()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert {k: v.dtype for k, v in before.items()} == {
        k: v.dtype for k, v in model.state_dict().items()
    }
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [module.training for module in model] == [True, False, True]
    model(torch.randn(8, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_an_error_in_the_block_changes_nothing():
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    try:
        with borrowed(model), torch.no_grad():
            model.weight.zero_()
            raise KeyError("stop")
    except KeyError:
        pass
    assert torch.equal(model.weight, before)
