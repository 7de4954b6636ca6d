r"""FLOW: weight each sample by how easy the pretrained model finds it.

Sanyal et al., *Upweighting Easy Samples in Fine-Tuning Mitigates Forgetting*, ICML 2025,
https://arxiv.org/abs/2502.02797.

With fᵢ the loss of sample i at the pretrained weights θ*:

    wᵢ = exp(−fᵢ / τ),      τ = median of f

The weights, normalised to π = w/Σw, minimise over all distributions π

    Σ πᵢ·fᵢ + τ·Σ πᵢ·log πᵢ

the expected loss with an entropic pull to uniform: the opposite of distributionally robust
optimisation, which looks for the hardest samples. Hard samples are those that would move the
model far; weighing them down keeps it near θ* without looking at its weights at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from holdfast.objective.scores import Scores

__all__ = ["Flow"]

TauRule = Literal["median", "batch_median", "running_median"]
Level = Literal["sequence", "token"]


class RunningMedian:
    """The median of the most recent values of a stream: a small state, saved with a run.

    Args:
        window: how many values are kept.
    """

    def __init__(self, window: int = 10_000) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.window = window
        self.values = np.empty(0)

    def update(self, losses: Tensor) -> float:
        """Take in more values and return the median of those kept."""
        new = losses.detach().double().cpu().numpy().reshape(-1)
        self.values = np.concatenate([self.values, new])[-self.window :]
        return float(np.median(self.values))

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint of a run."""
        return {"window": self.window, "values": torch.from_numpy(self.values.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.window = state["window"]
        self.values = state["values"].numpy().copy()


@dataclass(frozen=True)
class Flow:
    """Sample weights from the pretrained model's own losses, w = exp(−f/τ).

    Args:
        tau: ``"median"`` of the losses over the fine-tuning set, once; ``"batch_median"``, anew
            for each batch; ``"running_median"`` of all that this object has weighed so far, for
            streams; or a number > 0. Infinity gives all samples the weight 1.
        level: weigh whole ``"sequence"``s, or every ``"token"`` by its own loss.
        normalize: scale the weights to a mean of 1. As they are, their mean is well below 1,
            which also takes the step size down.

    Example:
        >>> import torch
        >>> from holdfast import Flow
        >>> Flow().weigh(torch.tensor([0.5, 1.0, 2.0]))
        tensor([0.6065, 0.3679, 0.1353], dtype=torch.float64)
    """

    tau: TauRule | float = "median"
    level: Level = "sequence"
    normalize: bool = False
    _history: RunningMedian = field(
        default_factory=RunningMedian, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        number = isinstance(self.tau, int | float) and not isinstance(self.tau, bool)
        if not (number and float(self.tau) > 0) and self.tau not in get_args(TauRule):
            rules = ", ".join(map(repr, get_args(TauRule)))
            raise ValueError(f"tau must be one of {rules} or a number > 0, got {self.tau!r}")
        if self.level not in get_args(Level):
            raise ValueError(f"level must be 'sequence' or 'token', got {self.level!r}")

    def weigh(self, losses: Tensor | Scores) -> Tensor:
        """The weights of losses taken at θ*, float64, in the same order.

        Args:
            losses: finite values ≥ 0, of the whole fine-tuning set for ``tau="median"``, of a
                batch for the batch and running medians; or :class:`~holdfast.Scores`, whose
                sequence or token losses are taken by ``level`` (tokens one after another, see
                ``Scores.split``). Samples that had no targets get the weight 0.
        """
        if isinstance(losses, Scores):
            return self._weigh_scores(losses)
        f = torch.as_tensor(losses).detach().cpu().double()
        _check_losses(f)
        w = torch.exp(-f / self._tau_of(f))
        if not (w > 0).any():
            raise ValueError(
                f"all weights are 0: the smallest loss is {f.min():.4g}, more than 700 times "
                f"tau = {self.tau}. Take a larger tau, or the median"
            )
        return w / w.mean() if self.normalize else w

    def state_dict(self) -> dict[str, Any]:
        """What the running median has seen, for the checkpoint of a run."""
        return self._history.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._history.load_state_dict(state)

    def _weigh_scores(self, scores: Scores) -> Tensor:
        if self.level == "token":
            if scores.token_losses is None:
                raise ValueError("token weights need token losses: score(..., tokens=True)")
            return self.weigh(torch.cat(scores.token_losses))
        kept = scores.counts > 0
        if not kept.any():
            raise ValueError("there is nothing to weigh: no sample has a target")
        _check_losses(scores.losses.masked_fill(~kept, 0.0))
        weights = torch.zeros(len(scores.losses), dtype=torch.float64)
        weights[kept] = self.weigh(scores.losses[kept])
        return weights

    def _tau_of(self, f: Tensor) -> float:
        if not isinstance(self.tau, str):
            return float(self.tau)
        if self.tau == "running_median":
            tau = self._history.update(f)
        else:
            tau = float(np.median(f.numpy()))  # the mean of the two middle values
        if tau == 0:
            raise ValueError(
                "the median loss is 0: the pretrained model already knows at least half of these "
                "samples perfectly, and FLOW's temperature is undefined. Give tau as a number"
            )
        return tau


def _check_losses(f: Tensor) -> None:
    if f.numel() == 0:
        raise ValueError("there are no losses to weigh: the data is empty")
    for what, bad in (
        ("not a number", f.isnan()),
        ("infinite", f.isinf()),
        ("negative", f < 0),
    ):
        if bad.any():
            index = int(bad.flatten().nonzero()[0])
            more = int(bad.sum()) - 1
            raise ValueError(
                f"the loss of sample {index} is {what} ({f.flatten()[index].item()})"
                + (f", and of {more} more" if more else "")
                + "; FLOW needs finite losses ≥ 0"
            )
