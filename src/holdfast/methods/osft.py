"""OSFT, orthogonal subspace fine-tuning: keep the directions of the largest singular values.

Nayak et al., *Sculpting Subspaces: Constrained Full Fine-Tuning in LLMs for Continual Learning*,
ICLR 2026, https://arxiv.org/abs/2504.07097. For each matrix of a linear layer,

    W* = U₁ Σ₁ V₁ᵀ + U₂ Σ₂ V₂ᵀ,   Σ₁ = the k largest singular values

and training changes W only in the directions that are orthogonal to U₁ and V₁:

    W ← W* + (I − U₁U₁ᵀ)(W − W*)(I − V₁V₁ᵀ)

The released code trains U₂, Σ₂ and V₂ with gradients that are projected in this way, and reaches
the same set of weights. Here W itself is trained. Its gradient is projected before a step, and W
after it: the step of Adam scales each coordinate by itself and leaves the subspace again.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from holdfast._optim.backends import only_makes_state
from holdfast._optim.penalties import keep_hooks
from holdfast._torch.adapters import has_adapters, unwrapped
from holdfast._torch.checks import share_below_one
from holdfast._torch.dtypes import wide
from holdfast._torch.layers import head_parts
from holdfast._torch.layout import like, whole
from holdfast._torch.names import plain_name
from holdfast._torch.progress import progress_bar
from holdfast.methods._adapting import linear_layers
from holdfast.stages import (
    Checks,
    Cost,
    MedianLoss,
    Planned,
    Run,
    SearchRange,
    SearchSpace,
    Trainable,
)

_SUBSPACES = "_holdfast_subspaces"


@dataclass(frozen=True)
class OSFT(Trainable):
    """Train linear layers only in directions orthogonal to their largest singular vectors.

    All other parameters, such as embeddings, norms, biases and the head, are trained as usual.

    Args:
        kept: the share of the singular directions of each matrix that cannot change, in [0, 1).
            At least one of them can. 0 is full fine-tuning.

    Example:
        >>> from holdfast import OSFT, Recipe
        >>> Recipe(trainable=OSFT(kept=0.8)).name
        'osft'
    """

    checks: ClassVar[Checks] = {"kept": share_below_one}
    neutral: ClassVar[dict[str, Any] | None] = {"kept": 0.0}
    uses_base: ClassVar[bool] = True
    needs_pretrained_start: ClassVar[str] = "keeps directions of the pretrained weights"

    kept: float = 0.5

    @property
    def elementwise(self) -> bool:
        """False while it acts: a projection needs whole matrices, and ZeRO shards them."""
        return self.kept == 0

    def unfit(self, model: nn.Module, has_old_data: bool) -> str | None:
        if self.kept and has_adapters(model):
            return (
                "OSFT trains the weights of linear layers, but those of this model are frozen "
                "under adapters: merge the adapters first (merge_and_unload), or leave out OSFT"
            )
        return None

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"kept": SearchRange(0.1, 0.95, 0.5, log=False)}

    def cost(self, planned: Planned) -> Cost:
        """U₁ and V₁ of every matrix in float32: those of a square one are the largest."""
        return Cost(copies=2 * self.kept * 4 / planned.value)

    def prepare(self, run: Run) -> nn.Module:
        """Decompose the matrices of all linear layers that are trained, except the head."""
        model = run.model
        if not self.kept:
            return model
        if reason := self.unfit(model, has_old_data=False):
            raise ValueError(reason)
        free = [*run.new, *head_parts(model)]
        weights = {f"{name}.weight" for name in linear_layers(model, free)}
        named = dict(model.named_parameters())
        trained = {n: named[n] for n in named if n in weights and named[n].requires_grad}
        found: dict[str, Subspace] = {}
        with progress_bar(len(trained), "decompose", shown=run.progress, unit="matrix") as bar:
            for name, p in trained.items():
                found[plain_name(name)] = Subspace.of(p, self.kept)
                bar.update(1)
        setattr(unwrapped(model), _SUBSPACES, Subspaces(found))
        return model

    def attach(self, run: Run) -> None:
        """Project gradients and weights in the step of the run's optimizer."""
        subspaces = getattr(unwrapped(run.model), _SUBSPACES, None)
        if subspaces is None or run.optimizer is None:
            return
        projection = Projection(run.model, subspaces)
        keep_hooks(run.optimizer)
        run.optimizer.register_step_pre_hook(torch.compiler.disable(projection.before_step))
        run.optimizer.register_step_post_hook(torch.compiler.disable(projection.after_step))

    def finish(self, model: nn.Module) -> nn.Module:
        vars(unwrapped(model)).pop(_SUBSPACES, None)
        return model


@dataclass
class Subspace:
    """The directions of a matrix that stay: U₁ of shape (m, k), Σ₁ and V₁ᵀ of shape (k, n)."""

    u: Tensor
    s: Tensor
    vt: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor, kept: float) -> "Subspace":
        """The directions of the largest singular values of a matrix, in float32 or float64.

        >>> Subspace.of(torch.diag(torch.tensor([1.0, 3.0, 2.0, 0.5])), kept=0.5).s.tolist()
        [3.0, 2.0]
        """
        dtype = wide(weight)
        u, s, vt = torch.linalg.svd(whole(weight).to(dtype), full_matrices=False)
        k = min(round(kept * len(s)), len(s) - 1)  # at least one direction is free
        return cls(u[:, :k].contiguous(), s[:k].clone(), vt[:k].contiguous())

    def to(self, device: torch.device) -> None:
        if self.u.device != device:  # a host has moved the model
            self.u, self.s, self.vt = (t.to(device) for t in (self.u, self.s, self.vt))

    def project(self, change: Tensor) -> Tensor:
        """(I − U₁U₁ᵀ) D (I − V₁V₁ᵀ).

        >>> matrix = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> Subspace.of(matrix, kept=0.5).project(torch.ones(2, 2)).abs().tolist()
        [[0.0, 0.0], [0.0, 1.0]]
        """
        change = change - self.u @ (self.u.T @ change)
        return change - (change @ self.vt.T) @ self.vt

    def restore(self, weight: Tensor) -> Tensor:
        """W* + (I − U₁U₁ᵀ)(W − W*)(I − V₁V₁ᵀ), without W*: U₁ᵀW* = Σ₁V₁ᵀ and W*V₁ = U₁Σ₁."""
        weight = weight - self.u @ (self.u.T @ weight - self.s[:, None] * self.vt)
        return weight - (weight @ self.vt.T - self.u * self.s) @ self.vt


class Subspaces(dict[str, Subspace]):
    """The subspaces of a model's matrices by name. Copies of the model share them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Subspaces":
        return self


class Projection:
    """Hooks of an optimizer's step. Parameters are found by name: hosts may replace them."""

    def __init__(self, model: nn.Module, subspaces: Subspaces) -> None:
        self.model, self.subspaces = model, subspaces

    @torch.no_grad()
    def before_step(self, *_: Any) -> None:
        """Project the gradients."""
        for _p, grad, subspace in self._trained():
            full = whole(grad)
            grad.copy_(like(subspace.project(full.to(subspace.u.dtype)).to(full.dtype), grad))

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Project the change of the weights since the start."""
        rows = self._trained()
        if only_makes_state(optimizer, [grad for _p, grad, _subspace in rows]):
            return
        for p, _grad, subspace in rows:
            full = whole(p)
            p.copy_(like(subspace.restore(full.to(subspace.u.dtype)).to(full.dtype), p))

    def _trained(self) -> list[tuple[Tensor, Tensor, Subspace]]:
        """The parameters that this step moves, and their gradients."""
        named: dict[str, Any] = {plain_name(n): p for n, p in self.model.named_parameters()}
        rows: list[tuple[Tensor, Tensor, Subspace]] = []
        for name, subspace in self.subspaces.items():
            p = named.get(name)
            if p is None or p.shape != (subspace.u.shape[0], subspace.vt.shape[1]):
                raise ValueError(
                    f"OSFT projects {name}, but the host has changed it or its shape: shard with "
                    "FSDP2, or use DistributedDataParallel"
                )
            if p.grad is not None:
                subspace.to(p.device)
                rows.append((p, p.grad, subspace))
        return rows
