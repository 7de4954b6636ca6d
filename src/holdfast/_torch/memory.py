"""Call a function on slices, and halve the slices if memory runs out."""

from collections.abc import Callable
from typing import TypeVar

from holdfast._torch.lm_head import is_out_of_memory

Result = TypeVar("Result")


class Batches:
    """Calls a function with slices of at most ``size`` items. If memory runs out, size is halved.

    ``free`` is called before a smaller part is tried.

    >>> Batches(2)(5, lambda part: part.stop - part.start)
    [2, 2, 1]
    """

    def __init__(self, size: int, free: Callable[[], None] = lambda: None) -> None:
        self.size, self.free = size, free

    def __call__(self, count: int, run: Callable[[slice], Result]) -> list[Result]:
        found: list[Result] = []
        start = 0
        while start < count:
            part = slice(start, min(start + self.size, count))
            items = part.stop - start
            try:
                found.append(run(part))
                start = part.stop
                continue
            except RuntimeError as error:
                if items == 1 or not is_out_of_memory(error):
                    raise
            # Outside the except clause, so that the tensors of the failed attempt are freed.
            self.free()
            self.size = items // 2
        return found
