"""The pull to θ* by one Triton kernel: it reads every weight, anchor and importance once.

    θ ← θ + min(1, c·F)·(θ* − θ)        or, coupled,        g ← g − c·F·(θ* − θ)

The arithmetic is in float32, whatever the dtypes of the tensors. Weights that do not move keep
their bits, and weights that move all the way are exactly θ*.

:class:`PullStep` is planned once for a list of parameters and called at each update. There is one
launch per kind of tensors. Only gradients may have new addresses at each call.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast._torch.layout import dense, is_dense
from holdfast.kernels.tables import TYPES, AddressTable, pointer_to, toward

#: Bytes of weights per program, and its warps: each thread loads 16 bytes at once.
BYTES, WARPS = 2048, 4


class Pulled(NamedTuple):
    """The tensors of one parameter on this rank."""

    group: int  # its number determines the rate
    p: Tensor
    anchor: Tensor
    weight: Tensor | None = None  # the importance of each coordinate; None is 1
    grad: Tensor | None = None  # of a coupled penalty, which changes it instead of the weights


def takes(row: Pulled) -> bool:
    """Whether the kernel supports a parameter: all tensors on one device, in known dtypes.

    The weights must be dense, and the gradient must have the same strides. Other tensors with
    other strides are copied.
    """
    p, tensors = row.p, [t for t in row[1:] if t is not None]
    known = all(t.dtype in TYPES and t.device == p.device for t in tensors)
    if not known or any(t.layout is not torch.strided for t in tensors):
        return False
    return (row.grad is None or row.grad.stride() == p.stride()) and is_dense(p)


class PullStep:
    """Pulls parameters to their anchors, or adds the pull to their gradients if they have some."""

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
        """One update, with c of each group; for gradients c has the sign of the pull.

        The gradients have the dtypes and strides of the planned ones, and a scale.
        """
        for launch in self._launches:
            if (c := rates[launch.group]) != 0:
                launch(c, grads, scale)


class _Launch:
    """One launch: parameters of the same group, device and dtypes."""

    def __init__(self, rows: Sequence[Pulled], numbers: Sequence[int]) -> None:
        first = rows[0]
        self.group, self.numbers = first.group, list(numbers)
        ps = [row.p for row in rows]
        anchors = [dense(row.anchor, row.p) for row in rows]
        weights = [row.p if row.weight is None else dense(row.weight, row.p) for row in rows]
        grads = [row.p if row.grad is None else row.grad for row in rows]
        self.held = (ps, anchors, weights)
        block = BYTES // first.p.element_size()
        self.table = AddressTable.of([grads, ps, anchors, weights], block)
        self.options = {
            "G": TYPES[grads[0].dtype],
            "P": TYPES[first.p.dtype],
            "A": TYPES[first.anchor.dtype],
            "F": TYPES[weights[0].dtype],
            "BLOCK": block,
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
                *table.arguments, c, table.sizes if scale is None else scale.to(table.device),
                ALIGNED=all(table.aligned), SCALED=scale is not None, **self.options,
            )  # fmt: skip


@triton.jit
def pull_kernel(
    table, sizes, owner, part, tensors, c, scale,
    G: tl.constexpr, P: tl.constexpr, A: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr, WEIGHTED: tl.constexpr, COUPLED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One block of one tensor.

    The rows of the table are gradients, weights, anchors and importances, of dtypes G, P, A and F;
    ``c`` is the rate. SCALED: the gradients have a scale, and the pull is scaled too. WEIGHTED:
    there are importances. COUPLED: the gradients change, not the weights.
    """
    program = tl.program_id(0)
    own = tl.load(owner + program)
    begin = tl.load(part + program).to(tl.int64) * BLOCK
    size = tl.load(sizes + own)
    g_ = pointer_to(table + own, G, ALIGNED)
    p_ = pointer_to(table + tensors + own, P, ALIGNED)
    a_ = pointer_to(table + 2 * tensors + own, A, ALIGNED)
    f_ = pointer_to(table + 3 * tensors + own, F, ALIGNED)
    if SCALED:
        c = c * tl.load(scale)
    i = tl.multiple_of(begin, BLOCK) + tl.arange(0, BLOCK)
    if begin + BLOCK <= size:  # without a mask, loads are as wide as possible
        _pull(g_ + i, p_ + i, a_ + i, f_ + i, None, c, G, P, WEIGHTED, COUPLED)
    else:
        _pull(g_ + i, p_ + i, a_ + i, f_ + i, i < size, c, G, P, WEIGHTED, COUPLED)


@triton.jit
def _pull(
    g_, p_, a_, f_, mask, c,
    G: tl.constexpr, P: tl.constexpr, WEIGHTED: tl.constexpr, COUPLED: tl.constexpr,
):  # fmt: skip
    p = tl.load(p_, mask).to(tl.float32)
    a = tl.load(a_, mask).to(tl.float32)
    d = a - p
    share = c * tl.load(f_, mask).to(tl.float32) if WEIGHTED else c + tl.zeros_like(d)
    if COUPLED:
        tl.store(g_, (tl.load(g_, mask).to(tl.float32) - share * d).to(G), mask)
    else:
        share = tl.minimum(share, 1.0)
        moved = toward(p, a, share)
        stays = (share == 0.0) | (d == 0.0)  # −0 + 0 is not −0, nor 0·∞ a number
        tl.store(p_, tl.where(stays, p, moved).to(P), mask)
