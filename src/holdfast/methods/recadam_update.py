"""RecAdam in a recipe: the optimizer, laid out over a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch.optim.optimizer import Optimizer

from holdfast._optim.matching import part_anchored
from holdfast._torch.checks import at_least_zero
from holdfast.anneal import Anneal, Constant, Sigmoid
from holdfast.methods._adam import AdamUpdate
from holdfast.methods.ewc import EWC
from holdfast.methods.mas import MAS
from holdfast.methods.recadam import RecAdam
from holdfast.reference import Reference
from holdfast.stages import MedianLoss, SearchRange, SearchSpace

if TYPE_CHECKING:
    from holdfast.run import Run

__all__ = ["RecAdamUpdate"]

_PULL = 0.1  # lr·γ of the paper


@dataclass(frozen=True)
class RecAdamUpdate(AdamUpdate):
    """:class:`RecAdam` in a recipe, laid out over the run: no setting depends on lr or length.

    Args:
        lr, weight_decay, layer_decay: as in :class:`~holdfast.stages.Update`. Under a layer decay
            lower layers are pulled more slowly, as they learn more slowly.
        betas, eps: Adam's.
        pull: lr·γ at the peak learning rate, the fraction of the way back to θ* that an update
            goes while λ is near 0. None is 0.1, as in the paper, unless ``gamma`` is given; 0 is
            no pull.
        gamma: γ itself, instead of ``pull``.
        t0: when λ reaches ½, as a fraction of the run.
        width: 1/k, the width of the shift from recalling to learning, as a fraction of the run.
        anneal: λ(t) itself, in updates, instead of ``t0`` and ``width``.
        importance: weigh the pull on each coordinate as EWC (``"fisher"``) or MAS (``"mas"``) do
            by default: from 1000 samples of the training data at θ*, scaled to a mean of 1 over
            what is pulled. None pulls on all alike.
        eight_bit: keep Adam's moments in 8 bits each: with pretrained weights in half precision
            the whole takes less memory than plain AdamW in float32.

    Example:
        >>> from holdfast.optim import RecAdamUpdate
        >>> RecAdamUpdate(lr=2e-5, t0=0.3).gamma_at(2e-5)
        5000.0
    """

    neutral: ClassVar[dict[str, Any] | None] = {"pull": 0.0, "anneal": Constant(1.0)}
    needs_reference: ClassVar[bool] = True

    pull: float | None = None
    gamma: float | None = None
    t0: float = 0.3
    width: float = 0.1
    anneal: Anneal | None = None
    importance: Literal["fisher", "mas"] | None = None
    eight_bit: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pull is not None and self.gamma is not None:
            raise ValueError(
                f"pull={self.pull!r} and gamma={self.gamma!r} say the same thing (gamma = pull / "
                "lr): give one of them, and leave the other None"
            )
        for name in ("pull", "gamma"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, at_least_zero(name, getattr(self, name)))
        Sigmoid.over(1, t0=self.t0, width=self.width)  # checks them
        if self.anneal is not None and not isinstance(self.anneal, Anneal):
            raise TypeError(f"anneal must be one of holdfast.anneal's, got {self.anneal!r}")
        if self.importance not in (None, "fisher", "mas"):
            raise ValueError(f"importance must be None, 'fisher' or 'mas', got {self.importance!r}")
        if not isinstance(self.eight_bit, bool):
            raise TypeError(f"eight_bit must be True or False, got {self.eight_bit!r}")

    @property
    def pulls(self) -> bool:
        """Unless its settings leave nothing of the pull."""
        return 0 not in (self.pull, self.gamma) and self.anneal != Constant(1.0)

    @property
    def reads_data(self) -> bool:
        """True if the pull is weighted by importance."""
        return self.importance is not None and self.pulls

    @property
    def needs_fitted_head(self) -> bool:
        """Importance is measured through the head."""
        return self.reads_data

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        """The pull, and when it ends: t0 and 1/k as fractions of the run."""
        pull, gamma = SearchRange(0.003, 1.0, _PULL), SearchRange(0.003 / lr, 1.0 / lr, _PULL / lr)
        strength = {"pull": pull} if self.gamma is None else {"gamma": gamma}
        if self.anneal is not None:  # replaces t0 and width; λ = 1 leaves no pull either
            return {} if self.anneal == Constant(1.0) else strength
        shift = {
            "t0": SearchRange(0.0, 0.9, RecAdamUpdate.t0, log=False),
            "width": SearchRange(0.005, 1.0, RecAdamUpdate.width),
        }
        return {**strength, **shift}

    def log(self, run: Run) -> dict[str, float]:
        """λ and the pull of the last update."""
        if not isinstance(run.optimizer, RecAdam):
            return {}
        state = run.optimizer.recall_state()
        return {"lam": state["lam"], "pull": state["pull"]}

    def gamma_at(self, lr: float) -> float:
        """γ of a run with this learning rate at its peak."""
        if self.gamma is not None:
            return self.gamma
        return (_PULL if self.pull is None else self.pull) / (lr or math.inf)

    def measure_importance(self, run: Run) -> Reference | None:
        """F at θ*, with a mean of 1, where the pull is weighted."""
        if self.importance is None or not self.pulls:
            return None
        return {"fisher": EWC(), "mas": MAS()}[self.importance].measure_importance(run)

    def optimizer(self, groups: list[dict[str, Any]], run: Run, total_updates: int) -> Optimizer:
        """RecAdam over the groups; what has no anchor (a new head, LoRA's A) is not pulled."""
        if run.anchors is None:
            raise ValueError("RecAdam pulls to the pretrained weights, but the run has none")
        return RecAdam(
            part_anchored(groups, run.anchors),
            lr=run.lr,
            betas=self.betas,
            eps=self.eps,
            gamma=self.gamma_at(run.lr),
            anneal=self.anneal or Sigmoid.over(total_updates, t0=self.t0, width=self.width),
            anchors=run.anchors,
            importance=run.importance[self],
            state_dtype="8bit" if self.eight_bit else None,
        )
