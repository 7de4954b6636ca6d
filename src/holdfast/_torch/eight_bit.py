"""Moments of Adam in 8 bits: what they are, in torch's operations.

Blocks of 256 elements share a scale, the largest magnitude in the block. An element is a small
floating-point number in units of it: m has a sign, 4 bits of exponent and 3 of mantissa; of v the
root is kept, with 4 bits of each. Codes are rounded at random, up or down with the odds of being
nearer: rounded to the nearest, an average that changes by a thousandth a step would never move.
√v is rounded to 0 only if it is 0, as m is divided by it; an m below 1/50,000 of its block's scale
is 0. As it is √v that is right on average, v is some 2 % too large. A gradient that is no number
makes none of its whole block.

>>> import torch
>>> x = torch.tensor([-1.0, 0.5, 0.25, 0.0])
>>> codes, scales = encode(x, SIGNED, noise(0, 0, 4) & 0xFFFF)
>>> decode(codes, scales, SIGNED).tolist()
[-1.0, 0.5, 0.25, 0.0]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

__all__ = ["BLOCK", "SIGNED", "UNSIGNED", "Format", "decode", "encode", "noise", "round_at_random"]

#: Elements that share a scale.
BLOCK = 256
_ONE = 0x3F800000  # 1.0 as bits


class Format(NamedTuple):
    """How a magnitude of at most 1 becomes a code: its float32's bits, but for the last ones.

    Attributes:
        shift: how many bits are dropped.
        most: the code of 1.
        zero: what 0 stands for, so that ``most`` stands for 1; 0 itself is 0.
    """

    shift: int
    most: int

    @property
    def zero(self) -> int:
        """The upper bits of what would be code 0."""
        return (_ONE >> self.shift) - self.most


#: Of m: 3 bits of mantissa, the eighth bit is the sign.
SIGNED = Format(shift=20, most=127)
#: Of √v: 4 bits of mantissa.
UNSIGNED = Format(shift=19, most=255)


def encode(x: Tensor, form: Format, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a flat float32 tensor, given 16 random bits for each element."""
    size = x.numel()
    blocks = F.pad(x, (0, -size % BLOCK)).view(-1, BLOCK)
    tops = blocks.abs().amax(1)
    shares = torch.where(tops[:, None] > 1e-37, blocks.abs() / tops[:, None], 0.0)
    bits = shares.flatten()[:size].view(torch.int32) + (noise.to(torch.int32) << (form.shift - 16))
    codes = ((bits >> form.shift) - form.zero).clamp(0, form.most)
    if form == SIGNED:
        codes += 128 * (x < 0)
    else:
        codes[(codes == 0) & (x > 0)] = 1
    return codes.to(torch.uint8), tops


def decode(codes: Tensor, scales: Tensor, form: Format) -> Tensor:
    """The float32 numbers that flat codes stand for."""
    q = codes.to(torch.int32) & form.most
    shares = ((q + form.zero) << form.shift).view(torch.float32)
    x = torch.where(q == 0, 0.0, shares * scales.repeat_interleave(BLOCK)[: codes.numel()])
    return torch.where(codes > form.most, -x, x)


def noise(seed: int | Tensor, number: int, size: int, device: torch.device | None = None) -> Tensor:
    """32 random bits for each element of a tensor, by its number and a seed: a hash."""
    x = torch.arange(size, device=device) + number * 0x85EBCA6B + seed * 0x9E3779B9
    x = _multiplied(x ^ ((x & 0xFFFFFFFF) >> 16), 0x7FEB352D)
    x = _multiplied(x ^ (x >> 15), 0x846CA68B)
    return x ^ (x >> 16)


def round_at_random(x: Tensor, noise: Tensor) -> Tensor:
    """float32 to bfloat16, up or down with the odds of being nearer, given 16 random bits each."""
    bits = x.view(torch.int32)
    rounded = ((bits + noise.to(torch.int32)) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()


def _multiplied(x: Tensor, by: int) -> Tensor:
    """A product of 32 bits; the low bits of a wrapped int64 are right."""
    return ((x & 0xFFFFFFFF) * by) & 0xFFFFFFFF
