r"""EAFT, entropy-adaptive fine-tuning: weight each token by the entropy of the prediction.

Diao et al., *Entropy-Adaptive Fine-Tuning: Resolving Confident Conflicts to Mitigate Forgetting*,
https://arxiv.org/abs/2601.02151.

With H_t the entropy of the K most likely tokens at target token t, whose probabilities are divided
by their sum, all under the model in training, and sg(·) the value without gradient:

    Loss = −Σ sg(H_t / ln K)^α·log p_t / number of targets

If the model is certain of another token than the target, its entropy is low and the loss high. Such
tokens would change the model most; the weight takes them out. If the model is uncertain, the weight
is near 1.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from holdfast._torch.checks import at_least_zero, whole_number
from holdfast.losses import Predicted
from holdfast.methods._own_predictions import WeighsPredictions
from holdfast.stages import Checks, MedianLoss, SearchRange, SearchSpace


@dataclass(frozen=True)
class EAFT(WeighsPredictions):
    """Token weights (H/ln k)^alpha, with H the entropy of the k most likely tokens.

    Args:
        alpha: 1 is the paper's weight. A larger value gives less weight to tokens of medium
            entropy. 0 gives all tokens weight 1.
        k: the number of most likely tokens, ≥ 2; all classes if a task has fewer.

    Example:
        >>> from holdfast import EAFT, Recipe
        >>> Recipe(objective=EAFT(alpha=2)).name
        'eaft'
    """

    checks: ClassVar[Checks] = {"alpha": at_least_zero, "k": partial(whole_number, least=2)}
    neutral: ClassVar[dict[str, Any] | None] = {"alpha": 0.0}
    needs_outputs: ClassVar[bool] = True

    alpha: float = 1.0
    k: int = 20

    @property
    def changes_loss(self) -> bool:
        return self.alpha != 0

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"alpha": SearchRange(0.3, 3.0, 1.0)}

    def weights_of(self, batch: Any, predicted: Predicted) -> Tensor:
        if predicted.outputs is None:
            raise ValueError("EAFT needs the logits of the model, which the host has not computed")
        return normalized_entropy(predicted.outputs, self.k) ** self.alpha


def normalized_entropy(logits: Tensor, k: int) -> Tensor:
    """The entropy of the k largest logits of each row, as a share of the largest possible, ln k.

    Example:
        >>> import torch
        >>> normalized_entropy(torch.tensor([[1.0, 1.0, -9.0], [9.0, 1.0, 1.0]]), k=2)
        tensor([1.0000, 0.0044])
    """
    k = min(k, logits.shape[-1])
    log_p = logits.topk(k, dim=-1).values.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return entropy / math.log(max(k, 2))  # one class has no entropy
