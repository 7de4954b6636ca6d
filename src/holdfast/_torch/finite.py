"""Whether figures are numbers. NaN must not become a result: the largest of NaN is index 0."""

import math

from torch import Tensor


def is_finite(*figures: float | Tensor) -> bool:
    """Whether figures, and all elements of tensors, are neither NaN nor infinite.

    >>> is_finite(1.0, torch.tensor([2.0])), is_finite(0.0, torch.tensor([1.0, math.nan]))
    (True, False)
    """
    return all(
        bool(f.isfinite().all()) if isinstance(f, Tensor) else math.isfinite(f) for f in figures
    )


def matches(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 where the largest of the logits is that of the label, else 0.

    It is NaN where logits are no prediction: if one of them is NaN or ∞, or all are −∞.

    >>> matches(torch.tensor([[0.0, 1.0], [2.0, 1.0], [0.0, math.nan]]), torch.tensor([1, 1, 0]))
    tensor([1., 0., nan])
    """
    top = logits.max(-1)
    return (top.indices == labels).float().where(top.values.isfinite(), math.nan)
