"""What penalties do to tensors: by a kernel where there is one, else by torch's operations."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from holdfast._torch.layout import alike, is_sharded, like, local
from holdfast.kernels import available

if TYPE_CHECKING:
    from holdfast.kernels.pull import PullStep
    from holdfast.stages import Penalty

#: Penalties that act, with their numbers.
Acting = Sequence[tuple[int, "Penalty"]]


class Row(NamedTuple):
    """A parameter that has an anchor.

    Attributes:
        group: the number of its group.
        p, anchor: the weights θ, and θ*.
        graded: whether it has a gradient.
        weights: how much its coordinates count, for each penalty: 1 if all count alike, 0 if it is
            not known.
    """

    group: int
    p: Tensor
    anchor: Tensor
    graded: bool
    weights: list[Tensor | float]


class _Plan(NamedTuple):
    """How some penalties act: the kernel of each with its rows, and what is left to torch."""

    kernels: list[tuple[Penalty, list[Row], PullStep]]
    rest: list[list[Row]]


class Penalised:
    """Parameters that have anchors, for as long as they lie where they do."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = list(rows)
        self._params = [row.p for row in self._rows]
        self._sharded = any(is_sharded(p) for p in self._params)
        self._known = self._places()
        self._grads: list[Any] = []
        self._plans: dict[Any, _Plan] = {}

    def fits(self) -> bool:
        """Whether they do; where a host has moved them, they may be of another dtype too."""
        return self._places() == self._known

    def _places(self) -> list[int]:
        params = [local(p) for p in self._params] if self._sharded else self._params
        return [p.data_ptr() for p in params]

    def move(self, acting: Acting, lrs: Sequence[float]) -> None:
        """One decoupled step of each penalty in turn, at the learning rates of the groups."""
        kernels, rest = self._plan(acting, coupled=False)
        for penalty, _, step in kernels:
            step([_rate(penalty, lr) for lr in lrs])
        for rows in rest:
            _move(rows, acting, lrs[rows[0].group])

    def add_gradients(self, acting: Acting, signs: Sequence[float], scale: Tensor | None) -> None:
        """Add the penalties' gradients, times a sign for each group and perhaps a scale."""
        grads = [local(_grad(row)) for row in self._rows if row.graded]
        kinds = [(g.dtype, g.layout is torch.strided and g.stride()) for g in grads]
        if kinds != self._grads:
            self._grads, self._plans = kinds, {}
        kernels, rest = self._plan(acting, coupled=True)
        for penalty, rows, step in kernels:
            rates = [sign * _rate(penalty, 1.0) for sign in signs]
            step(rates, [local(_grad(row)) for row in rows], scale)
        for row in (row for rows in rest for row in rows):
            _add_gradient(row, acting, signs[row.group], scale)

    def _plan(self, acting: Acting, *, coupled: bool) -> _Plan:
        key = (coupled, *(k for k, _ in acting))
        if key not in self._plans:
            graded = coupled or all(penalty.needs_gradient for _, penalty in acting)
            rows = [row for row in self._rows if row.graded or not graded]
            self._plans[key] = _planned(rows, acting, coupled)
        return self._plans[key]


def _planned(rows: list[Row], acting: Acting, coupled: bool) -> _Plan:
    """The kernels take what only goes a share of the way back, in float32 or once.

    In half precision each kernel would round, where all penalties together are to round once.
    """
    here = [
        row for row in rows
        if all(penalty.rate(1.0) is not None for _, penalty in acting)
        and (len(acting) == 1 or row.p.dtype == torch.float32)
        and available(row.p.device)
        and not (coupled and not alike(_grad(row), row.p))
    ]  # fmt: skip
    if not here:
        return _Plan([], _at_once(rows))
    from holdfast.kernels.pull import Pulled, PullStep, takes

    def pulled(row: Row, k: int) -> Pulled:
        weight = row.weights[k]
        return Pulled(
            row.group, local(row.p), local(row.anchor),
            local(weight) if isinstance(weight, Tensor) else None,
            local(_grad(row)) if coupled else None,
        )  # fmt: skip

    taken = [row for row in here if all(takes(pulled(row, k)) for k, _ in acting)]
    kernels = []
    for k, penalty in acting:
        own = [row for row in taken if _acts_on(penalty, k, row)]
        kernels.append((penalty, own, PullStep([pulled(row, k) for row in own])))
    known = {id(row) for row in taken}
    return _Plan(kernels, _at_once([row for row in rows if id(row) not in known]))


def _at_once(rows: Iterable[Row]) -> list[list[Row]]:
    """What torch is given at once: on a GPU the rows of a group that need no copy, else each.

    On the CPU a foreach operation is the same loop, with more memory in use.
    """
    found: dict[Any, list[Row]] = {}
    for i, row in enumerate(rows):
        p, tensors = row.p, [t for t in row.weights if isinstance(t, Tensor)]
        near = all(t.device == p.device for t in (row.anchor, *tensors))
        together = near and p.device.type != "cpu" and row.anchor.dtype == p.dtype == wide(p)
        found.setdefault((row.group, p.device, p.dtype) if together else i, []).append(row)
    return list(found.values())


def _acts_on(penalty: Penalty, k: int, row: Row) -> bool:
    unknown = not isinstance(row.weights[k], Tensor) and row.weights[k] == 0
    return not unknown and (row.graded or not penalty.needs_gradient)


def _rate(penalty: Penalty, lr: float) -> float:
    return penalty.rate(lr) or 0.0


def _move(rows: list[Row], acting: Acting, lr: float) -> None:
    """Penalties one after the other; half precision is rounded once, at the end."""
    theta = [like(row.p, row.p, wide(row.p)) for row in rows]
    star = [like(row.anchor, row.p, wide(row.p)) for row in rows]
    for k, penalty in acting:
        own = [i for i, row in enumerate(rows) if _acts_on(penalty, k, row)]
        weights = [weight_of(rows[i], k) for i in own]
        c = penalty.rate(lr)
        if c is not None:
            pull([theta[i] for i in own], [star[i] for i in own], weights, c)
            continue
        for i, weight in zip(own, weights, strict=True):
            before = theta[i] - star[i]
            after = penalty.move(before, weight, lr)
            # What is not moved keeps its bits: θ* + (θ − θ*) is θ only up to rounding.
            theta[i] = torch.where(after == before, theta[i], star[i] + after)
    for row, moved in zip(rows, theta, strict=True):
        if moved is not row.p:
            row.p.copy_(moved)


def pull(
    theta: list[Tensor], star: list[Tensor], weights: Sequence[Tensor | float], c: float
) -> None:
    """θ ← θ + min(1, c·F)·(θ* − θ), in place. What is not moved keeps its bits, but for −0."""
    if c == 0 or not theta:
        return
    known = [weight for weight in weights if isinstance(weight, Tensor)]
    if not known:
        torch._foreach_lerp_(theta, star, min(1.0, c))
        return
    shares = torch._foreach_mul(known, c)
    torch._foreach_clamp_max_(shares, 1.0)
    torch._foreach_lerp_(theta, star, shares)


def _add_gradient(row: Row, acting: Acting, sign: float, scale: Tensor | None) -> None:
    way = difference(row.p, row.anchor)
    terms = [penalty.gradient(way, weight_of(row, k)) for k, penalty in acting]
    added = reduce(operator.add, terms)
    grad = _grad(row)
    added = added if scale is None else added * scale.to(grad.device)
    grad.add_(added.to(grad.dtype), alpha=sign)


def difference(p: Tensor, anchor: Tensor) -> Tensor:
    """θ − θ*."""
    return p.detach().to(wide(p)) - like(anchor, p, wide(p))


def weight_of(row: Row, k: int) -> Tensor | float:
    """How much a row's coordinates count for a penalty, on its device."""
    weight = row.weights[k]
    return like(weight, row.p, wide(row.p)) if isinstance(weight, Tensor) else weight


def wide(p: Tensor) -> torch.dtype:
    """At least float32: in half precision a large importance is infinite, and 0·∞ no number."""
    return torch.promote_types(p.dtype, torch.float32)


def _grad(row: Row) -> Tensor:
    grad: Any = row.p.grad
    return grad  # type: ignore[no-any-return]
