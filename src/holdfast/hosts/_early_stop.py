"""Early stopping: the best weights of a run, by the target of its watch, and when to stop."""

import logging
import math
from typing import Any

import torch
from torch import Tensor

from holdfast._torch.checks import positive_integer
from holdfast._torch.layout import gathered, like, local, sharded_as
from holdfast.hosts._checkpoints import trained_tensors, whole_state
from holdfast.hosts.watching import Observer
from holdfast.recipe import Recipe
from holdfast.run import Run

logger = logging.getLogger(__name__)

_SAVED = ("before", "best", "update", "waited")


def check_may_stop(recipe: Recipe) -> None:
    """Raise ValueError if a method acts after the last update."""
    if ending := [type(p).__name__ for p in recipe.penalties if p.acts_at_end]:
        raise ValueError(
            f"{ending[0]} changes the weights after the last update, which a run that stops early "
            "does not reach: train without patience"
        )


class EarlyStop:
    """Keeps the weights with the lowest loss on the target of a watch.

    On several ranks, each one keeps its own shard, in CPU memory.

    Args:
        patience: measurements without a lower loss after which the run stops.
        run: the run, whose weights are kept.
        watch: measures the loss.
    """

    def __init__(self, patience: int, run: Run, watch: Observer | None) -> None:
        self.patience, self.run = positive_integer("patience", patience), run
        self.watch: Any = watch  # not all have a target
        self.before = self.best = math.inf  # the losses of the pretrained and of the best weights
        self.update = self.waited = 0
        self.weights: dict[str, Tensor] = {}
        if getattr(watch, "target_loss", None) is None:
            raise ValueError(
                "patience= stops by the loss on the target of a watch: pass watch=Watch(model, "
                "target=rows)"
            )
        check_may_stop(run.recipe)

    @property
    def is_over(self) -> bool:
        return self.waited >= self.patience

    def measured(self, update: int) -> dict[str, float]:
        """Judge the weights after a measurement; return what is logged. All ranks must call it."""
        loss = float(gathered(self.watch.target_loss)[0])
        if not update:  # the pretrained weights are not a result
            self.before = loss
            return {}
        self.waited += 1
        if loss < self.best:
            self.best, self.update, self.waited = loss, update, 0
            tensors = trained_tensors(self.run).items()
            self.weights = {n: local(t).detach().to("cpu", copy=True) for n, t in tensors}
        return {"best_update": self.update}

    @torch.no_grad()
    def restore(self) -> None:
        """Give the run its best weights, if it was measured at all."""
        if self.weights and self.best >= self.before:
            logger.warning(
                f"the loss on the target never fell below {self.before:.4g}, that of the "
                "pretrained model: try a lower learning rate, or measure earlier"
            )
        for name, tensor in trained_tensors(self.run).items() if self.weights else ():
            local(tensor).copy_(self.weights[name])

    def state(self) -> dict[str, Any]:
        """The state that a run resumes from, with whole tensors. All ranks must call it."""
        tensors = trained_tensors(self.run)
        kept = {name: sharded_as(tensor, tensors[name]) for name, tensor in self.weights.items()}
        return {name: getattr(self, name) for name in _SAVED} | {"weights": whole_state(kept)}

    def load(self, state: dict[str, Any]) -> None:
        for name in _SAVED:
            setattr(self, name, state[name])
        own = trained_tensors(self.run)
        saved = {name: local(like(tensor, own[name])) for name, tensor in state["weights"].items()}
        self.weights = {name: tensor.to("cpu", copy=True) for name, tensor in saved.items()}
