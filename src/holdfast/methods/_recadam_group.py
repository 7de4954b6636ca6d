"""How the parameters of one of RecAdam's groups are updated: by the kernel, or by torch.

What is found out about them is kept from one update to the next, while they are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from holdfast import kernels
from holdfast._torch import eight_bit
from holdfast._torch.memory import flat
from holdfast.methods._recadam import Row, Scalar, recadam

__all__ = ["GroupUpdate"]

_OPTIONS = ("lr", "gamma", "eps", "weight_decay", "maximize")


class GroupUpdate:
    """The update of the parameters of a group that have gradients.

    Args:
        rows: their tensors.
        group: their settings.
        number: of the group, which is part of the seed where numbers are rounded at random.
    """

    def __init__(self, rows: Sequence[Row], group: dict[str, Any], number: int) -> None:
        self.rows, self.number = list(rows), number
        self._dtypes = [row.p.dtype for row in rows]
        self._draws = any(_is_packed(row, group) for row in rows)
        self._kernel: Any = None
        taken: list[int] = []
        # What is not pulled, fused=True leaves to torch's own kernel: AdamW to the last bit.
        self._adamw = bool(group["fused"]) and all(
            row.anchor is None and row.p.dtype == row.m.dtype and not _is_packed(row, group)
            for row in rows
        )
        on = {row.p.device for row in rows}
        if not self._adamw and any(kernels.wanted(group, device) for device in on):
            from holdfast.kernels.recadam_step import RecAdamStep, takes

            taken = [i for i, row in enumerate(rows) if takes(row)]
            if taken:
                self._kernel = RecAdamStep([rows[i] for i in taken])
        self._taken, self._all = taken, len(taken) == len(rows)
        left = sorted(set(range(len(rows))) - set(taken))
        self._left = [
            part
            for part in (
                [i for i in left if rows[i].anchor is not None],
                [i for i in left if rows[i].anchor is None],
            )
            if part
        ]

    def fits(self) -> bool:
        """Whether the tensors are what they were, and lie where they did."""
        if self._all and self._kernel is not None:
            return bool(self._kernel.fits())  # what has another dtype by now lies elsewhere
        same = [row.p.dtype for row in self.rows] == self._dtypes
        return same and (self._kernel is None or bool(self._kernel.fits()))

    def __call__(
        self,
        group: dict[str, Any],
        lam: Scalar,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """One update."""
        grads = [cast(Tensor, row.p.grad) for row in self.rows]
        updates: Tensor = group["updates"]
        on_device = updates.device.type != "cpu"
        seed: int | Tensor = 0
        if self._draws:
            seed = 15485863 * self.number + 7919 * (updates if on_device else int(updates))
        if self._kernel is not None:
            from holdfast.kernels.recadam_step import Rates

            beta1, beta2 = group["betas"]
            rates = Rates(
                lam=lam, beta1=beta1, beta2=beta2, grad_scale=grad_scale, found_inf=found_inf,
                stochastic=group["stochastic_rounding"],
                seed=15485863 * self.number % 2**30 if isinstance(seed, Tensor) else seed % 2**30,
                updates=updates if on_device else None, **{n: group[n] for n in _OPTIONS},
            )  # fmt: skip
            self._kernel(grads if self._all else [grads[i] for i in self._taken], rates)
        scaling = {"grad_scale": grad_scale, "found_inf": found_inf} if self._adamw else {}
        if self._left and found_inf is not None and not scaling:
            raise RuntimeError(
                f"a parameter of {self.rows[self._left[0][0]].p.dtype} cannot be updated under a "
                "GradScaler with fused=True and capturable=True: leave out one of them"
            )
        for part in self._left:
            rows = [self.rows[i] for i in part]
            random = [_Random(seed, i, self.rows[i].p) for i in part]
            _by_torch(rows, [grads[i] for i in part], group, lam, random, **scaling)

    def let_go(self) -> None:
        """Free what was fetched for an update that is not made."""
        if self._kernel is not None:
            self._kernel.let_go()


def _by_torch(
    rows: Sequence[Row],
    grads: Sequence[Tensor],
    group: dict[str, Any],
    lam: Scalar,
    random: Sequence[_Random],
    **scaling: Tensor | None,
) -> None:
    """By torch's operations; what they do not know (8 bits, random rounding) is put around them."""
    pulled = rows[0].anchor is not None
    options = {name: group[name] for name in (*_OPTIONS, "foreach", "fused", "capturable")}
    options |= {"lam": lam if pulled else 1.0, **scaling}
    options |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}

    def update(rows: Sequence[Row], grads: Sequence[Tensor]) -> None:
        recadam(
            [row.p for row in rows], grads, [row.m for row in rows], [row.v for row in rows],
            [row.step for row in rows],
            [cast(Tensor, row.anchor) for row in rows] if pulled else None,
            [row.weight for row in rows], **options,
        )  # fmt: skip

    plain = [i for i, row in enumerate(rows) if not _is_packed(row, group)]
    if plain:
        update([rows[i] for i in plain], [grads[i] for i in plain])
    for i, (row, grad) in enumerate(zip(rows, grads, strict=True)):
        if _is_packed(row, group):  # one at a time: unpacked, it takes four times the memory
            wide = _unpacked(row)
            update([wide], [grad.to(wide.p.dtype)])
            _pack(wide, row, group["stochastic_rounding"], random[i])


def _is_packed(row: Row, group: dict[str, Any]) -> bool:
    rounds = group["stochastic_rounding"] and row.p.dtype == torch.bfloat16
    return row.m_scale is not None or rounds


def _unpacked(row: Row) -> Row:
    m, v = row.m.float(), row.v.float()
    if row.m_scale is not None and row.v_scale is not None:
        m = _lying_as(eight_bit.decode(flat(row.m), row.m_scale, eight_bit.SIGNED), row.m)
        root = eight_bit.decode(flat(row.v), row.v_scale, eight_bit.UNSIGNED)
        v = _lying_as(root.square(), row.v)
    return row._replace(p=row.p.to(torch.promote_types(row.p.dtype, m.dtype)), m=m, v=v)


def _pack(wide: Row, row: Row, stochastic: bool, random: _Random) -> None:
    if row.m_scale is not None and row.v_scale is not None:
        noise = random(0)
        m, m_scale = eight_bit.encode(flat(wide.m), eight_bit.SIGNED, noise & 0xFFFF)
        v, v_scale = eight_bit.encode(flat(wide.v).sqrt(), eight_bit.UNSIGNED, noise >> 16)
        for kept, new in ((flat(row.m), m), (flat(row.v), v)):
            kept.copy_(new)
        row.m_scale.copy_(m_scale)
        row.v_scale.copy_(v_scale)
    else:
        row.m.copy_(wide.m)
        row.v.copy_(wide.v)
    if stochastic and row.p.dtype == torch.bfloat16:
        noise = random(1).view(row.p.shape) & 0xFFFF
        row.p.copy_(eight_bit.round_at_random(wide.p.contiguous(), noise))
    else:
        row.p.copy_(wide.p)


class _Random:
    """Random bits for the elements of one parameter at one update."""

    def __init__(self, seed: int | Tensor, number: int, p: Tensor) -> None:
        self.seed, self.number, self.p = seed, number, p

    def __call__(self, which: int) -> Tensor:
        size, device = self.p.numel(), self.p.device
        return eight_bit.noise(self.seed + which, self.number, size, device)


def _lying_as(flat: Tensor, tensor: Tensor) -> Tensor:
    return flat.as_strided(tensor.shape, tensor.stride())
