"""The dtype to compute in: at least float32."""

import torch
from torch import Tensor


def wide(*tensors: Tensor) -> torch.dtype:
    """The common dtype of tensors, at least float32.

    In half precision a large importance is infinite, and 0·∞ is NaN.
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def widen(tensor: Tensor) -> Tensor:
    """A tensor in at least float32; itself if it is."""
    return tensor.to(wide(tensor))
