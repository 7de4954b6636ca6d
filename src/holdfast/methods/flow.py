r"""FLOW: weight each sample by how easy the pretrained model finds it.

Sanyal et al., *Upweighting Easy Samples in Fine-Tuning Mitigates Forgetting*, ICML 2025,
https://arxiv.org/abs/2502.02797.

With fᵢ the loss of sample i at the pretrained weights θ*:

    wᵢ = exp(−fᵢ / τ),      τ = median of f

The weights, normalized to π = w/Σw, minimize over all distributions π

    Σ πᵢ·fᵢ + τ·Σ πᵢ·log πᵢ

the expected loss with entropic regularization toward uniform weights. Distributionally robust
optimization does the opposite and upweights the hardest samples. Hard samples would move the model
far; small weights for them keep it near θ*, without using its weights at all.
"""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from holdfast._torch.batch import inputs_and_labels
from holdfast._torch.checks import one_of
from holdfast.losses import TOKEN_TASKS, target_mask
from holdfast.methods._base_losses import CarriedWeights, scored
from holdfast.scoring.scores import Scores
from holdfast.stages import (
    Checks,
    Criterion,
    MedianLoss,
    Objective,
    Run,
    SearchRange,
    SearchSpace,
)

TauRule = Literal["median", "batch_median", "running_median"]
Level = Literal["sequence", "token"]
_WINDOW = 10_000  # the most recent losses that a running median covers


@dataclass(frozen=True)
class Flow(Objective):
    """Sample weights from the pretrained model's losses, w = exp(−f/τ).

    Args:
        tau: ``"median"`` of the losses over the fine-tuning set; ``"batch_median"`` of each batch;
            ``"running_median"`` of the last 10,000 losses that this object weighed, for streams;
            or a number > 0. Infinity gives all samples weight 1.
        level: weigh whole ``"sequence"``s, or every ``"token"`` by its own loss.
        normalize: scale the weights to a mean of 1. Otherwise their mean is well below 1, which
            makes the steps of SGD smaller by that factor; Adam divides the factor out.

    A recipe scores the data once, at θ*, and each sample carries its weight. A new head must be
    fitted first, because its losses are random: ``Recipe(trainable=LPFT(), objective=Flow())``.

    Example:
        >>> import torch
        >>> from holdfast import Flow
        >>> Flow().weigh(torch.tensor([0.5, 1.0, 2.0]))
        tensor([0.6065, 0.3679, 0.1353], dtype=torch.float64)
    """

    checks: ClassVar[Checks] = {"level": partial(one_of, allowed=get_args(Level))}
    neutral: ClassVar[dict[str, Any] | None] = {"tau": math.inf}
    uses_base: ClassVar[bool] = True
    weighs_samples: ClassVar[bool] = True

    tau: TauRule | float = "median"
    level: Level = "sequence"
    normalize: bool = False
    _recent: deque[float] = field(
        default_factory=partial(deque, maxlen=_WINDOW), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.tau, int | float) and not isinstance(self.tau, bool)
        if not (number and float(self.tau) > 0) and self.tau not in get_args(TauRule):
            rules = ", ".join(map(repr, get_args(TauRule)))
            raise ValueError(f"tau must be one of {rules} or a number > 0, got {self.tau!r}")

    @property
    def needs_fitted_head(self) -> bool:
        return self.tau != math.inf

    @property
    def changes_loss(self) -> bool:
        return self.tau != math.inf

    def packing_conflict(self) -> str | None:
        """A median over a batch needs to know which tokens belong to one sample."""
        if self.tau not in ("batch_median", "running_median"):
            return None
        return (
            f"Flow(tau={self.tau!r}) takes a median over the samples of a batch, but packed "
            "samples cannot be told apart. Use tau='median', over the whole dataset, or a number"
        )

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        median = median_loss()
        return {} if median is None else {"tau": SearchRange(median / 5, median * 5, median)}

    def prepare(self, run: Run) -> Criterion:
        if self.tau == math.inf:
            return Criterion(run)
        if self.level == "token" and run.task not in TOKEN_TASKS:
            raise ValueError(f'Flow(level="token") needs a task with tokens, not {run.task!r}')
        data, scores = scored(self, run, tokens=self.level == "token")
        return FlowCriterion(run, data, self, scores)

    def weigh(self, losses: Tensor | Scores) -> Tensor:
        """Compute the weights of losses at θ*, in float64 and in the same order.

        Args:
            losses: finite values ≥ 0, of the whole fine-tuning set for ``tau="median"``, of one
                batch for the batch and running medians; or :class:`~holdfast.Scores`, whose
                sequence or token losses are used, depending on ``level`` (all tokens in one
                tensor, see ``Scores.split``). Samples without targets get weight 0.
        """
        if isinstance(losses, Scores):
            return self._weigh_scores(losses)
        f = torch.as_tensor(losses).detach().cpu().double()
        _check_losses(f)
        w = torch.exp(-f / self._tau_of(f))
        if not (w > 0).any():
            raise ValueError(
                f"all weights are 0: the smallest loss is {f.min():.4g}, more than 700 times "
                f"tau = {self.tau}. Use a larger tau, or the median"
            )
        return w / w.mean() if self.normalize else w

    def state_dict(self) -> dict[str, Any]:
        return {"values": torch.tensor(list(self._recent), dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recent.clear()
        self._recent.extend(state["values"].tolist())

    def temperature(self, scores: Scores) -> float:
        """τ as a number: the median of all losses, unless it is a number already."""
        if not isinstance(self.tau, str):
            return float(self.tau)
        losses = scores.losses[scores.counts > 0]
        if self.level == "token":
            losses = _all_tokens(scores)
        return float(np.median(losses.double().numpy()))

    def _weigh_scores(self, scores: Scores) -> Tensor:
        if self.level == "token":
            return self.weigh(_all_tokens(scores))
        kept = scores.counts > 0
        if not kept.any():
            raise ValueError("no sample has a target: there is nothing to weigh")
        _check_losses(scores.losses.masked_fill(~kept, 0.0))
        weights = torch.zeros(len(scores.losses), dtype=torch.float64)
        weights[kept] = self.weigh(scores.losses[kept])
        return weights

    def _tau_of(self, f: Tensor) -> float:
        if not isinstance(self.tau, str):
            return float(self.tau)
        if self.tau == "running_median":
            self._recent.extend(f.flatten().tolist())
            f = torch.tensor(list(self._recent), dtype=torch.float64)
        tau = float(np.median(f.numpy()))  # the mean of the two middle values
        if tau == 0:
            raise ValueError(
                "the median loss is 0, because the pretrained model predicts at least half of the "
                "samples perfectly: pass tau as a number"
            )
        return tau


class FlowCriterion(CarriedWeights):
    """The weighted loss. Samples carry weights, or losses if τ depends on the batch."""

    def __init__(self, run: Run, data: Any, flow: Flow, scores: Scores) -> None:
        self.flow = replace(flow)  # with its own running median
        self.by_batch = flow.tau in ("batch_median", "running_median")
        values: Any = scores.losses if self.by_batch else self.flow.weigh(scores)
        if flow.level == "token":
            values = scores.token_losses if self.by_batch else scores.split(values)
        super().__init__(run, data, values)

    def weights(self, batch: Any, values: Tensor | None, update: int) -> Tensor | None:
        if self.by_batch and values is not None:
            return self._weigh_batch(batch, values)
        return values

    def state_dict(self) -> dict[str, Any]:
        return self.flow.state_dict() if self.flow.tau == "running_median" else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.flow.load_state_dict(state)

    def _weigh_batch(self, batch: Any, f: Tensor) -> Tensor:
        kept = ~f.isnan()  # samples without targets have no loss
        if isinstance(self.task, str) and self.flow.level == "token":
            kept &= target_mask(inputs_and_labels(self.model, batch)[1], self.task)
        weights = torch.zeros_like(f)
        if kept.any():
            weights[kept] = self.flow.weigh(f[kept]).to(f)
        return weights


def _all_tokens(scores: Scores) -> Tensor:
    if scores.token_losses is None:
        raise ValueError("token weights need token losses: score(..., tokens=True)")
    return torch.cat(scores.token_losses)


def _check_losses(f: Tensor) -> None:
    if f.numel() == 0:
        raise ValueError("the data is empty: there are no losses to weigh")
    bad = ~(f.isfinite() & (f >= 0)).flatten()
    if bad.any():
        index = int(bad.nonzero()[0])
        raise ValueError(
            f"FLOW needs finite losses ≥ 0, but {int(bad.sum())} of {f.numel()} are not: the loss "
            f"of sample {index} is {f.flatten()[index]:g}"
        )
