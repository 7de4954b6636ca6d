"""Fetches anchors from CPU memory to the GPU while the backward pass runs.

Anchors are copied in chunks, in the order in which gradients arrive: each chunk when the gradients
of the chunks before it arrive. By then activations are freed, and anchors can use their memory. A
chunk that would raise the peak memory waits for the step, which holds three chunks at once. A chunk
is freed as soon as its weights are updated.

The memory belongs to the training stream, so that it can reuse that of activations. The copies run
on their own stream. From page-locked memory (:meth:`holdfast.Reference.pinned`) they do not block
the CPU.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast._torch.layout import flat

#: Bytes per chunk.
CHUNK = 32 * 2**20
#: Chunks that are fetched ahead of the gradients in the backward pass, and of the update.
AHEAD, NEXT = 16, 2
#: Bytes by which fetching may raise the peak of memory.
SLACK = 64 * 2**20


class Piece(NamedTuple):
    """Elements ``begin`` to ``end`` of a parameter in the order of memory, and their chunk."""

    row: int
    begin: int
    end: int
    chunk: int = 0


class Fetching:
    """Fetches anchors to a device.

    ``tensors`` are each parameter and its anchor, with equal strides, by number. ``chunks`` are the
    pieces of each chunk.
    """

    def __init__(self, tensors: Mapping[int, tuple[Tensor, Tensor]], device: torch.device) -> None:
        self._device = device
        self._flat = {i: flat(anchor) for i, (_, anchor) in tensors.items()}
        self.chunks = _cut(self._flat)
        self._stream = torch.cuda.Stream(device)
        self._fetched: dict[int, tuple[Tensor, torch.cuda.Event]] = {}
        self._last: Tensor | None = None
        # The number of backward passes per step is taken from the last step. Anchors are fetched in
        # the last pass; otherwise they would occupy memory during the forward passes of the others.
        self._params = [p for p, _ in tensors.values()]
        self._most = 0  # bytes in use, without fetched chunks
        self._arrivals: dict[int, int] = {}
        self._passes: int | None = None
        if all(anchor.is_pinned() for _, anchor in tensors.values()):  # otherwise a copy blocks
            last = {pieces[0].row: chunk for chunk, pieces in enumerate(self.chunks)}
            handles = [
                tensors[row][0].register_post_accumulate_grad_hook(_calling(self, chunk))
                for row, chunk in last.items()
                if tensors[row][0].requires_grad and tensors[row][0].is_leaf
            ]
            for handle in handles:
                weakref.finalize(self, handle.remove)

    def arrived(self, chunk: int) -> None:
        """Called when the gradient of the first parameter in a chunk has arrived."""
        self._arrivals[chunk] = self._arrivals.get(chunk, 0) + 1
        capturing = torch.cuda.is_current_stream_capturing()  # a graph would wait for it forever
        if capturing or self._arrivals[chunk] != self._passes:
            return
        room = self._room()
        for ahead in range(min(chunk + AHEAD, len(self.chunks))):
            if ahead not in self._fetched and room >= CHUNK:
                self._fetch(ahead)
                room -= CHUNK

    def _room(self) -> int:
        """Bytes that can be fetched without raising the peak memory of training without them."""
        used = torch.cuda.memory.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        ours = sum(buffer.numel() for buffer, _ in self._fetched.values())
        others: int = used["current"] - ours
        self._most = max(self._most, others)
        to_come = sum(p.numel() * p.element_size() for p in self._params if p.grad is None)
        return self._most + SLACK - others - to_come - ours

    def take(self, chunk: int) -> list[int]:
        """The addresses of a chunk's anchors, ready for the current stream."""
        if chunk == 0 and torch.cuda.is_current_stream_capturing():
            self._fetched.clear()  # a graph cannot wait for copies that started outside of it
        for number in range(chunk, min(chunk + NEXT + 1, len(self.chunks))):
            if number not in self._fetched:
                self._fetch(number)
        buffer, arrived = self._fetched.pop(chunk)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        buffer.record_stream(current)
        self._last = buffer  # until the next one: by then the update is launched
        if chunk == len(self.chunks) - 1:
            self._passes = max(self._arrivals.values(), default=None)
            self._arrivals.clear()
        places, place = [], buffer.data_ptr()
        for piece in self.chunks[chunk]:
            places.append(place)
            place += _padded(piece, self._flat[piece.row])
        return places

    def discard(self) -> None:
        """Free fetched chunks: the step is done, or is not made."""
        self._fetched.clear()
        self._arrivals.clear()
        self._last = None

    def _fetch(self, chunk: int) -> None:
        pieces = self.chunks[chunk]
        size = sum(_padded(piece, self._flat[piece.row]) for piece in pieces)
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        # Another tensor may have used this memory just before, and none may use it during the copy,
        # even if the buffer is freed.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        buffer.record_stream(self._stream)
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            begin = 0
            for piece in pieces:
                source = self._flat[piece.row]
                part = source[piece.begin : piece.end].view(torch.uint8)
                buffer[begin : begin + part.numel()].copy_(part, non_blocking=True)
                begin += _padded(piece, source)
            arrived.record(self._stream)
        self._fetched[chunk] = buffer, arrived


def _cut(tensors: Mapping[int, Tensor]) -> list[list[Piece]]:
    """Split parameters into chunks, last parameter first: its gradient arrives first."""
    chunks: list[list[Piece]] = [[]]
    room = CHUNK
    for row in sorted(tensors, reverse=True):
        begin, size, width = 0, tensors[row].numel(), tensors[row].element_size()
        while begin < size:
            end = min(size, begin + max(4096, room // width // 4096 * 4096))
            if chunks[-1] and room < min(CHUNK, 4096 * width):
                chunks.append([])
                room, end = CHUNK, min(size, begin + CHUNK // width)
            piece = Piece(row, begin, end, len(chunks) - 1)
            chunks[-1].append(piece)
            room -= _padded(piece, tensors[row])
            begin = end
    return chunks


def _padded(piece: Piece, tensor: Tensor) -> int:
    """Bytes of a piece, rounded up: aligned addresses are faster."""
    return -(-(piece.end - piece.begin) * tensor.element_size() // 64) * 64


def _calling(fetching: Fetching, chunk: int) -> Callable[[Tensor], None]:
    """A hook that holds only a weak reference."""
    known = weakref.ref(fetching)

    def arrived(_: Tensor) -> None:
        if (fetching := known()) is not None:
            fetching.arrived(chunk)

    return arrived
