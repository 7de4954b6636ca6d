"""How tensors lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that lies in memory as another does, element by element; itself if it does."""
    if tensor.stride() == like.stride() or like.numel() < 2:
        return tensor
    lying = torch.empty_strided(
        like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device,
        pin_memory=tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned(),
    )  # fmt: skip
    return lying.copy_(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie side by side, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
