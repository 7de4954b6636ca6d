"""Whether figures are numbers. NaN must not become a result: the largest of NaN is index 0."""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from holdfast._torch.layout import gathered, is_sharded
from holdfast._torch.names import shorten


class DivergedError(ValueError):
    """The loss or the weights of a training are no longer finite."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"the training diverged: {found}. Lower the learning rate, or clip the gradients "
            "(clip_norm); check the data and the base model for NaN"
        )


def is_finite(*figures: float | Tensor) -> bool:
    """Whether figures, and all elements of tensors, are neither NaN nor infinite.

    >>> import torch
    >>> is_finite(1.0, torch.tensor([2.0])), is_finite(0.0, torch.tensor([1.0, math.nan]))
    (True, False)
    """
    return all(
        bool(f.isfinite().all()) if isinstance(f, Tensor) else math.isfinite(f) for f in figures
    )


def matches(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 where the largest of the logits is that of the label, else 0.

    It is NaN where logits are no prediction: if one of them is NaN or ∞, or all are −∞.

    >>> import torch
    >>> matches(torch.tensor([[0.0, 1.0], [2.0, 1.0], [0.0, math.nan]]), torch.tensor([1, 1, 0]))
    tensor([1., 0., nan])
    """
    top = logits.max(-1)
    return (top.indices == labels).float().where(top.values.isfinite(), math.nan)


def check_loss(loss: float, update: int) -> float:
    """Return the loss of an update; raise :class:`DivergedError` if it is not finite."""
    if not is_finite(loss):
        raise DivergedError(f"the loss of update {update} is {loss}")
    return loss


def check_weights(named: Iterable[tuple[str, Any]]) -> None:
    """Raise :class:`DivergedError` on all ranks if trained weights are not finite."""
    local = ((name, p.to_local() if is_sharded(p) else p) for name, p in named)
    found = gathered([name for name, p in local if not is_finite(p)])
    names = list(dict.fromkeys(name for some in found for name in some))
    if names:
        raise DivergedError(f"there is NaN or infinity in {shorten(names, most=3)}")
