"""MAS: a quadratic penalty that weighs each coordinate by how much the outputs depend on it.

Aljundi et al., *Memory Aware Synapses: Learning what (not) to forget*, ECCV 2018,
https://arxiv.org/abs/1711.09601:  ½·β·Σ Ωᵢ·(θᵢ − θ*ᵢ)²,  Ωᵢ = E[|∂‖f(x)‖²/∂θᵢ|].

Ω needs inputs but no labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from holdfast.objective.data import Collate
from holdfast.objective.losses import IGNORED
from holdfast.optim._importance import mean_over_samples
from holdfast.optim.l2sp import L2SP
from holdfast.reference import Reference

__all__ = ["MAS", "mas_importance"]


@dataclass(frozen=True)
class MAS(L2SP):
    """½ · strength · Σ Ω·(θ − θ*)²; Ω comes from :func:`mas_importance`.

    Decoupled: θ ← θ − min(1, lr · strength · Ω) · (θ − θ*).
    """

    weighted: ClassVar[bool] = True


def mas_importance(
    model: nn.Module,
    data: Any,
    *,
    collate: Collate | None = None,
    batch_size: int = 8,
    normalize: bool = False,
    progress: bool = True,
) -> Reference:
    """How much the squared norm of a model's outputs depends on each parameter, by name.

    Args:
        model: holding its pretrained weights; run in eval mode.
        data, collate, batch_size, progress: as for :func:`holdfast.score`. Labels say only, where
            there is one a token, which outputs count (not those at −100).
        normalize: scale to a mean of 1.

    Example:
        >>> import torch
        >>> from holdfast.optim import mas_importance
        >>> model, x = torch.nn.Linear(3, 1), torch.eye(3)
        >>> mas_importance(model, [(x, torch.zeros(3))], progress=False)["weight"].shape
        torch.Size([1, 3])
    """

    def squared_norm(logits: Tensor, labels: Tensor) -> Tensor:
        squares = logits.float().square().sum(-1)
        if labels.shape == squares.shape and labels.dim() == 2:
            squares = squares * (labels != IGNORED)
        return squares.sum()

    return mean_over_samples(
        model, data, collate, batch_size, lambda _, labels: labels, squared_norm, Tensor.abs,
        normalize=normalize, progress=progress,
    )  # fmt: skip
