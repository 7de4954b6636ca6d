r"""TMKL, target-masked KL: stay near the pretrained model's predictions of all other tokens.

Xu, Garg, Saratchandran and Lucey, *Mask the Target: A Plug-and-Play Regularizer Against LoRA
Forgetting*, https://arxiv.org/abs/2605.29498.

With p* and p the predictions of the pretrained model and of the model in training at a target y,
and both renormalized without it, p_\y(c) = p(c) / (1 − p(y)) for c ≠ y:

    Loss_T + strength · Σ KL(p*_\y ‖ p_\y) / N

N is the number of targets. Those with p*(y) > 1 − 10⁻⁴ are left out of the sum, because the
pretrained model already agrees with them. KL(p* ‖ p) is the divergence of the probabilities of y,
which opposes learning y, plus (1 − p*(y)) times this term.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from holdfast._torch.checks import at_least_zero, whole_number
from holdfast.losses import LossFunction, Task
from holdfast.methods._base_predictions import Comparison, divergence_cost, divergence_term
from holdfast.methods._own_predictions import without_classes
from holdfast.stages import (
    Checks,
    Cost,
    MedianLoss,
    Planned,
    Recall,
    RecallTerm,
    Run,
    SearchRange,
    SearchSpace,
)

_TAU = 1e-4  # the paper's default


@dataclass(frozen=True)
class TMKL(Recall):
    """The task's loss plus the divergence from the pretrained model, without the target token.

    Targets to which the pretrained model gives more than 1 − 10⁻⁴ are left out of the divergence.

    Args:
        strength: the weight of the divergence, λ in the paper, which uses 1; 0 turns it off.
        cache: compute the pretrained model's predictions once, before training, up to 1 GiB in
            total. Turn it off if inputs are augmented at random, or to compare the whole
            vocabulary. The pretrained model then runs once per batch: the same model with its
            adapters off, or a frozen copy.
        top: the number of tokens that the cache keeps per target, as in
            :class:`~holdfast.SelfReplay`: they give an unbiased estimate of the divergence.

    Example:
        >>> from holdfast import TMKL, Recipe
        >>> Recipe(recall=TMKL(strength=0.5)).name
        'tmkl'
    """

    neutral: ClassVar[dict[str, Any] | None] = {"strength": 0.0}
    checks: ClassVar[Checks] = {
        "strength": at_least_zero,
        "top": partial(whole_number, least=2),
    }
    uses_base: ClassVar[bool] = True

    strength: float = 1.0
    cache: bool = True
    top: int = 64

    @property
    def needs_fitted_head(self) -> bool:
        return self.strength != 0

    @property
    def changes_loss(self) -> bool:
        return self.strength != 0

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"strength": SearchRange(0.1, 10.0, 1.0)}

    def unfit_task(self, task: Task | LossFunction) -> str | None:
        return without_classes(self, task) if self.changes_loss else None

    def cost(self, planned: Planned) -> Cost:
        if self.strength == 0:
            return Cost()
        return divergence_cost(planned, self.top if self.cache else None)

    def prepare(self, run: Run) -> RecallTerm:
        if self.strength == 0:
            return RecallTerm()
        if reason := self.unfit_task(run.task):
            raise ValueError(reason)
        return divergence_term(run, OtherTokens(), self.strength, self.top if self.cache else None)


class OtherTokens(Comparison):
    """All tokens but the target."""

    def part(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return without_targets(outputs, targets)

    def uses(self, base: Tensor, targets: Tensor) -> Tensor:
        """Targets of which the pretrained model is not certain."""
        p = base.softmax(1).gather(1, targets[:, None].long())[:, 0]
        return p <= 1 - _TAU


def without_targets(logits: Tensor, targets: Tensor) -> Tensor:
    """The logits of each row without that of its target, in another order of the tokens.

    The last token takes the place of the target. A softmax of the logits that are left is the
    renormalized distribution.

    Example:
        >>> import torch
        >>> without_targets(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([1]))
        tensor([[0., 3., 2.]])
    """
    return logits.scatter(1, targets[:, None].long(), logits[:, -1:])[:, :-1]
