r"""SPD: Adam that takes back what leads a tensor further from θ*, if the gradient disagrees.

Tian et al., *Rethinking Weight Decay for Robust Fine-Tuning of Foundation Models*, NeurIPS 2024,
https://arxiv.org/abs/2411.01713 (selective projection decay).

For each tensor θ with its pretrained values θ*, and θ̃ after an AdamW step from θ with gradient g:

    c = −gᵀ(θ − θ*)                         does the gradient lead further away from θ*?
    γ = ‖θ − θ*‖,  γ̃ = ‖θ̃ − θ*‖             the deviation before and after the step
    r = max(0, γ̃ − γ) / γ̃
    θ ← θ̃ − min(1, λ·r)·(θ̃ − θ*)            if c < 0, else θ̃

A tensor whose gradient still leads away from θ* moves freely. If the gradient points back, Adam's
momentum may still carry the tensor away: with λ = 1 the tensor is then projected onto the sphere
around θ* on which it was before the step. The rule never brings it nearer to θ* than that with
λ ≤ 1. λ is not multiplied by the learning rate, which is already in r.

:class:`SPD` is the optimizer, :func:`spd` its update as a function, and :class:`SPDUpdate` the
settings in a recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from holdfast._optim.anchors import Anchors
from holdfast._optim.backends import adam_columns, check_adam_group
from holdfast._torch.checks import at_least_zero, named_settings
from holdfast._torch.dtypes import wide
from holdfast._torch.layout import is_sharded, like, local, local_like, summed
from holdfast.methods.adamw import AdamUpdate
from holdfast.reference import Reference
from holdfast.stages import Checks, Cost, MedianLoss, Planned, Run, SearchRange, SearchSpace


class SPD(Optimizer):
    """Adam with selective projection decay.

    Args:
        params: parameters, ``model.named_parameters()``, or groups of either. A group may set its
            own ``lam``; 0 is plain AdamW (a new head).
        lr, betas, eps: learning rate, coefficients and ε of Adam.
        weight_decay: decoupled decay toward 0, as in AdamW. The paper uses none: the projection
            replaces it.
        lam: λ, the share of the projection. 1 projects onto the previous distance to θ*, which is
            where the paper suggests to start. 0 is AdamW to the last bit.
        anchors: the pretrained weights θ*. If None, each parameter is anchored at its current
            value. A :class:`~holdfast.Reference` or a mapping from names to tensors is matched by
            name; a parameter without an anchor gets plain AdamW.
        foreach, fused: the implementation of AdamW's part.
        maximize, capturable: as in AdamW.

    Example:
        >>> import torch
        >>> from holdfast.optim import SPD
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = SPD([p], lr=0.1)
        >>> for g in (1.0, 1.0, -0.1):  # the last gradient points back, the momentum does not
        ...     p.grad = torch.full((2,), g)
        ...     optimizer.step()
        >>> [round(x, 3) for x in p.tolist()], optimizer.projected()
        ([-0.2, -0.2], 1.0)

    Checkpoints (``state_dict()``) contain a fingerprint of the anchors, not the anchors. To resume,
    make the optimizer as before, with the *pretrained* weights, and load the state into it.
    """

    @named_settings
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        lam: float = 1.0,
        anchors: Reference | Mapping[str, Tensor] | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        if isinstance(params, nn.Module):
            raise TypeError("pass the parameters, model.named_parameters(), not the model")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "lam": lam,
            "foreach": foreach, "fused": fused, "maximize": maximize, "capturable": capturable,
        }  # fmt: skip
        self._shares: list[Tensor] = []  # of the last update
        super().__init__(params, defaults)
        self._anchors = Anchors("anchor_fingerprint", anchors, [])
        self._anchor_new_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; without a Reference its parameters are anchored at their current values."""
        super().add_param_group(param_group)
        try:
            check_adam_group(param_group)
            at_least_zero("lam", param_group["lam"])
            if unfit := [p.dtype for p in param_group["params"] if not p.is_floating_point()]:
                raise ValueError(f"SPD takes real floating-point parameters, got {unfit[0]}")
            if hasattr(self, "_anchors"):  # not while __init__ is still collecting the groups
                self._anchor_new_groups()
        except BaseException:
            self.param_groups.pop()
            raise

    def _anchor_new_groups(self) -> None:
        new = self.param_groups[len(self._anchors.values) :]
        self._anchors.add(self._anchors.match(new))
        for group in new:
            group[self._anchors.key] = None  # see Anchors.take_fingerprints

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one update. Parameters without a gradient are skipped."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._anchors.shard(self.param_groups)
        shares: list[Tensor] = []
        for group, anchors in zip(self.param_groups, self._anchors.values, strict=True):
            anchored = zip(group["params"], anchors, strict=True)
            found = [(p, star) for p, star in anchored if p.grad is not None]
            if not found:
                continue
            columns: list[list[Any]] = adam_columns(self, group, [p for p, _ in found])
            columns.append([star for _, star in found])
            names = (
                "lam", "lr", "eps", "weight_decay", "foreach", "fused", "maximize", "capturable",
            )  # fmt: skip
            options = {name: group[name] for name in names}
            options["beta1"], options["beta2"] = group["betas"]
            shares += spd(*columns, **options)
        if not torch.compiler.is_compiling():  # a compiled step cannot set attributes
            self._shares = shares
        return loss

    def projected(self) -> float:
        """The share of the anchored tensors that the last update has projected."""
        counts = [(int((share > 0).sum()), len(share)) for share in self._shares]
        return sum(some for some, _ in counts) / max(1, sum(number for _, number in counts))

    def state_dict(self) -> dict[str, Any]:
        """Adam's state, with a fingerprint in place of the anchors."""
        self._anchors.take_fingerprints(self.param_groups)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state. A state with other anchors raises and changes nothing."""

        def check(_: Optimizer, given: dict[str, Any]) -> None:
            self._anchors.check_saved(
                given["param_groups"],
                self.param_groups,
                "the saved state is not SPD's: it has no anchor fingerprint",
                "anchors=Reference.open(pretrained_directory)",
            )

        # After the user's own hooks, which may have renamed or changed things.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps only defaults, state and param_groups when it copies and pickles.
        return {**super().__getstate__(), "_anchors": self._anchors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._shares = []


# --- The update as a function --------------------------------------------------------------------


def spd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    anchors: Sequence[Tensor | None],
    *,
    lam: float,
    maximize: bool,
    **adam: Any,
) -> list[Tensor]:
    """Make one SPD update of a list of tensors, in place; None is a tensor without an anchor.

    Adam's part is torch's own implementation. ``adam`` are its other options. Returns min(1, λ·r)
    of the tensors with an anchor, 0 where c ≥ 0, as vectors on their devices: nothing waits for
    a GPU.
    """
    batches = _batches(params, grads, anchors) if lam else []
    before = [_measured(rows) for rows in batches]
    adamw(
        [*params], [*grads], [*exp_avgs], [*exp_avg_sqs], [], [*state_steps],
        amsgrad=False, maximize=maximize, **adam,
    )  # fmt: skip
    shares = []
    for rows, (gamma, agreement) in zip(batches, before, strict=True):
        c = agreement if maximize else -agreement
        shares.append(projection(c, gamma, _deviations(rows, _ways(rows)), lam))
        for row, share in zip(rows, shares[-1].unbind(), strict=True):
            theta, star = _pair(row)
            theta.lerp_(star, share)  # exactly θ* if the share is 1
            if theta.dtype != row.p.dtype:
                local(row.p).copy_(theta)
    return shares


def projection(c: Tensor, gamma: Tensor, gamma_new: Tensor, lam: float) -> Tensor:
    """min(1, λ·r) where c < 0, and 0 elsewhere: how far to go from θ̃ to θ*.

    >>> c, before, after = torch.tensor([[-1.0, -1.0, 1.0], [3.0, 3.0, 3.0], [4.0, 2.0, 4.0]])
    >>> projection(c, before, after, lam=1.0).tolist()
    [0.25, 0.0, 0.0]
    """
    r = (gamma_new - gamma).clamp(min=0) / gamma_new.clamp(min=torch.finfo(gamma.dtype).tiny)
    return torch.where(c < 0, (lam * r).clamp(max=1), 0.0)


class _Row(NamedTuple):
    """A parameter that has an anchor and a gradient."""

    p: Tensor
    grad: Tensor
    anchor: Tensor


def _batches(
    params: Sequence[Tensor], grads: Sequence[Tensor], anchors: Sequence[Tensor | None]
) -> list[list[_Row]]:
    """The rows with an anchor, in batches of one device, dtype and sharding; on the CPU one each.

    On the CPU a foreach operation is the same loop, with more memory in use.
    """
    found: dict[Any, list[_Row]] = {}
    for i, (p, grad, anchor) in enumerate(zip(params, grads, anchors, strict=True)):
        if anchor is None:
            continue
        key: Any = (p.device, wide(p))
        if is_sharded(p):
            key = (*key, p.device_mesh, p.placements)  # type: ignore[attr-defined]
        elif p.device.type == "cpu":
            key = i
        found.setdefault(key, []).append(_Row(p, grad, anchor))
    return [*found.values()]


def _pair(row: _Row) -> tuple[Tensor, Tensor]:
    """θ and θ* of this rank's shard, in at least float32."""
    dtype = wide(row.p)
    return local(row.p).to(dtype), local(like(row.anchor, row.p, dtype))


def _ways(rows: list[_Row]) -> list[Tensor]:
    """θ − θ* of this rank's shards."""
    thetas, stars = zip(*map(_pair, rows), strict=True)
    return [*torch._foreach_sub(thetas, stars)]


def _deviations(rows: list[_Row], ways: list[Tensor]) -> Tensor:
    """‖θ − θ*‖ of each whole tensor."""
    squares = torch.stack([*torch._foreach_norm(ways)]).square()
    return summed(squares, rows[0].p).sqrt()


def _measured(rows: list[_Row]) -> tuple[Tensor, Tensor]:
    """‖θ − θ*‖ and gᵀ(θ − θ*) of each whole tensor."""
    ways = _ways(rows)
    deviations = _deviations(rows, ways)
    torch._foreach_mul_(ways, [local_like(row.grad, row.p) for row in rows])
    return deviations, summed(torch.stack([way.sum() for way in ways]), rows[0].p)


# --- The settings in a recipe --------------------------------------------------------------------


@dataclass(frozen=True)
class SPDUpdate(AdamUpdate):
    """The settings of :class:`SPD` in a recipe.

    Args:
        lr, weight_decay, layer_decay: as in :class:`~holdfast.stages.Update`.
        betas, eps: coefficients and ε of Adam.
        lam: λ, the share of the projection. 1 projects onto the previous distance to θ*. 0 is
            AdamW.

    Example:
        >>> from holdfast import SPDUpdate
        >>> SPDUpdate(lr=1e-5).lam
        1.0
    """

    checks: ClassVar[Checks] = {"lam": at_least_zero}
    neutral: ClassVar[dict[str, Any] | None] = {"lam": 0.0}
    needs_reference: ClassVar[bool] = True
    plotted: ClassVar[tuple[str, ...]] = ("projected",)

    lam: float = 1.0

    @property
    def elementwise(self) -> bool:
        return self.lam == 0  # the distances are over whole tensors

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"lam": SearchRange(0.1, 10.0, 1.0)}

    def cost(self, planned: Planned) -> Cost:
        """AdamW, and its operations on θ, θ* and g: two differences, a product, norms, a lerp."""
        adam = super().cost(planned)
        if self.lam == 0:
            return adam
        return replace(adam, moved=adam.moved + 13 * planned.value + 3 * planned.anchor)

    def log(self, run: Run) -> dict[str, float]:
        return {"projected": run.optimizer.projected()} if isinstance(run.optimizer, SPD) else {}

    def optimizer(self, groups: list[dict[str, Any]], run: Run, total_updates: int) -> Optimizer:
        if run.anchors is None:
            raise ValueError("SPD projects toward the pretrained weights, but the run has none")
        params = [p for group in groups for _, p in group["params"]]
        return SPD(
            groups,
            lr=run.lr,
            betas=self.betas,
            eps=self.eps,
            lam=self.lam,
            anchors=run.anchors,
            fused=all(p.is_cuda for p in params) or None,  # as AdamWUpdate does
        )
