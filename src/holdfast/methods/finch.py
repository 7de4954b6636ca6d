r"""FINCH: AdamW whose learning rate falls as the loss of the update rises.

Prashant et al., *Fine-Tuning Without Forgetting via Loss-Adaptive Learning Rates*,
https://arxiv.org/abs/2605.20005.

An update raises the old loss by at most C₁·η·√L + C₂·η²·L, where η is the learning rate and L the
training loss of the update. FINCH keeps η·√L constant, with an average over the updates:

    L̄ ← α·L̄ + (1 − α)·L             L̄ = L at the first update
    η = lr · min(1/√L̄, cap)

The weights then move by AdamW with η. lr is the learning rate of the host, after its schedule: it
is used as it is if L̄ is 1. The objective and the weights of the samples do not change.

:class:`Finch` is the optimizer, :func:`rate_factor` its factor of the learning rate, and
:class:`FinchUpdate` the settings in a recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from holdfast._optim.backends import adam_columns, check_adam_group, only_makes_state
from holdfast._torch.checks import at_least_one, at_least_zero, named_settings, share_below_one
from holdfast._torch.dtypes import wide
from holdfast._torch.layout import mean_over_ranks
from holdfast.methods.adamw import AdamUpdate
from holdfast.stages import Checks, MedianLoss, Run, SearchRange, SearchSpace


class Finch(Optimizer):
    """AdamW with a loss-adaptive learning rate.

    Call :meth:`observe` with the loss of the update before each step, or pass a closure that
    returns it.

    Args:
        params: parameters, named or not, or groups of them.
        lr, betas, eps: learning rate at a loss of 1, coefficients and ε of Adam.
        weight_decay: decoupled, as in AdamW; it falls with the learning rate.
        power: p in 1/L̄ᵖ. The paper's is ½. 0 is AdamW to the last bit.
        smoothing: α, the weight of the earlier updates in the average loss L̄. 0 takes the loss of
            the current update alone.
        cap: the largest factor of the learning rate, at least 1.
        foreach, fused, maximize, capturable: as in AdamW.

    Example:
        >>> import torch
        >>> from holdfast.optim import Finch
        >>> p = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Finch([p], lr=0.1)
        >>> p.grad = torch.ones(1)
        >>> optimizer.observe(4.0)
        >>> optimizer.step()
        >>> round(p.item(), 4), optimizer.rate_state()
        (-0.05, {'mean_loss': 4.0, 'lr_factor': 0.5})
    """

    @named_settings
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        power: float = 0.5,
        smoothing: float = 0.9,
        cap: float = 2.5,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        self.power, self.cap = at_least_zero("power", power), at_least_one("cap", cap)
        self.smoothing = share_below_one("smoothing", smoothing)
        self._observed: Tensor | float | None = None
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "foreach": foreach,
            "fused": fused, "maximize": maximize, "capturable": capturable,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            check_adam_group(param_group)
        except BaseException:
            self.param_groups.pop()
            raise
        # In all groups, the only place that distributed checkpoints save.
        param_group["mean_loss"] = self.param_groups[0].get("mean_loss", math.nan)

    def observe(self, loss: Tensor | float) -> None:
        """Set the loss of the next update: on several ranks, that of this rank."""
        self._observed = loss.detach() if isinstance(loss, Tensor) else loss

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one update. Parameters without a gradient are skipped. All ranks must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor = self._next_factor(loss) if self.power else 1.0
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            names = ("eps", "weight_decay", "foreach", "fused", "maximize", "capturable")
            params, grads, m, v, counts = adam_columns(self, group, params)
            beta1, beta2 = group["betas"]
            # Not the step of a base class AdamW, which would call this optimizer's hooks again.
            adamw(
                params, grads, m, v, [], counts, lr=_product(group, factor), beta1=beta1,
                beta2=beta2, amsgrad=False, **{name: group[name] for name in names},
            )  # fmt: skip
        return loss

    def _next_factor(self, returned: Any) -> Tensor | float:
        """Take the loss of this update into the average; the factor of the learning rate."""
        observed, self._observed = self._observed, None
        observed = returned if observed is None else observed
        if observed is None:
            grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            if not grads or only_makes_state(self, grads):
                return 1.0
            raise RuntimeError(
                "Finch needs the loss of the update: call optimizer.observe(loss) before "
                "optimizer.step()"
            )
        device = self.param_groups[0]["params"][0].device  # that of the ranks' collectives
        value = torch.as_tensor(observed).detach().reshape(()).to(device)
        loss = mean_over_ranks(value.to(wide(value)))
        before = self.param_groups[0]["mean_loss"]
        before = torch.as_tensor(before, dtype=loss.dtype, device=loss.device)
        average = self.smoothing * before + (1 - self.smoothing) * loss
        mean_loss = torch.where(before.isnan(), loss, average)
        for group in self.param_groups:
            group["mean_loss"] = mean_loss
        return rate_factor(mean_loss, self.power, self.cap)

    def rate_state(self) -> dict[str, float]:
        """The average loss and the factor of the learning rate at the last update, for a log."""
        mean_loss = torch.tensor(float(self.param_groups[0]["mean_loss"]), dtype=torch.float64)
        factor = rate_factor(mean_loss, self.power, self.cap).item() if self.power else 1.0
        return {"mean_loss": mean_loss.item(), "lr_factor": factor}

    def state_dict(self) -> dict[str, Any]:
        """As in AdamW, with the average loss."""
        saved = super().state_dict()
        for group in saved["param_groups"]:  # a number: tensors in groups are not moved on loading
            group["mean_loss"] = float(group["mean_loss"])
        return saved

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps only defaults, state and param_groups when it copies and pickles.
        ours = ("power", "cap", "smoothing")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in ours}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._observed = None
        for group in self.param_groups:  # a state of AdamW has none
            group.setdefault("mean_loss", math.nan)


def rate_factor(mean_loss: Tensor, power: float, cap: float) -> Tensor:
    """min(1/L̄ᵖ, cap); the cap if the loss is not above 0.

    >>> rate_factor(torch.tensor([4.0, 1.0, 0.25, 0.01, 0.0, -1.0]), 0.5, 2.5).tolist()
    [0.5, 1.0, 2.0, 2.5, 2.5, 2.5]
    """
    return mean_loss.clamp(min=torch.finfo(mean_loss.dtype).tiny).pow(-power).clamp(max=cap)


def _product(group: dict[str, Any], factor: Tensor | float) -> float | Tensor:
    """The learning rate times the factor; a tensor if the implementation takes it on the device.

    A number would wait for the GPU.
    """
    on_device = group["fused"] or group["capturable"]
    if isinstance(factor, Tensor) and (factor.device.type == "cpu" or not on_device):
        factor = float(factor)
    return cast(float | Tensor, group["lr"] * factor)


# --- The settings in a recipe --------------------------------------------------------------------


@dataclass(frozen=True)
class FinchUpdate(AdamUpdate):
    """The settings of :class:`Finch` in a recipe.

    Args:
        lr, weight_decay, layer_decay: as in :class:`~holdfast.stages.Update`. lr is the learning
            rate at a loss of 1.
        betas, eps: coefficients and ε of Adam.
        power: p in 1/L̄ᵖ. The paper's is ½, 0 is AdamW.
        smoothing: α, the weight of the earlier updates in the average loss L̄.
        cap: the largest factor of the learning rate.

    The log has ``mean_loss`` and ``lr_factor``; its learning rate is lr, without the factor.

    Example:
        >>> from holdfast import FinchUpdate
        >>> FinchUpdate(lr=2e-5).cap
        2.5
    """

    checks: ClassVar[Checks] = {
        "power": at_least_zero, "smoothing": share_below_one, "cap": at_least_one,
    }  # fmt: skip
    neutral: ClassVar[dict[str, Any] | None] = {"power": 0.0}
    plotted: ClassVar[tuple[str, ...]] = ("lr_factor",)

    power: float = 0.5
    smoothing: float = 0.9
    cap: float = 2.5

    @property
    def uses_loss(self) -> bool:
        return self.power > 0

    def observe(self, optimizer: Optimizer, loss: Tensor) -> None:
        cast(Finch, optimizer).observe(loss)

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"cap": SearchRange(1.0, 10.0, 2.5)}

    def log(self, run: Run) -> dict[str, float]:
        return run.optimizer.rate_state() if isinstance(run.optimizer, Finch) else {}

    def optimizer(self, groups: list[dict[str, Any]], run: Run, total_updates: int) -> Optimizer:
        params = [p for group in groups for _, p in group["params"]]
        return Finch(
            groups,
            lr=run.lr,
            betas=self.betas,
            eps=self.eps,
            power=self.power,
            smoothing=self.smoothing,
            cap=self.cap,
            fused=all(p.is_cuda for p in params) or None,  # as AdamWUpdate does
        )
