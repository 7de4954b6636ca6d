"""Model Stock: average tuned models, and go back to θ* as far as the angle between them says.

Jang et al., *Model Stock: All we need is just a few fine-tuned models*, ECCV 2024,
https://arxiv.org/abs/2403.19522. Of each tensor, with K tuned models:

    θ = t·θ̄ + (1 − t)·θ*,    θ̄ = mean of θₖ,    t = K·cos φ / (1 + (K−1)·cos φ)

φ is the angle between θₖ − θ* of two models; cos φ is the mean over all pairs of them.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from holdfast._torch.merging import Slice, Slices, Where
from holdfast.methods._merging import TensorMerging


@dataclass(frozen=True)
class ModelStock(TensorMerging):
    """Approximate the center of the weights of many fine-tuned models by two or a few of them.

    It has no settings. A recipe trains one model, so it merges checkpoints only.

    Example:
        >>> import torch
        >>> from holdfast import ModelStock
        >>> from holdfast.stages import Where
        >>> base, tuned = torch.zeros(2), [torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0])]
        >>> ModelStock().merged(Where("weight"), base, tuned)   # cos φ = 0.71, t = 0.83
        tensor([1.2426, 0.4142])
    """

    neutral: ClassVar[dict[str, Any] | None] = None
    least_models: ClassVar[int] = 2
    most_models: ClassVar[int | None] = None

    def survey(self, where: Where, slices: Slices) -> float:
        """The ratio t."""
        return ratio(sum(slices.map(_inner_products)))

    def merged_slice(self, where: Where, part: Slice, known: float) -> Tensor:
        first, second, *others = part.tuned
        mean = torch.add(first, second, out=part.buffer("mean"))
        for model in others:
            mean.add_(model)
        return torch.lerp(part.base, mean.div_(len(part.tuned)), known, out=mean)


def _inner_products(part: Slice) -> Any:
    """⟨θᵢ − θ*, θⱼ − θ*⟩ of all models of a slice."""
    changes = part.buffer("changes", len(part.tuned)).view(len(part.tuned), -1)
    for change, model in zip(changes, part.tuned, strict=True):
        torch.sub(model, part.base, out=change)
    return (changes @ changes.T).double().cpu().numpy()


def ratio(products: Any) -> float:
    """t of the inner products of the changes of K models.

    It is 0 if they point away from each other on average.

    >>> round(ratio(np.array([[1.0, 1.0], [1.0, 2.0]])), 4)
    0.8284
    """
    lengths, models = np.sqrt(np.diag(products)).tolist(), len(products)
    cosines = []
    for i, j in itertools.combinations(range(models), 2):
        product = lengths[i] * lengths[j]
        cosines.append(float(products[i, j]) / product if product else 0.0)
    cosine = min(1.0, max(0.0, math.fsum(cosines) / len(cosines)))
    return models * cosine / (1 + (models - 1) * cosine)
