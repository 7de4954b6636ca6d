"""LiNeS: scale the update of each block by its depth.

Wang et al., *LiNeS: Post-training Layer Scaling Prevents Forgetting and Enhances Model Merging*,
ICLR 2025, https://arxiv.org/abs/2410.17146.

    θ⁽ˡ⁾ = θ*⁽ˡ⁾ + λ⁽ˡ⁾·(θ₁⁽ˡ⁾ − θ*⁽ˡ⁾),    λ⁽ˡ⁾ = α + β·(ℓ−1)/(L−1)

ℓ = 1 … L counts the blocks from the input. Weights outside of the blocks (embeddings, the last
norm, the output layer) are scaled by α, as in the released code.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from holdfast._torch.checks import at_least_zero
from holdfast._torch.merging import Where
from holdfast.methods._merging import TensorMerging
from holdfast.stages import Checks, MedianLoss, SearchRange, SearchSpace


@dataclass(frozen=True)
class LiNeS(TensorMerging):
    """Keep the first blocks near the pretrained ones, and the last ones as tuned.

    A block is a numbered part of the model. An encoder and a decoder, or the towers of a multimodal
    model, are counted apart.

    Args:
        alpha: the share of the update that the first block keeps, and all weights outside of the
            blocks. At least 0.
        beta: how much more of it the last block keeps. Blocks between have shares in proportion to
            their depth. At least 0; alpha + beta = 1 leaves the last block as tuned.

    Example:
        >>> import torch, holdfast
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(3)))
        >>> pretrained = holdfast.Reference.of(model)
        >>> for layer in model:
        ...     _ = layer.weight.data.add_(1.0)                 # fine-tuning
        >>> _ = holdfast.LiNeS(alpha=0.5, beta=0.5).merge(model, pretrained)
        >>> [round(x, 4) for x in pretrained.distance(model).per_parameter.values()]
        [0.5, 0.75, 1.0]
    """

    checks: ClassVar[Checks] = {"alpha": at_least_zero, "beta": at_least_zero}
    neutral: ClassVar[dict[str, Any] | None] = {"alpha": 1.0, "beta": 0.0}
    swept: ClassVar[str | None] = "alpha"

    alpha: float = 0.1
    beta: float = 0.9

    def unfit_tensors(self, places: Collection[Where]) -> str | None:
        if self.beta == 0 or any(where.depth is not None for where in places):
            return None
        return (
            "LiNeS scales the update of each block by its depth, but no tensor's name has a "
            "number, such as layers.0: use beta=0, or another method"
        )

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {
            "alpha": SearchRange(0.0, 0.5, 0.1, log=False),
            "beta": SearchRange(0.0, 1.0, 0.9, log=False),
        }

    def scale(self, where: Where) -> float:
        return self.alpha if where.depth is None else self.alpha + self.beta * where.depth
