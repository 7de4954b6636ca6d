"""SFA: average with the pretrained weights a few times during training.

Kleiman et al., *Soup to go: mitigating forgetting during continual learning with model averaging*,
https://arxiv.org/abs/2501.05559. At every fraction p of the run's T updates, and at its end:

    θ ← (1−w)·θ + w·θ*          at the updates round(p·T·j), j = 1, 2, …, and T

In between, the optimizer continues unchanged. The last average is the model that is kept.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from holdfast._torch.checks import positive_share, share
from holdfast.stages import Checks, MedianLoss, Penalty, SearchRange, SearchSpace


@dataclass(frozen=True)
class SFA(Penalty):
    """Average the weights with the pretrained ones several times during the run.

    Like any penalty it acts in the step of any optimizer, at any learning rate, and its progress is
    part of the optimizer's state.

    Args:
        every: p, as a fraction of the run: 0.25 averages four times, the last time after the end;
            0.4 averages three times, at 40, 80 and 100 %.
        weight: w, the share of the pretrained weights; 0 is no averaging.

    Example:
        >>> from holdfast import SFA
        >>> average = SFA(every=0.25)
        >>> [update for update in range(1, 11) if average.acts_at(update, total_updates=10)]
        [2, 5, 8, 10]
    """

    checks: ClassVar[Checks] = {"every": positive_share, "weight": share}
    neutral: ClassVar[dict[str, Any] | None] = {"weight": 0.0}
    needs_gradient: ClassVar[bool] = False
    acts_at_end: ClassVar[bool] = True

    every: float = 0.25
    weight: float = 0.5

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"weight": SearchRange(0.05, 0.95, 0.5, log=False)}

    @property
    def acts(self) -> bool:
        return self.weight != 0

    def acts_at(self, update: int, total_updates: int | None) -> bool:
        """Whether an update, counted from 1, is one of round(p·T·j), or the last."""
        if total_updates is None:
            raise ValueError(
                "SFA acts at fractions of the run: pass total_updates=, the run's number of updates"
            )
        if update == total_updates:
            return True
        period = self.every * total_updates
        nearest = round(update / period)
        return any(round(period * j) == update for j in (nearest - 1, nearest, nearest + 1))

    def rate(self, lr: float) -> float:
        return self.weight
