"""Independent calls side by side on a CPU, each on one core.

One call on several cores waits at the end of every operation until all of them are done with it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from holdfast._torch.layout import rank_and_world

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield the results of a function that runs a model on a CPU without gradients, in order.

    On several ranks, or under autocast, which other threads do not have, one call runs at a time.
    The model must not change in a call.
    """
    cores = torch.get_num_threads()
    if cores == 1 or rank_and_world()[1] > 1 or torch.is_autocast_enabled("cpu"):
        yield from map(function, items)
        return

    def call(item: Item) -> Result:
        with torch.no_grad():
            return function(item)

    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for item in items:
            waiting.append(pool.submit(call, item))
            if len(waiting) > cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)  # the threads have changed that of MKL for all
