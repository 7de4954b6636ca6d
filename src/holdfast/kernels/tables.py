"""Many tensors in one launch: a table of their addresses, and the block of each program.

The table is on the device. Addresses are looked up at each step, because torch may reallocate
gradients and hosts may move tensors. Only changed addresses are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

#: The dtypes that kernels support.
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

Addresses = npt.NDArray[np.int64]

#: Messages to the device that may be pending at once.
_UNDER_WAY = 4


class AddressTable:
    """The addresses of the tensors of one launch: one column per kind of tensor, of the same sizes.

    Attributes:
        arguments: the first arguments of every kernel, on the device: ``table``, one row per column
            of addresses; ``sizes``; ``owner`` and ``part``, the tensor of each program and its
            block of it; ``tensors``, their number.
        programs: the number of programs.
        aligned: for each column, whether all addresses are multiples of 16 bytes.
    """

    def __init__(
        self, places: Sequence[Addresses], sizes: list[int], block: int, device: torch.device
    ) -> None:
        self.device = device
        blocks = torch.tensor([-(-size // block) for size in sizes])
        owner = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
        part = torch.arange(len(owner)) - (blocks.cumsum(0) - blocks)[owner]
        self.programs, self._count = len(owner), len(sizes)
        self.sizes = torch.tensor(sizes, device=device)
        self._known: list[Addresses | None] = [*places]
        self.aligned = [_aligned(column) for column in places]
        self._addresses = torch.from_numpy(np.stack(places)).to(device)
        programs = (owner.to(device, torch.int32), part.to(device, torch.int32))
        self.arguments = (self._addresses, self.sizes, *programs, self._count)
        self._messages: list[_Message] = []
        self._captured: list[_Message] = []

    @classmethod
    def of(cls, columns: Sequence[Sequence[Tensor]], block: int) -> AddressTable:
        sizes = [t.numel() for t in columns[0]]
        return cls([*map(addresses, columns)], sizes, block, columns[0][0].device)

    def find(self, columns: Sequence[Sequence[Tensor]]) -> None:
        """Update the addresses of tensors of the same sizes as before."""
        for number, column in enumerate(columns):
            self.move(number, addresses(column))

    def move(self, column: int, places: Addresses) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # A captured graph keeps its own message and sends it at each replay.
            self._known[column], self.aligned[column] = None, _aligned(places)
            self._captured.append(_Message(self._count, self.device, waits=False))
            self._captured[-1].send(places, self._addresses[column])
            return
        known = self._known[column]
        # A replay may have overwritten them.
        if self._captured or known is None or not np.array_equal(places, known):
            self._known[column], self.aligned[column] = places, _aligned(places)
            self._message().send(places, self._addresses[column])

    def _message(self) -> _Message:
        if len(self._messages) < _UNDER_WAY:
            self._messages.append(_Message(self._count, self.device, waits=True))
        else:
            self._messages.append(self._messages.pop(0))
        return self._messages[-1]


class _Message:
    """Sends addresses to the device without blocking."""

    def __init__(self, count: int, device: torch.device, *, waits: bool) -> None:
        on_gpu = device.type == "cuda"
        self.held = torch.empty(count, dtype=torch.int64, pin_memory=on_gpu)
        self.filled = self.held.numpy()  # faster to fill than a tensor
        self.sent = torch.cuda.Event() if on_gpu and waits else None

    def send(self, addresses: Addresses, place: Tensor) -> None:
        if self.sent is not None:
            self.sent.synchronize()  # rarely blocks: it was sent four steps ago
        self.filled[:] = addresses
        place.copy_(self.held, non_blocking=True)
        if self.sent is not None:
            self.sent.record(torch.cuda.current_stream(place.device))


def addresses(tensors: Sequence[Tensor]) -> Addresses:
    """Where tensors are in memory. Without a loop in Python: there may be thousands."""
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def _aligned(addresses: Addresses) -> bool:
    return not (addresses & 15).any()


def on_device(numbers: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Numbers and tensors in one float32 tensor, made on the device: a graph cannot contain copies.

    Pass tensors in float64 where precision matters.
    """
    made = [
        x.to(device, torch.float32) if isinstance(x, Tensor) else torch.full((), x, device=device)
        for x in numbers
    ]
    return torch.stack(made)


@triton.jit
def pointer_to(place, T: tl.constexpr, ALIGNED: tl.constexpr):
    """An address in the table as a pointer to a dtype. ALIGNED: it is a multiple of 16 bytes."""
    pointer = tl.load(place).to(tl.pointer_type(T))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load(pointer, i, size, FULL: tl.constexpr):
    """A block, 0 beyond the tensor. FULL, if all of it is inside: then loads are the widest."""
    if FULL:
        x = tl.load(pointer + i)
    else:
        x = tl.load(pointer + i, i < size, other=0)
    return x


@triton.jit
def store(pointer, i, x, size, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer + i, x)
    else:
        tl.store(pointer + i, x, i < size)


@triton.jit
def toward(p, anchor, share):
    """A share of the way to the anchor, from the nearer end, as torch.lerp: 1 is exact."""
    return tl.where(share < 0.5, p + share * (anchor - p), anchor - (1.0 - share) * (anchor - p))


@triton.jit
def _store_one(place):
    tl.store(place, 1)


def try_it(device: torch.device) -> None:
    """Compile and run the smallest kernel; raises whatever Triton raises."""
    place = torch.zeros(1, dtype=torch.int32, device=device)
    with torch.cuda.device_of(place):
        _store_one[(1,)](place)
