"""Parameters drawn to their anchors by a kernel: one launch for each kind of tensors.

A step is planned for some parameters and called at each update: where they, their anchors and
importances lie is found out once. Only gradients may lie elsewhere each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast._torch.layout import dense, is_dense
from holdfast.kernels.pull import BLOCK, WARPS, pull_kernel
from holdfast.kernels.tables import TYPES, Table

__all__ = ["PullStep", "Pulled", "takes"]


class Pulled(NamedTuple):
    """The tensors of one parameter, of this rank.

    Attributes:
        group: its number, which says the rate.
        p, anchor: the weights θ, and θ*.
        weight: how much each coordinate counts; None is 1.
        grad: the gradients, if it is those that change.
    """

    group: int
    p: Tensor
    anchor: Tensor
    weight: Tensor | None = None
    grad: Tensor | None = None

    def others(self) -> list[Tensor]:
        """All but the weights."""
        return [t for t in self[2:] if t is not None]


def takes(row: Pulled) -> bool:
    """Whether the kernel can change a parameter: all is on its device, in dtypes that it knows.

    What changes must lie side by side in memory, a gradient as its weights; the rest is copied
    where it lies otherwise.
    """
    p, others = row.p, row.others()
    known = all(t.dtype in TYPES and t.device == p.device for t in (p, *others))
    strided = all(t.layout is torch.strided for t in (p, *others))
    if not (known and strided):
        return False
    if row.grad is not None and row.grad.stride() != p.stride():
        return False
    return is_dense(p)


class PullStep:
    """Draws parameters to their anchors, or adds the way from them to their gradients.

    Args:
        rows: the parameters' tensors, all with gradients or all without.
    """

    def __init__(self, rows: Sequence[Pulled]) -> None:
        kinds: dict[Any, list[int]] = {}
        for i, row in enumerate(rows):
            if row.p.numel():
                dtypes = (row.p.dtype, *(None if t is None else t.dtype for t in row[2:]))
                kinds.setdefault((row.group, row.p.device, dtypes), []).append(i)
        self._launches = [_Launch([rows[i] for i in kind], kind) for kind in kinds.values()]

    def __call__(
        self,
        rates: Sequence[float],
        grads: Sequence[Tensor] | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """One update.

        Args:
            rates: c of each group; the way is added to gradients with its sign.
            grads: the rows' gradients by now, of the dtypes and strides that they were planned by.
            scale: what these have been multiplied by.
        """
        for launch in self._launches:
            if (c := rates[launch.group]) != 0:
                launch(c, grads, scale)


class _Launch:
    """Parameters of one kind: the same group, device and dtypes."""

    def __init__(self, rows: Sequence[Pulled], numbers: Sequence[int]) -> None:
        first = rows[0]
        self.group, self.numbers = first.group, list(numbers)
        ps = [row.p for row in rows]
        anchors = [dense(row.anchor, row.p) for row in rows]
        weights = [row.p if row.weight is None else dense(row.weight, row.p) for row in rows]
        grads = [row.p if row.grad is None else row.grad for row in rows]
        self.held = (ps, anchors, weights)
        self.table = Table([grads, ps, anchors, weights], BLOCK)
        self.options = {
            "G": TYPES[grads[0].dtype],
            "P": TYPES[first.p.dtype],
            "A": TYPES[first.anchor.dtype],
            "F": TYPES[weights[0].dtype],
            "BLOCK": BLOCK,
            "WEIGHTED": first.weight is not None,
            "COUPLED": first.grad is not None,
            "num_warps": WARPS,
        }

    def __call__(self, c: float, grads: Sequence[Tensor] | None, scale: Tensor | None) -> None:
        table = self.table
        with torch.cuda.device_of(table.sizes):  # Triton launches on the current device
            if grads is not None:
                table.find([[grads[i] for i in self.numbers]])
            pull_kernel[(table.programs,)](
                table.addresses, table.sizes, table.owner, table.part, table.count, c,
                table.sizes if scale is None else scale.to(table.device),
                ALIGNED=all(table.aligned), SCALED=scale is not None, **self.options,
            )  # fmt: skip
