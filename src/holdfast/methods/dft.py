r"""DFT, dynamic fine-tuning: weight each token by the model's own probability of it.

Wu et al., *On the Generalization of SFT: A Reinforcement Learning Perspective with Reward
Rectification*, ICLR 2026, https://arxiv.org/abs/2508.05629.

With p_t the probability that the model in training gives to target token t, and sg(·) the value
without gradient:

    Loss = −Σ sg(p_t)·log p_t / number of targets

The gradient of −log p_t is −∇p_t / p_t: read as a policy gradient, it rewards an unlikely token
with 1/p_t. The weight cancels the 1/p_t, so that all tokens get the same reward.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from holdfast._torch.checks import at_least_zero
from holdfast.losses import Predicted
from holdfast.methods._own_predictions import WeighsPredictions
from holdfast.stages import Checks, MedianLoss, SearchRange, SearchSpace


@dataclass(frozen=True)
class DFT(WeighsPredictions):
    """Token weights p^power, with p the probability of the target under the model in training.

    Args:
        power: 1 is the paper's weight p. Between 0 and 1, unlikely tokens count more than in the
            paper. 0 gives all tokens weight 1.

    Example:
        >>> from holdfast import DFT, Recipe
        >>> Recipe(objective=DFT()).name
        'dft'
    """

    checks: ClassVar[Checks] = {"power": at_least_zero}
    neutral: ClassVar[dict[str, Any] | None] = {"power": 0.0}

    power: float = 1.0

    @property
    def changes_loss(self) -> bool:
        return self.power != 0

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"power": SearchRange(0.1, 2.0, 1.0)}

    def weights_of(self, batch: Any, predicted: Predicted) -> Tensor:
        return (-self.power * predicted.losses).exp()
