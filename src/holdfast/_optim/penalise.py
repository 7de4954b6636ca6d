"""The arithmetic of penalties: by a kernel where there is one, otherwise by torch's operations."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from holdfast._optim.backends import pull, wide
from holdfast._torch.layout import alike, is_sharded, like, local
from holdfast.kernels import available

if TYPE_CHECKING:
    from holdfast.kernels.pull import PullStep
    from holdfast.stages import Penalty

#: Penalties that act, with their numbers.
Acting = Sequence[tuple[int, "Penalty"]]


class Penalised(NamedTuple):
    """A parameter that has an anchor.

    Attributes:
        group: the number of its group.
        p, anchor: the weights θ, and θ*.
        graded: whether it has a gradient.
        weights: the importance of its coordinates for each penalty: 1 if all count alike, 0 if it
            is unknown.
    """

    group: int
    p: Tensor
    anchor: Tensor
    graded: bool
    weights: list[Tensor | float]

    @property
    def grad(self) -> Tensor:
        """The gradient of a graded parameter."""
        return cast(Tensor, self.p.grad)

    def way(self) -> Tensor:
        """θ − θ*."""
        return self.p.detach().to(wide(self.p)) - like(self.anchor, self.p, wide(self.p))

    def weight(self, k: int) -> Tensor | float:
        """The importance for the k-th penalty, on the parameter's device."""
        weight = self.weights[k]
        return like(weight, self.p, wide(self.p)) if isinstance(weight, Tensor) else weight

    def is_subject_to(self, penalty: Penalty, k: int) -> bool:
        """Whether the k-th penalty acts on it."""
        unknown = not isinstance(self.weights[k], Tensor) and self.weights[k] == 0
        return not unknown and (self.graded or not penalty.needs_gradient)


class _Plan(NamedTuple):
    """How some penalties act: each with its kernel, and the parameters that torch updates."""

    kernels: list[tuple[Penalty, list[Penalised], PullStep]]
    rest: list[list[Penalised]]


class Penaliser:
    """Applies penalties to parameters, as long as their memory stays where it is."""

    def __init__(self, rows: Iterable[Penalised]) -> None:
        self._rows = list(rows)
        self._params = [row.p for row in self._rows]
        self._sharded = any(is_sharded(p) for p in self._params)
        self._known = self._places()
        self._grads: list[Any] = []
        self._plans: dict[Any, _Plan] = {}

    def fits(self) -> bool:
        """Whether no parameter was moved; a host that moves one may also change its dtype."""
        return self._places() == self._known

    def _places(self) -> list[int]:
        params = [local(p) for p in self._params] if self._sharded else self._params
        return [p.data_ptr() for p in params]

    def move(self, acting: Acting, lrs: Sequence[float]) -> None:
        """One decoupled step of each penalty in turn, at the learning rates of the groups."""
        kernels, rest = self._plan(acting, coupled=False)
        for penalty, _, step in kernels:
            step([penalty.rate(lr) or 0.0 for lr in lrs])
        for rows in rest:
            _move(rows, acting, lrs[rows[0].group])

    def add_gradients(self, acting: Acting, signs: Sequence[float], scale: Tensor | None) -> None:
        """Add the penalties' gradients, times a sign per group and the scale of the gradients."""
        grads = [local(row.grad) for row in self._rows if row.graded]
        kinds = [(g.dtype, g.layout is torch.strided and g.stride()) for g in grads]
        if kinds != self._grads:
            self._grads, self._plans = kinds, {}
        kernels, rest = self._plan(acting, coupled=True)
        for penalty, rows, step in kernels:
            rates = [sign * (penalty.rate(1.0) or 0.0) for sign in signs]
            step(rates, [local(row.grad) for row in rows], scale)
        for row in (row for rows in rest for row in rows):
            way = row.way()
            terms = [penalty.gradient(way, row.weight(k)) for k, penalty in acting]
            added = reduce(operator.add, terms)
            added = added if scale is None else added * scale.to(row.grad.device)
            row.grad.add_(added.to(row.grad.dtype), alpha=signs[row.group])

    def _plan(self, acting: Acting, *, coupled: bool) -> _Plan:
        key = (coupled, *(k for k, _ in acting))
        if key not in self._plans:
            graded = coupled or all(penalty.needs_gradient for _, penalty in acting)
            rows = [row for row in self._rows if row.graded or not graded]
            self._plans[key] = _planned(rows, acting, coupled)
        return self._plans[key]


def _planned(rows: list[Penalised], acting: Acting, coupled: bool) -> _Plan:
    """Assign to the kernels all penalties that have a rate, in float32 or if there is only one.

    In half precision each kernel would round, but all penalties together should round once.
    """
    here = [
        row for row in rows
        if all(penalty.rate(1.0) is not None for _, penalty in acting)
        and (len(acting) == 1 or row.p.dtype == torch.float32)
        and available(row.p.device)
        and not (coupled and not alike(row.grad, row.p))
    ]  # fmt: skip
    if not here:
        return _Plan([], _batches(rows))
    from holdfast.kernels.pull import Pulled, PullStep, takes  # needs Triton

    def pulled(row: Penalised, k: int) -> Pulled:
        weight = row.weights[k]
        return Pulled(
            row.group, local(row.p), local(row.anchor),
            local(weight) if isinstance(weight, Tensor) else None,
            local(row.grad) if coupled else None,
        )  # fmt: skip

    taken = [row for row in here if all(takes(pulled(row, k)) for k, _ in acting)]
    kernels = []
    for k, penalty in acting:
        own = [row for row in taken if row.is_subject_to(penalty, k)]
        kernels.append((penalty, own, PullStep([pulled(row, k) for row in own])))
    known = {id(row) for row in taken}
    return _Plan(kernels, _batches(row for row in rows if id(row) not in known))


def _batches(rows: Iterable[Penalised]) -> list[list[Penalised]]:
    """Parameters for one torch call: on a GPU those of a group that need no copy, else one each.

    On the CPU a foreach operation is the same loop, with more memory in use.
    """
    found: dict[Any, list[Penalised]] = {}
    for i, row in enumerate(rows):
        p, tensors = row.p, [t for t in row.weights if isinstance(t, Tensor)]
        near = all(t.device == p.device for t in (row.anchor, *tensors))
        together = near and p.device.type != "cpu" and row.anchor.dtype == p.dtype == wide(p)
        found.setdefault((row.group, p.device, p.dtype) if together else i, []).append(row)
    return list(found.values())


def _move(rows: list[Penalised], acting: Acting, lr: float) -> None:
    """Apply penalties one after the other; half precision is rounded once, at the end."""
    theta = [like(row.p, row.p, wide(row.p)) for row in rows]
    star = [like(row.anchor, row.p, wide(row.p)) for row in rows]
    for k, penalty in acting:
        own = [i for i, row in enumerate(rows) if row.is_subject_to(penalty, k)]
        weights = [rows[i].weight(k) for i in own]
        c = penalty.rate(lr)
        if c is not None and own:
            known = [weight if isinstance(weight, Tensor) else None for weight in weights]
            pull([theta[i] for i in own], [star[i] for i in own], known, c, foreach=True)
        elif c is None:
            for i, weight in zip(own, weights, strict=True):
                before = theta[i] - star[i]
                after = penalty.move(before, weight, lr)
                # Weights that do not move keep their bits: θ* + (θ − θ*) is θ up to rounding.
                theta[i] = torch.where(after == before, theta[i], star[i] + after)
    for row, moved in zip(rows, theta, strict=True):
        if moved is not row.p:
            row.p.copy_(moved)
