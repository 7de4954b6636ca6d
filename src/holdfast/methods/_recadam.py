"""RecAdam's update of a list of tensors: the functional form of the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from holdfast._optim.chunked import parts
from holdfast._torch.memory import dense
from holdfast._torch.sharding import like

Scalar = float | Tensor


class Row(NamedTuple):
    """The tensors of one parameter; the scales are of moments of 8 bits."""

    p: Tensor
    m: Tensor
    v: Tensor
    step: Tensor
    anchor: Tensor | None = None
    weight: Tensor | None = None
    m_scale: Tensor | None = None
    v_scale: Tensor | None = None


def recadam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    anchors: Sequence[Tensor] | None,
    importance: Sequence[Tensor | None] | None = None,
    *,
    lr: Scalar,
    lam: Scalar,
    gamma: float,
    weight_decay: float,
    foreach: bool | None,
    fused: bool | None,
    capturable: bool,
    **adam: Any,
) -> None:
    """One RecAdam update of a list of tensors, in place.

    Adam's part is torch's own implementation with the learning rate lr·λ, so that a neutral pull
    is torch's AdamW to the last bit. ``anchors=None`` is no pull, ``importance``
    None is 1 everywhere, as is a None in it; ``adam`` are Adam's remaining options (beta1, beta2,
    eps, maximize).
    """
    if any(p.dtype != m.dtype for p, m in zip(params, exp_avgs, strict=True)):
        # In the wider dtype of parameter and moments, rounded once at the end.
        wide = [
            torch.promote_types(p.dtype, m.dtype) for p, m in zip(params, exp_avgs, strict=True)
        ]
        theta, g, m, v = (
            [t.to(dtype) for t, dtype in zip(tensors, wide, strict=True)]
            for tensors in (params, grads, exp_avgs, exp_avg_sqs)
        )
        foreach, fused = foreach or fused, False  # torch's fused kernel takes one dtype for all
    else:
        theta, g, m, v = list(params), list(grads), list(exp_avgs), list(exp_avg_sqs)
    if fused and torch.compiler.is_compiling():
        foreach, fused = True, False  # a compiled step cannot contain it: the compiler fuses
    if fused and theta[0].device.type == "cpu":  # where torch's takes them to lie alike
        g = [dense(grad, p) for grad, p in zip(g, theta, strict=True)]

    lr_step, decay = lr * lam, _decay_first(theta, lr, lam, weight_decay)
    if isinstance(lr_step, Tensor):
        # torch divides by a tensor learning rate: 0/0 where it is 0 and so is a second moment.
        # Its fused kernel reads a float32. A compiled step has tensors for rates on any device,
        # for which torch wants the flag.
        lr_step = lr_step.clamp(min=1e-30)
        lr_step = lr_step.float() if fused else lr_step
        capturable = capturable or torch.compiler.is_compiling()
    steps, weights = list(state_steps), importance or [None] * len(theta)
    if anchors is not None and fused and _in_parts(theta, g, lr_step, lr * (1 - lam) * gamma):
        # torch's fused implementation, with the pull on each part while that is in the cache.
        torch._foreach_add_(steps, 1)
        adam |= {"lr": lr_step, "weight_decay": decay, "amsgrad": False}
        rows = zip(theta, g, m, v, steps, anchors, weights, strict=True)
        for p, grad, exp_avg, exp_avg_sq, step, anchor, weight in parts(rows):
            torch._fused_adamw_(p, grad, exp_avg, exp_avg_sq, (), step, **adam)
            _pull_all(p, anchor, weight, lr, lam, gamma, True)
    else:
        adam |= {"foreach": foreach, "fused": fused, "capturable": capturable, "amsgrad": False}
        adamw(theta, g, m, v, [], steps, lr=lr_step, weight_decay=decay, **adam)
        if anchors is not None:
            # On the CPU a foreach operation is the same loop, with more memory in use.
            together = (fused or foreach is not False) and theta[0].device.type != "cpu"
            _pull_all(theta, anchors, weights, lr, lam, gamma, together)

    narrow = [*params, *exp_avgs, *exp_avg_sqs]
    if any(a is not b for a, b in zip(narrow, theta + m + v, strict=True)):
        torch._foreach_copy_(narrow, theta + m + v)


def _in_parts(theta: list[Tensor], grads: list[Tensor], lr: Scalar, c: Scalar) -> bool:
    """Whether the update is done part by part: on a CPU, in one dtype, with a pull."""
    first = theta[0]
    if first.device.type != "cpu" or isinstance(lr, Tensor) or isinstance(c, Tensor) or c == 0:
        return False
    return all(t.dtype == first.dtype and t.device == first.device for t in (*theta, *grads))


def _decay_first(theta: list[Tensor], lr: Scalar, lam: Scalar, weight_decay: float) -> float:
    """θ ← θ − lr·wd·θ, here or in Adam: returns the weight decay that is left for Adam to do.

    Adam is given the learning rate lr·λ and decays by lr·λ·(wd/λ). Where λ leaves too little to
    divide by, or is a tensor, the weights are decayed here.
    """
    if weight_decay == 0 or not (isinstance(lam, Tensor) or lam < 1e-6):
        return weight_decay / cast(float, lam) if weight_decay else 0.0
    torch._foreach_mul_(theta, 1 - lr * weight_decay)
    return 0.0


def pull_rate(lr: Scalar, lam: Scalar, gamma: float) -> Scalar:
    """c = min(1, lr·(1−λ)·γ): the fraction of the way back to θ* that one update goes."""
    c = lr * (1 - lam) * gamma
    return c.clamp(max=1.0) if isinstance(c, Tensor) else min(1.0, c)


def _pull_all(
    params: Sequence[Tensor],
    anchors: Sequence[Tensor],
    importance: Sequence[Tensor | None],
    lr: Scalar,
    lam: Scalar,
    gamma: float,
    foreach: bool,
) -> None:
    """The pull on each parameter, weighted by the importance of those that have one."""
    rows = list(zip(params, anchors, importance, strict=True))
    alike = [(p, a) for p, a, weight in rows if weight is None]
    if alike:
        _pull([p for p, _ in alike], [a for _, a in alike], pull_rate(lr, lam, gamma), foreach)
    weighted = [(p, a, weight) for p, a, weight in rows if weight is not None]
    _pull_weighted(weighted, lr * (1 - lam) * gamma, foreach)


def _pull(params: list[Tensor], anchors: Sequence[Tensor], c: Scalar, foreach: bool) -> None:
    """θ ← θ − c·(θ − θ*)."""
    if not isinstance(c, Tensor) and c == 0:
        return
    if not foreach and len(params) > 1:
        for p, anchor in zip(params, anchors, strict=True):
            _pull([p], [anchor], c, foreach)
        return
    here = [like(anchor, p) for p, anchor in zip(params, anchors, strict=True)]
    if isinstance(c, Tensor):  # which _foreach_lerp_ does not take
        differences = torch._foreach_sub(here, params)
        torch._foreach_mul_(differences, c)
        torch._foreach_add_(params, differences)
    else:
        torch._foreach_lerp_(params, here, c)


def _pull_weighted(rows: Sequence[tuple[Tensor, Tensor, Tensor]], c: Scalar, foreach: bool) -> None:
    """θ ← θ − min(1, c·F)·(θ − θ*), each coordinate at its own rate; rows of θ, θ* and F."""
    if not rows or (not isinstance(c, Tensor) and c == 0):
        return
    if not foreach and len(rows) > 1:
        for row in rows:
            _pull_weighted([row], c, foreach)
        return
    params = [p for p, _, _ in rows]
    here = [like(anchor, p) for p, anchor, _ in rows]
    # Not in half precision: there a large importance is infinite, and 0·∞ no number.
    shares = torch._foreach_mul([_wide(weight, p) for p, _, weight in rows], c)
    torch._foreach_clamp_max_(shares, 1.0)
    torch._foreach_lerp_(params, here, [s.to(p.dtype) for p, s in zip(params, shares, strict=True)])


def _wide(weight: Tensor, p: Tensor) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(weight.dtype, p.dtype), torch.float32)
    return like(weight, p, dtype)


def current_lambda(group: dict[str, Any]) -> Scalar:
    """λ(t): a float in eager runs; a tensor where Python numbers would be baked into the graph."""
    updates: Tensor = group["updates"]
    on_device = group["capturable"] or torch.compiler.is_compiling()
    return cast(Scalar, group["anneal"](updates if on_device else int(updates)))


def is_over(left: Scalar, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether what is ``left`` of the pull, a share of the way, is lost in rounding."""
    if isinstance(left, Tensor) or left > 1e-3:  # no dtype is so coarse
        return False
    return left < min((torch.finfo(dtype).eps for dtype in dtypes), default=1.0) / 64
