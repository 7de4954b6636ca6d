"""A fingerprint of tensors, equal on every device, computed on the device in one pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from holdfast._torch.layout import whole

# Odd 64-bit constants that mix well (the golden ratio; two of splitmix64's finaliser), as signed
# numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
# Elements at a time: few enough for a CPU's cache, many enough for few launches on a GPU.
_CHUNK_CPU, _CHUNK_DEVICE = 1 << 18, 1 << 24


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """One fingerprint of several tensors; their order matters."""
    text = " ".join(tensor_fingerprint(tensor.shape, tensor) for tensor in tensors)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def tensor_fingerprint(shape: Iterable[int], tensor: Tensor | None) -> str:
    """The fingerprint of one tensor's shape and values, without spaces; None is no tensor."""
    values = "free" if tensor is None else f"{_digest(tensor):016x}"
    return "x".join(map(str, shape)) + ":" + values


def _digest(tensor: Tensor) -> int:
    """Σᵢ mix(bits of the float32 value at i, i) modulo 2⁶⁴.

    A wrapping sum of integers does not depend on the order of addition, so every device and
    every number of threads gives the same value. Mixing in the position detects permutations.
    """
    flat = whole(tensor.detach()).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    chunk = _CHUNK_CPU if flat.device.type == "cpu" else _CHUNK_DEVICE
    for start in range(0, flat.numel(), chunk):
        bits = flat[start : start + chunk].float().view(torch.int32).long()
        position = torch.arange(start + 1, start + 1 + bits.numel(), device=flat.device)
        h = bits.add_(position.mul_(_GOLDEN))
        h = h.bitwise_xor_(h >> 30).mul_(_MIX_1)
        h = h.bitwise_xor_(h >> 27).mul_(_MIX_2)
        total += h.bitwise_xor_(h >> 31).sum()
    return int(total) % 2**64
