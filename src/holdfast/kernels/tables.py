"""Many tensors in one launch: a table of where they lie, and which block of which is whose.

A table is on the device. Where tensors lie is looked up at each step, since torch may allocate
gradients anew and hosts may move anything; only what has moved is sent over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Table", "dense"]

#: Messages to the device that may be under way at once.
_UNDER_WAY = 4


class Table:
    """Where the tensors of one launch lie.

    Args:
        columns: lists of tensors, one for each argument of the kernel, all of the same lengths and
            their i-th tensors of the same size.
        block: elements of a program.

    Attributes:
        addresses: on the device, a row for each column.
        sizes: of the tensors, on the device.
        owner, part: of each program, its tensor and its block of it.
        programs, count: how many programs and tensors there are.
        aligned: of each column, whether all its addresses are multiples of 16 bytes.
    """

    def __init__(self, columns: Sequence[Sequence[Tensor]], block: int) -> None:
        self.device = columns[0][0].device
        sizes = [t.numel() for t in columns[0]]
        blocks = torch.tensor([-(-size // block) for size in sizes])
        owner = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
        part = torch.arange(len(owner)) - (blocks.cumsum(0) - blocks)[owner]
        self.programs, self.count = len(owner), len(sizes)
        self.owner = owner.to(self.device, torch.int32)
        self.part = part.to(self.device, torch.int32)
        self.sizes = torch.tensor(sizes, device=self.device)
        self._known = [[t.data_ptr() for t in column] for column in columns]
        self.aligned = [_aligned(column) for column in self._known]
        self.addresses = torch.tensor(self._known, device=self.device)
        self._messages: list[_Message] = []

    def find(self, columns: Sequence[Sequence[Tensor]]) -> None:
        """Look up where the tensors, of the same sizes as before, are by now."""
        for row, column in enumerate(columns):
            now = [t.data_ptr() for t in column]
            if now != self._known[row]:
                self._known[row], self.aligned[row] = now, _aligned(now)
                self._message().send(now, self.addresses[row])

    def _message(self) -> _Message:
        """One that has arrived, or a new one. A graph that was captured sends its own for ever."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if len(self._messages) < _UNDER_WAY or capturing:
            self._messages.append(_Message(self.count, self.device, capturing))
            return self._messages[-1]
        first = next(i for i, message in enumerate(self._messages) if not message.captured)
        self._messages.append(self._messages.pop(first))
        return self._messages[-1]


class _Message:
    """Addresses on their way to the device, without waiting for it."""

    def __init__(self, count: int, device: torch.device, captured: bool) -> None:
        on_gpu = device.type == "cuda"
        self.held = torch.empty(count, dtype=torch.int64, pin_memory=on_gpu)
        self.sent = torch.cuda.Event() if on_gpu and not captured else None
        self.captured = captured

    def send(self, addresses: list[int], place: Tensor) -> None:
        if self.sent is not None:
            self.sent.synchronize()  # what it held before has arrived: four steps ago it was sent
        self.held.copy_(torch.tensor(addresses))
        place.copy_(self.held, non_blocking=True)
        if self.sent is not None:
            self.sent.record()


def _aligned(addresses: Sequence[int]) -> bool:
    return not any(address % 16 for address in addresses)


def dense(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that lies in memory as another does, element by element; itself if it does."""
    if tensor.stride() == like.stride() or like.numel() < 2:
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
