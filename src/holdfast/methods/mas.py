"""MAS: a quadratic penalty that weights each coordinate by how much the outputs depend on it.

Aljundi et al., *Memory Aware Synapses: Learning what (not) to forget*, ECCV 2018,
https://arxiv.org/abs/1711.09601:  ½·β·Σ Ωᵢ·(θᵢ − θ*ᵢ)²,  Ωᵢ = E[|∂‖f(x)‖²/∂θᵢ|].

The paper writes the penalty as λ·Σ Ωᵢ·(θᵢ − θ*ᵢ)², without the ½ that EWC and L2-SP have: its λ is
our β/2. Ω needs inputs but no labels.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from holdfast._optim.importance import check_samples, mean_over_samples, measured, tokens_read
from holdfast._torch.dtypes import widen
from holdfast.data import Collate
from holdfast.losses import IGNORED
from holdfast.methods.l2_sp import QuadraticPenalty
from holdfast.reference import Reference
from holdfast.stages import Checks, Cost, Planned, Run


@dataclass(frozen=True)
class MAS(QuadraticPenalty):
    """½ · strength · Σ Ω·(θ − θ*)²; Ω comes from :func:`mas_importance`.

    Decoupled: θ ← θ − min(1, lr · strength · Ω) · (θ − θ*). The paper's λ is strength / 2.

    Args:
        strength, coupled: as in :class:`~holdfast.L2SP`; strengths are comparable if Ω has mean 1.
        samples: of :func:`mas_importance`, which a recipe calls on the training data.
        normalize: in a recipe, scale Ω to a mean of 1 over the penalized parameters.

    Example:
        >>> from holdfast import MAS
        >>> MAS(strength=50.0, samples=None).normalize
        True
    """

    checks: ClassVar[Checks] = {"samples": check_samples}
    weighted: ClassVar[bool] = True

    samples: int | None = 1000
    normalize: bool = True

    def cost(self, planned: Planned) -> Cost:
        return replace(
            super().cost(planned), before_trained=tokens_read(self.samples, planned) * self.acts
        )

    def measure_importance(self, run: Run) -> Reference | None:
        if not self.acts:
            return None
        return measured(run, self.normalize, mas_importance, samples=self.samples)


def mas_importance(
    model: nn.Module,
    data: Any,
    *,
    collate: Collate | None = None,
    batch_size: int = 8,
    samples: int | None = None,
    seed: int = 0,
    normalize: bool = False,
    progress: bool = True,
) -> Reference:
    """How much the squared norm of a model's outputs depends on each parameter, by name.

    Frozen parameters are skipped.

    Args:
        model: holding its pretrained weights; run in eval mode.
        data, collate, batch_size, progress: as for :func:`holdfast.score`. Labels are
            only used if there is one per token: outputs at −100 do not count.
        samples: how many samples to draw. If None, or for an iterable of batches, all are used.
        normalize: scale to a mean of 1.

    Example:
        >>> import torch
        >>> from holdfast.optim import mas_importance
        >>> model, x = torch.nn.Linear(3, 1), torch.eye(3)
        >>> mas_importance(model, [(x, torch.zeros(3))], progress=False)["weight"].shape
        torch.Size([1, 3])
    """

    def squared_norm(logits: Tensor, labels: Tensor) -> Tensor:
        squares = widen(logits).square().sum(-1)
        if labels.shape == squares.shape and labels.dim() == 2:
            squares = squares * (labels != IGNORED)
        return squares.sum()

    return mean_over_samples(
        model, data, collate, batch_size, lambda _, labels: labels, squared_norm, Tensor.abs,
        samples=samples, seed=seed, normalize=normalize, progress=progress,
    )  # fmt: skip
