"""Work on large tensors a slice at a time, on all cores, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Task = TypeVar("Task")
Result = TypeVar("Result")

#: Values in a slice. A few slices of float32 fit into a processor's cache.
SLICE = 2**19
_MOST_THREADS = 16  # more do not read faster, and each has its own slice in memory


def slices(size: int) -> Iterator[tuple[int, int]]:
    """The slices of a tensor of some size, from the first value of each to its end.

    >>> [end - begin for begin, end in slices(2 * SLICE + 3)]
    [524288, 524288, 3]
    """
    for begin in range(0, size, SLICE):
        yield begin, min(begin + SLICE, size)


class Scratch(threading.local):
    """Memory that each thread uses again for slice after slice.

    Fresh memory comes page by page from the system, which takes as long as reading a file.

    >>> scratch = Scratch()
    >>> one = scratch("sum", 3, torch.float32)
    >>> scratch("sum", 2, torch.float64).data_ptr() == one.data_ptr()
    False
    >>> scratch("sum", 2, torch.int64).data_ptr() == scratch("sum", 2, torch.float64).data_ptr()
    True
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, use: str, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor for one use; the one before for the same use is lost."""
        needed = size * dtype.itemsize
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < needed:
            buffer = self._buffers[use] = torch.empty(needed, dtype=torch.uint8)
        return buffer[:needed].view(dtype)

    def cast(self, use: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values in another dtype, or as they are."""
        if values.dtype == dtype:
            return values
        return self(use, len(values), dtype).copy_(values)


def widened(before: Tensor, after: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Two slices in one dtype to calculate in, float32 at least."""
    wide = torch.promote_types(torch.promote_types(before.dtype, after.dtype), torch.float32)
    return scratch.cast("before", before, wide), scratch.cast("after", after, wide)


def in_parallel(do: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
    """``map`` in threads, as many as torch would use; only a few tasks are under way at a time.

    A thread takes a slice from its reading to its end, so reading, arithmetic and writing overlap
    and a slice stays in the cache of its core. The results come in the order of the tasks.

    >>> list(in_parallel(lambda n: n * n, range(4)))
    [0, 1, 4, 9]
    """
    set_before = torch.get_num_threads()
    threads = min(set_before, _MOST_THREADS)
    if threads == 1:
        yield from map(do, tasks)
        return
    pending: deque[Future[Result]] = deque()
    # Within a slice torch must not spread over the same cores once more.
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for task in tasks:
            pending.append(pool.submit(do, task))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(set_before)  # threads to come take the number that was set last
