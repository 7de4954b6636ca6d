r"""RecAdam: Adam that recalls the pretrained weights while it learns the target task.

Chen et al., *Recall and Learn: Fine-tuning Deep Pretrained Language Models with Less
Forgetting*, EMNLP 2020, https://arxiv.org/abs/2004.12651.

The objective λ(t)·Loss_T + (1−λ(t))·½γ·Σ(θ−θ*)² is minimised with the quadratic term decoupled
from Adam's moments. With u = m̂/(√v̂+ε), bias-corrected Adam on the gradient of Loss_T alone:

    θ ← θ − lr·wd·θ
    θ ← θ − lr·λ·u
    θ ← θ − c·(θ − θ*)          c = min(1, lr·(1−λ)·γ)

The paper's Algorithm 1 prints the pull without the learning rate; its released code, which made
its results, multiplies by it and pulls the weights after the step. That is the rule here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from holdfast._checks import at_least_zero
from holdfast.anneal import Anneal, Constant, Sigmoid
from holdfast.optim._adam import check_adam_group, make_adam_state
from holdfast.optim._anchored import AnchoredOptimizer
from holdfast.reference import Reference

__all__ = ["RecAdam"]

_Scalar = float | Tensor
_OPTIONS = (
    "lr", "gamma", "eps", "weight_decay", "maximize", "foreach", "fused", "capturable"
)  # fmt: skip


class RecAdam(AnchoredOptimizer):
    r"""Adam with a decoupled, annealed pull to the pretrained weights.

    Args:
        params: parameters, ``model.named_parameters()``, or groups of either. A group may set its
            own ``lr``, ``betas``, ``eps``, ``weight_decay``, ``gamma`` and ``anneal``, and
            ``anchored=False`` for plain Adam (a new head).
        lr: learning rate; a 0-dim tensor for ``capturable`` runs.
        betas, eps: Adam's.
        weight_decay: decoupled decay towards 0, as in AdamW (whose default is 0.01, not 0).
        gamma: strength γ of the pull. Each update moves θ by the fraction lr·(1−λ)·γ of its way
            back to θ*; keep lr·γ ≤ 1 (the paper: 2e-5 · 5000 = 0.1). Warm-up and decay of the
            learning rate scale the pull too, whatever λ does.
        anneal: λ(t), see :mod:`holdfast.anneal`. λ scales the learning as well: while it is near 0
            anchored weights hardly learn. The default, the paper's, reaches ½ at update 250; for
            a run of another length take ``Sigmoid.over(total_steps)``, in updates.
        anchors: the pretrained weights θ*. None anchors each parameter at its value now. A
            :class:`~holdfast.Reference` or a mapping from names to tensors anchors by name
            (prefixes such as ``bert.`` or ``module.`` are resolved); a parameter without an
            anchor gets plain Adam. Anchors stay where they are: on another device they are
            copied over for each step.
        foreach, fused: which of torch's implementations to use; None is torch's own choice.
        state_dtype: dtype of Adam's moments; None is the parameter's own. With another dtype the
            arithmetic is done in the wider one of the two and rounded once.
        maximize: ascend instead of descend.
        capturable: keep all counts and rates on the device, for CUDA graphs.

    Example:
        >>> import torch
        >>> from holdfast import RecAdam, Sigmoid
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = RecAdam(model.parameters(), lr=1e-3, gamma=100, anneal=Sigmoid(t0=50))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.recall_state()["updates"]
        1

    Checkpoints (``state_dict()``) carry a fingerprint of the anchors, not the anchors: to go on,
    make the optimizer as before, with the *pretrained* weights, and load the state into it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        gamma: float = 5000.0,
        anneal: Anneal = Sigmoid(k=0.1, t0=250),  # noqa: B008 (frozen)
        anchors: Reference | Mapping[str, Tensor] | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        if foreach and fused:
            raise ValueError(
                "foreach and fused cannot both be True: choose one, or leave both None"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "gamma": gamma,
            "anneal": anneal,
            "foreach": foreach,
            "fused": fused,
            "maximize": maximize,
            "capturable": capturable,
        }
        super().__init__(params, defaults, anchors, state_dtype)
        self._warn_of_fast_pull(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; without a Reference its parameters are anchored at their values now."""
        super().add_param_group(param_group)
        if hasattr(self, "_anchors"):
            self._warn_of_fast_pull(self.param_groups[-1:])

    def _warn_of_fast_pull(self, groups: list[dict[str, Any]]) -> None:
        pulled = [g for g in groups if g["anchored"] and g["anneal"] != Constant(1.0)]
        fastest = max((float(g["lr"]) * g["gamma"] for g in pulled), default=0.0)
        if fastest > 1:
            warnings.warn(
                f"lr·gamma = {fastest:g} is above 1: the pull is clamped, and while λ is near 0 "
                "every update puts the weights back onto the anchors. The paper has "
                "lr·gamma = 0.1: set gamma = 0.1 / lr for that.",
                stacklevel=3,
            )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_adam_group(group)
        at_least_zero("gamma", group["gamma"])
        if not isinstance(group["anneal"], Anneal):
            raise TypeError(
                "anneal must be one of holdfast.anneal's Sigmoid, Linear and Constant, or an "
                f"Anneal of your own, got {group['anneal']!r}"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one update. Parameters whose gradient is None are left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        moves = self._begin_update()
        for group, anchors in zip(self.param_groups, self._anchors, strict=True):
            rows = [
                (p, a, self._state_of(p, group))
                for p, a in zip(group["params"], anchors, strict=True)
                if p.grad is not None
            ]
            if not moves:
                continue
            lam = _current_lambda(group)
            for pulled in (True, False):
                part = [row for row in rows if (row[1] is not None) == pulled]
                if not part:
                    continue
                recadam(
                    [p for p, _, _ in part],
                    [cast(Tensor, p.grad) for p, _, _ in part],
                    [s["exp_avg"] for _, _, s in part],
                    [s["exp_avg_sq"] for _, _, s in part],
                    [s["step"] for _, _, s in part],
                    [cast(Tensor, a) for _, a, _ in part] if pulled else None,
                    lam=lam if pulled else 1.0,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    **{name: group[name] for name in _OPTIONS},
                )
        return loss

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            make_adam_state(state, p, group, self.state_dtype or p.dtype)
        return state

    @torch.no_grad()
    def recall_state(self, *, distance: bool = False, group: int | None = None) -> dict[str, float]:
        """Where the recall stands, ready for a log.

        Args:
            distance: also measure ‖θ − θ*‖ over all anchored parameters (reads every weight).
            group: the group to report; None is the first that has anchors.

        Returns:
            ``updates`` so far; ``lam`` = λ and ``pull`` = c, the fraction of the way back to θ*,
            of the last update (before the first one: of the first one) at the current learning
            rate; and ``distance`` if asked for.
        """
        pulled = [any(a is not None for a in anchors) for anchors in self._anchors]
        if group is not None and not 0 <= group < len(pulled):
            raise ValueError(f"there are {len(pulled)} groups, no group {group}")
        if group is None:
            group = pulled.index(True) if any(pulled) else 0
        chosen = self.param_groups[group]
        updates = int(chosen["updates"])
        lam = chosen["anneal"](max(1, updates)) if pulled[group] else 1.0
        state = {
            "updates": updates,
            "lam": lam,
            "pull": float(pull_rate(float(chosen["lr"]), lam, chosen["gamma"])),
        }
        if distance:
            state["distance"] = self.distance()
        return state


def recadam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    anchors: Sequence[Tensor] | None,
    *,
    lr: _Scalar,
    lam: _Scalar,
    gamma: float,
    weight_decay: float,
    foreach: bool | None,
    fused: bool | None,
    capturable: bool,
    **adam: Any,
) -> None:
    """One RecAdam update of a list of tensors, in place: the functional form of the optimizer.

    Adam's part is torch's own implementation with the learning rate lr·λ, so that a neutral pull
    is torch's AdamW to the last bit on every path. ``anchors=None`` is no pull; ``adam`` are its
    remaining options (beta1, beta2, eps, maximize).
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

    lr_step, decay = lr * lam, _decay_first(theta, lr, lam, weight_decay)
    if isinstance(lr_step, Tensor):
        # torch divides by a tensor learning rate: 0/0 where it is 0 and so is a second moment.
        # Its fused kernel reads a float32. A compiled step has tensors for rates on any device,
        # for which torch wants the flag.
        lr_step = lr_step.clamp(min=1e-30)
        lr_step = lr_step.float() if fused else lr_step
        capturable = capturable or torch.compiler.is_compiling()
    steps = list(state_steps)
    adam |= {"foreach": foreach, "fused": fused, "capturable": capturable, "amsgrad": False}
    adamw(theta, g, m, v, [], steps, lr=lr_step, weight_decay=decay, **adam)
    if anchors is not None:
        # On the CPU a foreach operation is the same loop, with more memory in use.
        together = (fused or foreach is not False) and theta[0].device.type != "cpu"
        _pull(theta, anchors, pull_rate(lr, lam, gamma), together)

    narrow = [*params, *exp_avgs, *exp_avg_sqs]
    if any(a is not b for a, b in zip(narrow, theta + m + v, strict=True)):
        torch._foreach_copy_(narrow, theta + m + v)


def _decay_first(theta: list[Tensor], lr: _Scalar, lam: _Scalar, weight_decay: float) -> float:
    """θ ← θ − lr·wd·θ, here or in Adam: returns the weight decay that is left for Adam to do.

    Adam is given the learning rate lr·λ and decays by lr·λ·(wd/λ). Where λ leaves too little to
    divide by, or is a tensor, the weights are decayed here.
    """
    if weight_decay == 0 or not (isinstance(lam, Tensor) or lam < 1e-6):
        return weight_decay / cast(float, lam) if weight_decay else 0.0
    torch._foreach_mul_(theta, 1 - lr * weight_decay)
    return 0.0


def pull_rate(lr: _Scalar, lam: _Scalar, gamma: float) -> _Scalar:
    """c = min(1, lr·(1−λ)·γ): the fraction of the way back to θ* that one update goes."""
    c = lr * (1 - lam) * gamma
    return c.clamp(max=1.0) if isinstance(c, Tensor) else min(1.0, c)


def _pull(params: list[Tensor], anchors: Sequence[Tensor], c: _Scalar, foreach: bool) -> None:
    """θ ← θ − c·(θ − θ*)."""
    if not isinstance(c, Tensor) and c == 0:
        return
    if not foreach and len(params) > 1:
        for p, anchor in zip(params, anchors, strict=True):
            _pull([p], [anchor], c, foreach)
        return
    here = [_like(anchor, p) for p, anchor in zip(params, anchors, strict=True)]
    if isinstance(c, Tensor):  # which _foreach_lerp_ does not take
        differences = torch._foreach_sub(here, params)
        torch._foreach_mul_(differences, c)
        torch._foreach_add_(params, differences)
    else:
        torch._foreach_lerp_(params, here, c)


def _like(anchor: Tensor, p: Tensor) -> Tensor:
    """The anchor in the parameter's dtype and place. A Tensor.to that does nothing is not free."""
    if anchor.dtype == p.dtype and anchor.device == p.device:
        return anchor
    return anchor.to(p.device, p.dtype, non_blocking=True)


def _current_lambda(group: dict[str, Any]) -> _Scalar:
    """λ(t): a float in eager runs; a tensor where Python numbers would be baked into the graph."""
    updates: Tensor = group["updates"]
    on_device = group["capturable"] or torch.compiler.is_compiling()
    return cast(_Scalar, group["anneal"](updates if on_device else int(updates)))
