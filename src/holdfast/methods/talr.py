r"""TALR, token-adaptive loss reweighting: weight each token by a power of its own probability.

Lin et al., *SFT Doesn't Always Hurt General Capabilities: Revisiting Domain-Specific Fine-Tuning in
LLMs*, ICLR 2026, https://arxiv.org/abs/2509.20758.

With p_t the probability that the model in training gives to target token t, ℓ_t = −log p_t and
sg(·) the value without gradient:

    w_t = max(p_t^(1/τ), w_min) = max(exp(−ℓ_t / τ), w_min)
    τ = median over the sequences of a batch of their mean token loss
    Loss = Σ sg(w_t)·ℓ_t / number of targets

Without w_min, the weights normalized to a sum of 1 minimize Σ w_t·ℓ_t + τ·Σ w_t·log w_t. As the
model learns, τ falls and more tokens become easy: a curriculum.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from holdfast._torch.batch import sequences
from holdfast._torch.checks import positive_share
from holdfast.losses import Predicted
from holdfast.methods._own_predictions import WeighsPredictions
from holdfast.stages import Checks, MedianLoss, SearchRange, SearchSpace


@dataclass(frozen=True)
class TALR(WeighsPredictions):
    """Token weights max(p^(1/τ), w_min), with p the probability under the model in training.

    Args:
        tau: ``"batch_median"``, the median of the mean losses of the sequences in each micro-batch,
            on each rank by itself; or a number > 0. Infinity gives all tokens weight 1. Samples
            packed into one row are sequences of their own if the batch has ``position_ids``.
        w_min: the smallest weight of a token. 1 gives all tokens weight 1.

    Example:
        >>> from holdfast import TALR, Recipe
        >>> Recipe(objective=TALR(tau=0.5)).name
        'talr'
    """

    checks: ClassVar[Checks] = {"w_min": positive_share}
    neutral: ClassVar[dict[str, Any] | None] = {"w_min": 1.0}

    tau: Literal["batch_median"] | float = "batch_median"
    w_min: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.tau, int | float) and not isinstance(self.tau, bool)
        if not (number and float(self.tau) > 0) and self.tau != "batch_median":
            raise ValueError(f"tau must be 'batch_median' or a number > 0, got {self.tau!r}")

    @property
    def changes_loss(self) -> bool:
        return self.w_min < 1 and self.tau != math.inf

    @property
    def needs_batch(self) -> bool:
        return isinstance(self.tau, str)

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"w_min": SearchRange(0.001, 0.5, 0.01)}

    def weights_of(self, batch: Any, predicted: Predicted) -> Tensor:
        tau: Tensor | float
        if isinstance(self.tau, str):
            sequence = sequences(batch, predicted.labels)[predicted.where]
            tau = median_of_means(predicted.losses, sequence)
        else:
            tau = self.tau
        return (-predicted.losses / tau).exp().clamp(min=self.w_min)


def median_of_means(losses: Tensor, sequence: Tensor) -> Tensor:
    """The median over sequences of their mean losses, above 0; ``sequence`` has a number per loss.

    The median of an even number is the mean of the two middle values.

    Example:
        >>> import torch
        >>> median_of_means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2]))
        tensor(3.5000)
    """
    smallest = torch.finfo(losses.dtype).tiny
    if losses.numel() == 0:
        return losses.new_tensor(smallest)
    _, sequence, counts = torch.unique(sequence, return_inverse=True, return_counts=True)
    means = losses.new_zeros(len(counts)).index_add(0, sequence, losses) / counts
    return torch.quantile(means, 0.5).clamp(min=smallest)
