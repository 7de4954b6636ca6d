"""Copies in place of a model's tensors within a block, so that a test cannot change a training."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def borrowed(model: nn.Module) -> Iterator[nn.Module]:
    """Within the block, all parameters and buffers hold copies of their values.

    What happens to values, dtypes and modes is undone on exit. The parameters stay the same
    objects, which an optimizer and anchors know.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> before = model.weight.clone()
    >>> with borrowed(model), torch.no_grad():
    ...     _ = model.weight.zero_()
    >>> torch.equal(model.weight, before)
    True
    """
    parameters = [(p, p.data) for p in model.parameters()]
    buffers = [(m, name, b) for m in model.modules() for name, b in m._buffers.items()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        for parameter, data in parameters:
            parameter.data = data.clone()
        for module, name, buffer in buffers:
            module._buffers[name] = None if buffer is None else buffer.clone()
        yield model
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        for module, training in modes:
            module.training = training
