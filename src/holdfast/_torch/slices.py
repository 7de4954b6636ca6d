"""Slices of a flat tensor: short enough for a processor's cache."""

from collections.abc import Iterator

#: Values per slice. A few float32 slices fit into a processor's cache.
SLICE = 2**19


def slices(size: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of each slice of a tensor, from a weight on.

    >>> [end - begin for begin, end in slices(2 * SLICE + 3)]
    [524288, 524288, 3]
    """
    for begin in range(start, size, SLICE):
        yield begin, min(begin + SLICE, size)


def blocks(size: int, wanted: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of a few short blocks of a tensor, spread evenly over it.

    >>> list(blocks(100, wanted=2, length=10))
    [(20, 30), (70, 80)]
    """
    step = size // wanted
    for number in range(wanted):
        begin = number * step + (step - length) // 2
        yield begin, begin + length
