"""Merged values of one tensor: the same function in memory and on disk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from holdfast._torch.layers import depth_of
from holdfast._torch.names import plain_name

if TYPE_CHECKING:
    from holdfast.stages import Merging

_STATISTIC = re.compile(r"(^|\.)running_(mean|var)$")


class Where(NamedTuple):
    """The place of a tensor in its model.

    Attributes:
        name: its name, without the prefixes of wrappers.
        depth: that of its block, from 0 (the first) to 1 (the last); None outside of blocks.
    """

    name: str
    depth: float | None = None

    @property
    def is_statistic(self) -> bool:
        """Whether it is a running statistic of BatchNorm, which is measured and not learned."""
        return _STATISTIC.search(self.name) is not None


def places(names: Iterable[str]) -> dict[str, Where]:
    """The places of all tensors of a model, by name."""
    plain = {name: plain_name(name) for name in names}
    depths = depth_of(plain.values())
    return {name: Where(own, depths[own]) for name, own in plain.items()}


def merged_values(
    method: Merging,
    where: Where,
    base: Tensor,
    tuned: Sequence[Tensor],
    out: Tensor | None = None,
) -> Tensor:
    """The merged values of a tensor, all flat and in the same dtype, at least float32.

    If the method has a ``scale`` there, they may be a slice. ``out`` is memory for the result.
    """
    scale = method.scale(where)
    if scale is not None:
        return between(base, tuned[0], scale, out)
    return tuned[0] if where.is_statistic else method.merged(where, base, tuned)


def between(base: Tensor, tuned: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """θ* + s·(θ₁ − θ*), to the last bit at the ends.

    >>> between(torch.tensor([1.0]), torch.tensor([3.0]), 0.25)
    tensor([1.5000])
    """
    if scale in (0, 1):
        return tuned if scale else base
    return torch.lerp(base, tuned, scale, out=out)


def wide(*tensors: Tensor) -> torch.dtype:
    """The common dtype of tensors, at least float32: the one in which they are merged."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
