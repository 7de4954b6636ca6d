"""Early stopping: the best weights of a run, by the target of its watch, and when to stop."""

import math
from typing import Any

import torch
from torch import Tensor

from holdfast._torch.checks import positive_integer
from holdfast._torch.layout import gathered, like, local, sharded_as
from holdfast.hosts._checkpoints import trained_tensors, whole_state
from holdfast.hosts.watching import Observer
from holdfast.run import Run


class EarlyStop:
    """Keeps the weights with the lowest loss on the target of a watch.

    On several ranks, each one keeps its own shard, in CPU memory.

    Args:
        patience: measurements without a lower loss after which the run stops.
        run: the run, whose weights are kept.
        watch: measures the loss.
    """

    def __init__(self, patience: int, run: Run, watch: Observer | None) -> None:
        self.patience, self.run, self.watch = positive_integer("patience", patience), run, watch
        self.best, self.update, self.waited = math.inf, 0, 0
        self.weights: dict[str, Tensor] = {}
        if getattr(watch, "target_loss", None) is None:
            raise ValueError(
                "patience= stops by the loss on the target of a watch: pass watch=Watch(model, "
                "target=rows)"
            )
        if ending := [type(p).__name__ for p in run.recipe.penalties if p.acts_at_end]:
            raise ValueError(
                f"{ending[0]} changes the weights after the last update, which a run that stops "
                "early does not reach: train without patience"
            )

    @property
    def is_over(self) -> bool:
        return self.waited >= self.patience

    def measured(self, update: int) -> dict[str, float]:
        """Judge the weights after a measurement; return what is logged. All ranks must call it."""
        loss = float(gathered(getattr(self.watch, "target_loss"))[0])  # noqa: B009 (not of all)
        self.waited += 1
        if loss < self.best:
            self.best, self.update, self.waited = loss, update, 0
            tensors = trained_tensors(self.run).items()
            self.weights = {n: local(t).detach().to("cpu", copy=True) for n, t in tensors}
        return {"best_update": self.update}

    @torch.no_grad()
    def restore(self) -> None:
        """Give the run its best weights, if it was measured at all."""
        for name, tensor in trained_tensors(self.run).items() if self.weights else ():
            local(tensor).copy_(self.weights[name])

    def state(self) -> dict[str, Any]:
        """The state that a run resumes from, with whole tensors. All ranks must call it."""
        tensors = trained_tensors(self.run)
        kept = {name: sharded_as(tensor, tensors[name]) for name, tensor in self.weights.items()}
        about = {"best": self.best, "update": self.update, "waited": self.waited}
        return about | {"weights": whole_state(kept)}

    def load(self, state: dict[str, Any]) -> None:
        self.best, self.update, self.waited = state["best"], state["update"], state["waited"]
        own = trained_tensors(self.run)
        saved = {name: local(like(tensor, own[name])) for name, tensor in state["weights"].items()}
        self.weights = {name: tensor.to("cpu", copy=True) for name, tensor in saved.items()}
