"""SGD with momentum, torch's own."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import Optimizer

from holdfast._torch.checks import flag, share
from holdfast.stages import Checks, Cost, Planned, Run, Update


@dataclass(frozen=True)
class SGDUpdate(Update):
    """``torch.optim.SGD``, for vision models.

    Weight decay is torch's: a term in the gradient, on which momentum acts.

    Args:
        lr, weight_decay, layer_decay: as in :class:`~holdfast.stages.Update`.
        momentum: 0 is plain gradient descent.
        nesterov: use Nesterov momentum.

    Example:
        >>> from holdfast import SGDUpdate
        >>> SGDUpdate(lr=0.01, weight_decay=5e-4).momentum
        0.9
    """

    checks: ClassVar[Checks] = {"momentum": share, "nesterov": flag}
    #: No setting turns it into AdamW, the identity of its stage.
    neutral: ClassVar[dict[str, Any] | None] = None

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=True needs a momentum above 0")

    def cost(self, planned: Planned) -> Cost:
        """A momentum, if there is one. A step reads θ, g and m, and writes θ and m."""
        moments = 1 if self.momentum else 0
        state = {"optimizer state": planned.value} if moments else {}
        return Cost(state=state, moved=(3 + 2 * moments) * planned.value)

    def optimizer(self, groups: list[dict[str, Any]], run: Run, total_updates: int) -> Optimizer:
        return torch.optim.SGD(
            groups, lr=run.lr, momentum=self.momentum, nesterov=self.nesterov, weight_decay=0.0
        )
