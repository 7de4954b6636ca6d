"""WiSE-FT: interpolate between the pretrained and the tuned weights.

Wortsman et al., *Robust fine-tuning of zero-shot models*, CVPR 2022,
https://arxiv.org/abs/2109.01903.

    θ = α·θ₁ + (1−α)·θ*

α = 1 is the tuned model, α = 0 the pretrained one, to the last bit. Parameters without pretrained
values (a new head, the rows of new tokens) stay as tuned. Trying several α costs no training. With
LoRA the effective weights are interpolated, θ* + α·BA, by scaling B.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

from torch import nn

from holdfast._torch.checks import one_of, share
from holdfast._torch.merging import Where
from holdfast.data import Collate
from holdfast.methods._batch_norm import reestimate_statistics, statistics_of
from holdfast.methods._merging import Pair, TensorMerging, pairs_of
from holdfast.reference import Reference
from holdfast.stages import Checks, MedianLoss, SearchRange, SearchSpace

Statistics = Literal["interpolate", "keep", "reestimate"]


@dataclass(frozen=True)
class WiseFT(TensorMerging):
    """Interpolate the weights of a tuned model with the pretrained ones.

    Args:
        alpha: the share of the tuned weights, between 0 and 1.
        statistics: how to treat BatchNorm's running statistics and other floating-point buffers:
            ``"interpolate"`` them as well, ``"keep"`` the tuned ones, or ``"reestimate"``
            BatchNorm's with a pass over data (and keep the others), unless α = 1. Integer buffers
            stay as tuned.

    Example:
        >>> import torch, holdfast
        >>> model = torch.nn.Linear(2, 1)
        >>> pretrained = holdfast.Reference.of(model)
        >>> _ = model.weight.data.add_(1.0)                     # fine-tuning
        >>> _ = holdfast.WiseFT(alpha=0.5).merge(model, pretrained)
        >>> round(pretrained.distance(model).total, 4)          # half of √2
        0.7071
    """

    checks: ClassVar[Checks] = {
        "alpha": share,
        "statistics": partial(one_of, allowed=get_args(Statistics)),
    }
    neutral: ClassVar[dict[str, Any] | None] = {"alpha": 1.0}
    swept: ClassVar[str | None] = "alpha"

    alpha: float = 0.5
    statistics: Statistics = "interpolate"

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"alpha": SearchRange(0.05, 1.0, 0.5, log=False)}

    def scale(self, where: Where) -> float:
        return 1.0 if where.is_statistic and self.statistics != "interpolate" else self.alpha

    def merge(
        self,
        model: nn.Module,
        reference: Reference | None,
        *,
        data: Any = None,
        collate: Collate | None = None,
    ) -> nn.Module:
        """Interpolate a tuned model in place; of LoRA adapters, only B is scaled.

        The reference may be None if only LoRA adapters were trained. The data is for
        ``statistics="reestimate"``, as for :func:`holdfast.score`.
        """
        self._check_data(model, data)
        super().merge(model, reference)
        if self._reestimates:
            reestimate_statistics(model, data, collate)
        return model

    @property
    def _reestimates(self) -> bool:
        return self.statistics == "reestimate" and self.alpha != 1

    def _check_data(self, model: nn.Module, data: Any) -> None:
        if self._reestimates and data is None and statistics_of(model):
            raise ValueError(
                "statistics='reestimate' needs data for BatchNorm's statistics: pass data="
            )

    def _pairs(self, model: nn.Module, reference: Reference | None) -> list[Pair]:
        buffers = self.statistics == "interpolate"
        return [*pairs_of(model, reference, buffers=buffers)]
