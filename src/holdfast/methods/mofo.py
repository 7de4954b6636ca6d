r"""MoFO: Adam that moves only the coordinates with the largest momentum.

Chen et al., *MoFO: Momentum-Filtered Optimizer for Mitigating Forgetting in LLM Fine-Tuning*,
https://arxiv.org/abs/2407.20999.

Adam's moments are kept for all coordinates. In each matrix only the fraction α of coordinates
with the largest |m| moves; the others do not change:

    θᵢ ← θᵢ − lr·wd·θᵢ − lr·m̂ᵢ/(√v̂ᵢ+ε)      for i among the max(1, round(α·n)) largest |mᵢ|

Vectors (biases, norms) are not filtered. The weights stay nearer to θ*, without a copy of θ*.

A NaN in m counts as infinite, so the weight moves and becomes NaN, as in AdamW. If it did not move,
nothing would show that the training has failed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from holdfast import kernels
from holdfast._optim.backends import adam_columns, check_adam_group
from holdfast._torch.checks import named_settings, positive_share
from holdfast._torch.dtypes import widen
from holdfast._torch.layout import like, whole
from holdfast.methods.adamw import AdamUpdate
from holdfast.stages import Checks, Cost, MedianLoss, Planned, Run, SearchRange, SearchSpace


class MoFO(Optimizer):
    """Adam with a momentum filter.

    Args:
        params: parameters, named or not, or groups of them. A group may set its own ``fraction``.
        lr, betas, eps: learning rate, coefficients and ε of Adam.
        weight_decay: decoupled, as in AdamW; weights decay only where they move.
        fraction: α, the share of each matrix that moves in an update; the paper takes 5 to 20 %.
            1 is AdamW to the last bit.
        foreach, fused: the implementation, as in AdamW. With Triton, ``fused=True`` (and None on a
            GPU) uses holdfast's own kernels for α < 1; ties in |m| are resolved alike.
        maximize, capturable: as in AdamW.

    Vectors are not filtered. Ties in the momentum move the lowest index; a NaN counts as infinite.

    Example:
        >>> import torch
        >>> from holdfast.optim import MoFO
        >>> p = torch.nn.Parameter(torch.zeros(2, 3))
        >>> optimizer = MoFO([p], lr=0.1, fraction=0.5)
        >>> p.grad = torch.arange(6.0).reshape(2, 3)
        >>> optimizer.step()
        >>> (p != 0).sum().item()
        3
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
        fraction: float = 0.15,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "fraction": fraction, "foreach": foreach, "fused": fused, "maximize": maximize,
            "capturable": capturable,
        }  # fmt: skip
        self._kernels: dict[int, Any] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            check_adam_group(param_group)
            positive_share("fraction", param_group["fraction"])
        except BaseException:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one update. Parameters without a gradient are skipped."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            by_kernel = group["fraction"] < 1 and kernels.wanted(group, params[0].device)
            if by_kernel:
                from holdfast.kernels.mofo import MoFOStep, takes  # needs Triton

                # The kernels need the counts on the device, where they advance all at once.
                columns = adam_columns(self, group, params, on_device=takes)
            else:
                columns = adam_columns(self, group, params)
            names = ("fraction", "lr", "eps", "weight_decay", "maximize", "capturable")
            options = {name: group[name] for name in names}
            options["beta1"], options["beta2"] = group["betas"]
            if by_kernel:
                if number not in self._kernels:
                    self._kernels[number] = MoFOStep()
                rest = self._kernels[number](*columns, **options)
                columns = [[column[i] for i in rest] for column in columns]
            if columns[0]:
                mofo(*columns, **options, foreach=group["foreach"], fused=group["fused"])
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kernels = {}  # they keep step counts


@dataclass(frozen=True)
class MoFOUpdate(AdamUpdate):
    """The settings of :class:`MoFO` in a recipe.

    Args:
        lr, weight_decay, layer_decay: as in :class:`~holdfast.stages.Update`.
        betas, eps: coefficients and ε of Adam.
        fraction: α, the share of each matrix that moves in an update. 1 is AdamW.

    Example:
        >>> from holdfast import MoFOUpdate
        >>> MoFOUpdate(lr=1e-5).fraction
        0.15
    """

    checks: ClassVar[Checks] = {"fraction": positive_share}
    neutral: ClassVar[dict[str, Any] | None] = {"fraction": 1.0}

    fraction: float = 0.15

    @property
    def elementwise(self) -> bool:
        return self.fraction == 1  # a selection compares all weights of a matrix

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"fraction": SearchRange(0.01, 0.8, 0.15)}

    def cost(self, planned: Planned) -> Cost:
        """Adam's state. A step makes two passes: one over g, m and v, one over θ, m and v."""
        if self.fraction == 1:
            return super().cost(planned)
        return replace(super().cost(planned), moved=9 * planned.value, kernel="mofo_fused")

    def optimizer(self, groups: list[dict[str, Any]], run: Run, total_updates: int) -> Optimizer:
        return MoFO(groups, lr=run.lr, betas=self.betas, eps=self.eps, fraction=self.fraction)


def mofo(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *,
    fraction: float,
    **adam: Any,
) -> None:
    """Make one MoFO update of a list of tensors, in place, by torch's operations.

    It updates all coordinates with AdamW, then restores those that were not selected.
    """
    filtered = [i for i, p in enumerate(params) if p.dim() > 1 and fraction < 1]
    before = [params[i].clone() for i in filtered]
    adamw(params, grads, exp_avgs, exp_avg_sqs, [], state_steps, amsgrad=False, **adam)
    for i, old in zip(filtered, before, strict=True):
        # The largest of a whole sharded matrix, not of each rank's shard.
        moves = largest(whole(exp_avgs[i].abs()), max(1, round(fraction * old.numel())))
        params[i].copy_(torch.where(like(moves, old, torch.bool), params[i], old))


def largest(values: Tensor, k: int) -> Tensor:
    """A mask of the k largest values; NaN counts as infinity, and ties go to the lowest index.

    >>> largest(torch.tensor([[1.0, 3.0], [3.0, 3.0]]), 2)
    tensor([[False,  True],
            [ True, False]])
    """
    flat = values.flatten().nan_to_num(torch.inf, torch.inf)
    if k >= flat.numel():
        return torch.ones_like(values, dtype=torch.bool)
    if not flat.is_cuda:  # numpy's partition and few indices need the least memory
        numbers = widen(flat.detach()).numpy()
        least = float(np.partition(numbers, flat.numel() - k)[flat.numel() - k])
        mask, level = flat > least, flat == least
        mask[level.nonzero()[: k - int(mask.sum()), 0]] = True
        return mask.view_as(values)
    threshold = flat.topk(k, sorted=False).values.min()  # kthvalue uses a single block of threads
    above, level = flat > threshold, flat == threshold
    first_of_level = level.cumsum(0) <= k - above.sum()
    return (above | (level & first_of_level)).view_as(values)
