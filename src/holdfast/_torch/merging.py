"""Merged values of one tensor: the same functions in memory and on disk, slice by slice."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from holdfast._torch.layers import depth_of
from holdfast._torch.names import plain_name
from holdfast._torch.slices import slices

Result = TypeVar("Result")
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


class Slice(NamedTuple):
    """A slice of one tensor in the base and in each tuned model, flat, in at least float32.

    Attributes:
        begin: its first index in the flat tensor.
        base: its pretrained values.
        tuned: its values in each tuned model.
        scratch: memory of this thread for results, given a use, a size and a dtype; None for new
            memory.
    """

    begin: int
    base: Tensor
    tuned: Sequence[Tensor]
    scratch: Callable[[str, int, torch.dtype], Tensor] | None = None

    def buffer(self, use: str, rows: int = 1) -> Tensor:
        """Return a tensor like the base for a result, or for rows of results.

        It overwrites the previous buffer of the same use, also that of another slice. New memory
        for each slice would take as long as the arithmetic.
        """
        size = rows * len(self.base)
        if self.scratch is None:
            return self.base.new_empty(size)
        return self.scratch(use, size, self.base.dtype)


class Slices(Protocol):
    """One tensor in all models, which is read in slices, as often as a method needs it."""

    @property
    def size(self) -> int:
        """The number of values of the tensor."""

    @property
    def models(self) -> int:
        """The number of tuned models."""

    def map(self, do: Callable[[Slice], Result]) -> Iterator[Result]:
        """Yield the results of a function of each slice, in their order.

        Slices may be computed in parallel. Their tensors must not be kept or modified.
        """

    def part(self, begin: int, end: int) -> Slice:
        """Return the values between two indices."""


class SlicesInMemory(NamedTuple):
    """Slices of tensors in memory."""

    base: Tensor
    tuned: Sequence[Tensor]

    @property
    def size(self) -> int:
        return self.base.numel()

    @property
    def models(self) -> int:
        return len(self.tuned)

    def map(self, do: Callable[[Slice], Result]) -> Iterator[Result]:
        return (do(self.part(*ends)) for ends in slices(self.size))

    def part(self, begin: int, end: int) -> Slice:
        return Slice(begin, self.base[begin:end], [model[begin:end] for model in self.tuned])


def between(base: Tensor, tuned: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """θ* + s·(θ₁ − θ*), to the last bit at the ends.

    >>> between(torch.tensor([1.0]), torch.tensor([3.0]), 0.25)
    tensor([1.5000])
    """
    if scale in (0, 1):
        return tuned if scale else base
    return torch.lerp(base, tuned, scale, out=out)


def chosen(kept: Tensor, tuned: Tensor, base: Tensor, out: Tensor | None = None) -> Tensor:
    """The tuned values where ``kept`` is 1, and those of the base where it is 0.

    >>> chosen(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 3.0]), torch.zeros(2))
    tensor([0., 3.])
    """
    # This is exact at both ends, and faster than torch.where.
    values = torch.lerp(base, tuned, kept, out=out)
    if values.sum().isfinite():
        return values
    return torch.where(kept.bool(), tuned, base)  # as ∞ − ∞ is not a number
