r"""STM, selective token masking: leave out the tokens that the pretrained model finds unlikely.

Wu et al., *Mitigating Forgetting in LLM Fine-Tuning via Low-Perplexity Token Learning*, NeurIPS
2025, https://arxiv.org/abs/2501.14315.

With p*_t the probability of target token t at the pretrained weights θ*, its perplexity is 1/p*_t:

    Loss = Σ 1[exp(−log p*_t) ≤ τ] · (−log p_t) / number of targets

Texts that a model has written itself have few tokens of high perplexity, and training on them
forgets little. Masking such tokens makes any text similar in this respect.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast._torch.checks import at_least_one
from holdfast.losses import TOKEN_TASKS, LossFunction, Task
from holdfast.methods._base_losses import CarriedWeights, scored
from holdfast.methods._own_predictions import without_classes
from holdfast.stages import (
    Checks,
    Criterion,
    MedianLoss,
    Objective,
    Run,
    SearchRange,
    SearchSpace,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class STM(Objective):
    """Train only on targets whose perplexity under the pretrained model is at most τ.

    A recipe scores the data once, at θ*. A new head must be fitted first, because its losses are
    random: ``Recipe(trainable=LPFT(), objective=STM())``.

    Args:
        tau: the largest perplexity of a token that counts, ≥ 1. The paper uses 2.5: the token has
            at least the probability 0.4. Infinity keeps all tokens. In classification, a sample
            counts if the fitted model gives its class at least the probability 1/τ.

    Example:
        >>> from holdfast import STM
        >>> STM().keep([0.1, 0.9, 1.0])  # 2.5 is exp(0.916)
        tensor([ True,  True, False])
    """

    checks: ClassVar[Checks] = {"tau": at_least_one}
    neutral: ClassVar[dict[str, Any] | None] = {"tau": math.inf}
    uses_base: ClassVar[bool] = True

    tau: float = 2.5

    @property
    def needs_fitted_head(self) -> bool:
        return self.changes_loss

    @property
    def changes_loss(self) -> bool:
        return self.tau != math.inf

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"tau": SearchRange(1.5, 1000.0, 2.5)}

    def unfit_task(self, task: Task | LossFunction) -> str | None:
        return without_classes(self, task) if self.changes_loss else None

    def prepare(self, run: Run) -> Criterion:
        if not self.changes_loss:
            return Criterion(run)
        if reason := self.unfit_task(run.task):
            raise ValueError(reason)
        data, scores = scored(self, run, tokens=run.task in TOKEN_TASKS)
        has_target = scores.counts > 0
        if not has_target.any():
            raise ValueError("no sample has a target: there is nothing to train on")
        by_token = scores.token_losses
        losses = scores.losses[has_target] if by_token is None else torch.cat(by_token)
        kept = self.keep(losses)
        if not kept.any():
            lowest = losses.double().min().exp().item()
            raise ValueError(
                f"STM(tau={self.tau:g}) leaves out all {kept.numel()} targets: their lowest "
                f"perplexity under the pretrained model is {lowest:.4g}. Use a larger tau"
            )
        logger.info(f"STM trains on {int(kept.sum())} of {kept.numel()} targets")
        weights = kept.double()
        if by_token is not None:
            return CarriedWeights(run, data, scores.split(weights))
        whole = torch.zeros(len(has_target), dtype=weights.dtype)
        return CarriedWeights(run, data, whole.masked_scatter(has_target, weights))

    def keep(self, losses: Any) -> Tensor:
        """Return which targets are trained on, given their losses at θ*."""
        f = torch.as_tensor(losses, dtype=torch.float64)
        if f.isnan().any():
            raise ValueError(
                f"STM needs the losses of the pretrained model, but {int(f.isnan().sum())} of "
                f"{f.numel()} are NaN: its weights or the data are broken"
            )
        return f <= math.log(self.tau)
