"""Where the elements of a tensor are: in memory, on a device, across ranks.

Under FSDP2 a parameter is a ``DTensor``, of which each rank holds a shard. Its anchor must be
sharded in the same way; measurements need the full tensor.
"""

import operator
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

Value = TypeVar("Value")
_LAYOUT = operator.attrgetter("layout")


def rank_and_world() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def gathered(value: Value) -> list[Value]:
    """The values of all ranks, in order. All ranks must call it."""
    everyone = [value] * rank_and_world()[1]
    if len(everyone) > 1:
        distributed.all_gather_object(everyone, value)
    return everyone


def all_agree(answer: bool, device: torch.device) -> bool:
    """Whether the answer is yes on all ranks. All ranks must call it, with a device of theirs."""
    if rank_and_world()[1] == 1:
        return answer
    found = torch.tensor(int(answer), device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MIN)
    return bool(found)


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of a value over all ranks. All ranks must call it."""
    _, world = rank_and_world()
    if world == 1:
        return value
    total = value.clone()
    distributed.all_reduce(total)
    return total / world


def is_sharded(tensor: Any) -> bool:
    # Importing the module takes nearly a second. Where it was not imported, no tensor is sharded.
    sharding = sys.modules.get("torch.distributed.tensor")
    return sharding is not None and isinstance(tensor, sharding.DTensor)


def any_sharded(tensors: Sequence[Tensor]) -> bool:
    """Whether one of many tensors is sharded; looks at each type once."""
    if torch.compiler.is_compiling():
        return any(map(is_sharded, tensors))
    sharding = sys.modules.get("torch.distributed.tensor")
    kinds = set(map(type, tensors))
    return sharding is not None and any(issubclass(kind, sharding.DTensor) for kind in kinds)


def all_strided(tensors: Sequence[Tensor]) -> bool:
    """Whether none of many tensors is sparse."""
    if torch.compiler.is_compiling():
        return all(tensor.layout is torch.strided for tensor in tensors)
    return {*map(_LAYOUT, tensors)} <= {torch.strided}


def like(tensor: Tensor, p: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on a parameter's device, in its dtype (or ``dtype``), sharded as it is.

    Every rank has the full tensor, so sharding it takes no communication. The early return avoids
    a ``Tensor.to`` that does nothing, which is not free.
    """
    dtype = p.dtype if dtype is None else dtype
    if is_sharded(p) and not is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor

        full = tensor.to(p.device_mesh.device_type)
        tensor = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
    if tensor.dtype == dtype and tensor.device == p.device:
        return tensor
    return tensor.to(p.device, dtype, non_blocking=True)


def sharded_as(shard: Tensor, p: Any) -> Tensor:
    """A rank's shard of a tensor as part of the whole, which is sharded as a parameter is."""
    if not is_sharded(p):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard.to(local(p).device), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
    )


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects. Faster than ``id``, which audit hooks slow down."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def summed(values: Tensor, p: Any) -> Tensor:
    """The sum of values over the ranks that hold the shards of a parameter, where it is sharded.

    All ranks must call it, each with values of its own shards.
    """
    if not is_sharded(p):
        return values
    from torch.distributed.tensor import DTensor, Partial, Replicate

    of = [Replicate() if placed.is_replicate() else Partial() for placed in p.placements]
    return DTensor.from_local(values, p.device_mesh, of, run_check=False).full_tensor()


def whole_on_first(tensor: Tensor) -> Tensor | None:
    """The whole tensor in CPU memory on the first rank, None elsewhere. All ranks must call it."""
    full = whole(tensor.detach())
    return full.cpu() if rank_and_world()[0] == 0 else None


def whole_weights(model: nn.Module) -> dict[str, Any] | None:
    """The weights of a sharded model, whole on the first rank; None if it is not sharded.

    All ranks must call it. Weights that are tied still are.
    """
    state = model.state_dict(keep_vars=True)
    if not any(map(is_sharded, state.values())):
        return None
    each = {id(tensor): tensor for tensor in state.values()}
    found = {key: whole_on_first(tensor) for key, tensor in each.items()}
    return {name: found[id(tensor)] for name, tensor in state.items()}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def alike(tensor: Any, p: Any) -> bool:
    """Whether a tensor is sharded as a parameter is; a gradient may still have to be reduced."""
    return not is_sharded(p) or (is_sharded(tensor) and tensor.placements == p.placements)


def local_like(tensor: Any, p: Any) -> Tensor:
    return local(tensor if alike(tensor, p) else tensor.redistribute(p.device_mesh, p.placements))


def storage_of(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


def dense(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor with the strides of another one; a copy only if they differ."""
    if tensor.stride() == like.stride() or like.numel() < 2:
        return tensor
    laid_out = torch.empty_strided(
        like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device,
        pin_memory=tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned(),
    )  # fmt: skip
    return laid_out.copy_(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill one block of memory, in any order."""
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
    """The elements of a dense tensor in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
