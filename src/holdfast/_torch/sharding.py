"""Tensors that go with a parameter, on its device and sharded as it is.

Under FSDP2 a parameter is a ``DTensor``, of which each rank holds a part. What is pulled towards θ*
must be parted in the same way; what is measured must be of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError:  # a torch without torch.distributed
    DTensor = distribute_tensor = None  # type: ignore[assignment,misc]


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is one of several ranks."""
    return DTensor is not None and isinstance(tensor, DTensor)


def like(tensor: Tensor, p: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor where a parameter is: on its device, in its dtype (or another), sharded as it is.

    Every rank has the whole tensor, so parting it takes no communication. A ``Tensor.to`` that
    does nothing is not free.
    """
    dtype = p.dtype if dtype is None else dtype
    if is_sharded(p) and not is_sharded(tensor):
        here: Any = p
        whole = tensor.to(here.device_mesh.device_type)
        tensor = distribute_tensor(whole, here.device_mesh, here.placements, src_data_rank=None)
    if tensor.dtype == dtype and tensor.device == p.device:
        return tensor
    return tensor.to(p.device, dtype, non_blocking=True)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def alike(tensor: Tensor, p: Tensor) -> bool:
    """Whether a tensor is parted as a parameter is. A gradient may have yet to be summed up."""
    mine: Any = tensor
    theirs: Any = p
    return not is_sharded(p) or (is_sharded(tensor) and mine.placements == theirs.placements)


def local_like(tensor: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a tensor, parted as a parameter is."""
    if not alike(tensor, p):
        mine: Any = tensor
        theirs: Any = p
        tensor = mine.redistribute(theirs.device_mesh, theirs.placements)
    return local(tensor)


def storage_of(tensor: Tensor) -> int:
    """Where a tensor's values lie, or this rank's part of them."""
    return local(tensor).untyped_storage().data_ptr()
