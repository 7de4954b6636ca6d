"""Parts of tensors that stay in the cache between one operation and the next.

Two operations in place, one after the other over all tensors, read the weights from memory twice.
Part by part, the second finds them in the cache. Each operation still runs on all of torch's
threads, which share a part in the same way each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# Elements of a part for each thread: θ, g, m and v take 8 MB in float32. The cache would like less,
# but each part costs some 30 µs, for calls and for waiting until all threads are done.
SHARE = 2**19
# Boundaries between parts, in elements: whole vectors of any dtype, so that no element is
# computed in another way than in the whole tensor.
STRIDE = 64

Row = tuple[Any, ...]


def parts(rows: Iterable[Row], size: int | None = None) -> Iterator[list[Row]]:
    """The columns of ``rows``, a part at a time.

    A row has the tensors that go with one parameter, itself first. A part is of one long
    parameter, or has some short ones whole. Tensors of 0 dimensions, and None, are the same in all
    parts of a row. A row that is not laid out in one piece stays whole.

    Args:
        rows: tuples of tensors or None.
        size: elements of a part; None is ``SHARE`` for each of torch's threads.

    Example:
        >>> import torch
        >>> from holdfast._optim.chunked import parts
        >>> rows = [(torch.zeros(100), None), (torch.zeros(9), None), (torch.zeros(3), None)]
        >>> [[len(p) for p in column] for column, _ in parts(rows, size=64)]
        [[64], [36], [9, 3]]
    """
    size = size or SHARE * torch.get_num_threads()
    short: list[Row] = []
    held = 0
    for row in rows:
        elements = row[0].numel()
        if elements > size and all(_in_one_piece(t, row[0]) for t in row):
            count = -(-elements // size)
            length = -(-elements // count)  # parts of about the same length
            yield from _split(row, -(-length // STRIDE) * STRIDE)
            continue
        short.append(row)
        held += elements
        if held >= size:
            yield list(zip(*short, strict=True))
            short, held = [], 0
    if short:
        yield list(zip(*short, strict=True))


def _in_one_piece(t: Tensor | None, p: Tensor) -> bool:
    """Whether a tensor can be parted as the parameter: no subclass, such as a sharded one."""
    if t is None or (type(t) is Tensor and t.dim() == 0):
        return True
    plain = type(t) in (Tensor, Parameter) and t.layout == torch.strided and t.device == p.device
    return plain and t.shape == p.shape and t.is_contiguous()


def _split(row: Row, length: int) -> Iterator[list[Row]]:
    """Views of ``length`` elements, as columns of one."""
    whole = {i for i, t in enumerate(row) if t is None or t.dim() == 0}
    views = [() if i in whole else t.view(-1).split(length) for i, t in enumerate(row)]
    for k in range(len(views[0])):
        yield [(t,) if i in whole else (views[i][k],) for i, t in enumerate(row)]
