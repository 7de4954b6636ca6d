r"""RecAdam: Adam that recalls the pretrained weights while it learns the target task.

Chen et al., *Recall and Learn: Fine-tuning Deep Pretrained Language Models with Less
Forgetting*, EMNLP 2020, https://arxiv.org/abs/2004.12651.

The objective λ(t)·Loss_T + (1−λ(t))·½γ·Σ(θ−θ*)² is minimised with the quadratic term decoupled
from Adam's moments. With u = m̂/(√v̂+ε), bias-corrected Adam on the gradient of Loss_T alone:

    θ ← θ − lr·wd·θ
    θ ← θ − lr·λ·u
    θ ← θ − c·(θ − θ*)          c = min(1, lr·(1−λ)·γ·F)

The paper's Algorithm 1 prints the pull without the learning rate; its released code, which made
its results, multiplies by it and pulls the weights after the step. That is the rule here. F is 1:
the paper drops the Fisher information for want of data. It can be given as ``importance=``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from holdfast._checks import at_least_zero
from holdfast.anneal import Anneal, Constant, Sigmoid
from holdfast.optim._adam import AdamUpdate, check_adam_group, make_adam_state
from holdfast.optim._anchored import AnchoredOptimizer
from holdfast.optim._matching import part_anchored
from holdfast.optim._recadam import Row, current_lambda, is_over, pull_rate, recadam, wants_kernel
from holdfast.optim.ewc import EWC
from holdfast.optim.mas import MAS
from holdfast.reference import Reference

if TYPE_CHECKING:
    from holdfast.run import Run

__all__ = ["RecAdam", "RecAdamUpdate"]

_OPTIONS = (
    "lr", "gamma", "eps", "weight_decay", "maximize", "foreach", "fused", "capturable"
)  # fmt: skip


class RecAdam(AnchoredOptimizer):
    r"""Adam with a decoupled, annealed pull to the pretrained weights.

    Args:
        params: parameters, ``model.named_parameters()``, or groups of either. A group may set its
            own ``lr``, ``betas``, ``eps``, ``weight_decay``, ``gamma`` and ``anneal``, and
            ``anchored=False`` for plain Adam (a new head).
        lr: learning rate; a 0-dim tensor for ``capturable`` runs.
        betas, eps: Adam's.
        weight_decay: decoupled decay towards 0, as in AdamW (whose default is 0.01, not 0).
        gamma: strength γ of the pull. Each update moves θ by the fraction lr·(1−λ)·γ of its way
            back to θ*; keep lr·γ ≤ 1 (the paper: 2e-5 · 5000 = 0.1). Warm-up and decay of the
            learning rate scale the pull too, whatever λ does.
        anneal: λ(t), see :mod:`holdfast.anneal`. λ scales the learning as well: while it is near 0
            anchored weights hardly learn. The default, the paper's, reaches ½ at update 250; for
            a run of another length take ``Sigmoid.over(total_steps)``, in updates.
        anchors: the pretrained weights θ*. None anchors each parameter at its value now. A
            :class:`~holdfast.Reference` or a mapping from names to tensors anchors by name
            (prefixes such as ``bert.`` or ``module.`` are resolved); a parameter without an
            anchor gets plain Adam. Anchors stay where they are: on another device they are
            copied over for each step.
        importance: F, how much each coordinate matters, with a mean of 1 and found like the
            anchors: ``fisher_importance`` or ``mas_importance`` of :mod:`holdfast.optim`, with
            ``normalize=True``. Parameters without one have F = 1. It is not in checkpoints.
        foreach, fused: which of torch's implementations to use; None is torch's own choice.
        state_dtype: dtype of Adam's moments; None is the parameter's own. With another dtype the
            arithmetic is done in the wider one of the two and rounded once.
        maximize: ascend instead of descend.
        capturable: keep all counts and rates on the device, for CUDA graphs.

    Example:
        >>> import torch
        >>> from holdfast import RecAdam, Sigmoid
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = RecAdam(model.parameters(), lr=1e-3, gamma=100, anneal=Sigmoid(t0=50))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.recall_state()["updates"]
        1

    Checkpoints (``state_dict()``) carry a fingerprint of the anchors, not the anchors: to go on,
    make the optimizer as before, with the *pretrained* weights, and load the state into it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        gamma: float = 5000.0,
        anneal: Anneal = Sigmoid(k=0.1, t0=250),  # noqa: B008 (frozen)
        anchors: Reference | Mapping[str, Tensor] | None = None,
        importance: Reference | Mapping[str, Tensor] | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "gamma": gamma,
            "anneal": anneal,
            "foreach": foreach,
            "fused": fused,
            "maximize": maximize,
            "capturable": capturable,
        }
        self._kernels: dict[tuple[int, bool], Any] = {}
        super().__init__(params, defaults, anchors, state_dtype, importance)
        self._warn_of_fast_pull(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; without a Reference its parameters are anchored at their values now."""
        super().add_param_group(param_group)
        if hasattr(self, "_anchors"):
            self._warn_of_fast_pull(self.param_groups[-1:])

    def _warn_of_fast_pull(self, groups: list[dict[str, Any]]) -> None:
        pulled = [g for g in groups if g["anchored"] and g["anneal"] != Constant(1.0)]
        fastest = max((float(g["lr"]) * g["gamma"] for g in pulled), default=0.0)
        if fastest > 1:
            warnings.warn(
                f"lr·gamma = {fastest:g} is above 1: the pull is clamped, and while λ is near 0 "
                "every update puts the weights back onto the anchors. The paper has "
                "lr·gamma = 0.1: set gamma = 0.1 / lr for that.",
                stacklevel=3,
            )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_adam_group(group)
        at_least_zero("gamma", group["gamma"])
        if not isinstance(group["anneal"], Anneal):
            raise TypeError(
                "anneal must be one of holdfast.anneal's Sigmoid, Linear and Constant, or an "
                f"Anneal of your own, got {group['anneal']!r}"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one update. Parameters whose gradient is None are left alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        moves = self._begin_update()
        for number, (group, anchors, weights) in enumerate(
            zip(self.param_groups, self._anchors, self._weights, strict=True)
        ):
            rows = [
                Row(p, cast(Tensor, p.grad), *self._state_of(p, group), a, weight)
                for p, a, weight in zip(group["params"], anchors, weights, strict=True)
                if p.grad is not None
            ]
            if not moves:
                continue
            lam = current_lambda(group)
            for pulled in (True, False):
                part = [row for row in rows if (row.anchor is not None) == pulled]
                if pulled and part and is_over(lam, part[0].p.dtype):
                    part = [row._replace(anchor=None, weight=None) for row in part]
                rest = self._by_kernel((number, pulled), part, group, lam if pulled else 1.0)
                if rest:
                    recadam(
                        [row.p for row in rest],
                        [row.grad for row in rest],
                        [row.m for row in rest],
                        [row.v for row in rest],
                        [row.step for row in rest],
                        [cast(Tensor, row.anchor) for row in rest] if rest[0].anchor is not None
                        else None,
                        [row.weight for row in rest],
                        lam=lam if pulled else 1.0,
                        beta1=group["betas"][0],
                        beta2=group["betas"][1],
                        **{name: group[name] for name in _OPTIONS},
                    )  # fmt: skip
        return loss

    def _by_kernel(
        self, part: tuple[int, bool], rows: list[Row], group: dict[str, Any], lam: float | Tensor
    ) -> list[Row]:
        """Update what the kernel takes; returns the rest."""
        if not rows or not wants_kernel(group, rows[0].p.device):
            return rows
        from holdfast.kernels.recadam_step import Rates, RecAdamStep, takes

        taken = [row for row in rows if takes(row)]
        if taken:
            step = self._kernels.setdefault(part, RecAdamStep())
            beta1, beta2 = group["betas"]
            options = {n: group[n] for n in ("lr", "gamma", "weight_decay", "eps", "maximize")}
            step(taken, Rates(lam=lam, beta1=beta1, beta2=beta2, **options))
        return [row for row in rows if not takes(row)] if len(taken) < len(rows) else []

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            make_adam_state(state, p, group, self.state_dtype or p.dtype)
        return state["exp_avg"], state["exp_avg_sq"], state["step"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state. Refuses, unchanged, a state of other pretrained weights."""
        super().load_state_dict(state_dict)
        self._kernels.clear()  # they know the counts of steps

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kernels = {}

    @torch.no_grad()
    def recall_state(self, *, distance: bool = False, group: int | None = None) -> dict[str, float]:
        """Where the recall stands, ready for a log.

        Args:
            distance: also measure ‖θ − θ*‖ over all anchored parameters (reads every weight).
            group: the group to report; None is the first that has anchors.

        Returns:
            ``updates`` so far; ``lam`` = λ and ``pull`` = c, the fraction of the way back to θ*
            (at F = 1), of the last update (before the first one: of the first one) at the current
            learning rate; and ``distance`` if asked for.
        """
        pulled = [any(a is not None for a in anchors) for anchors in self._anchors]
        if group is not None and not 0 <= group < len(pulled):
            raise ValueError(f"there are {len(pulled)} groups, no group {group}")
        if group is None:
            group = pulled.index(True) if any(pulled) else 0
        chosen = self.param_groups[group]
        updates = int(chosen["updates"])
        lam = chosen["anneal"](max(1, updates)) if pulled[group] else 1.0
        state = {
            "updates": updates,
            "lam": lam,
            "pull": float(pull_rate(float(chosen["lr"]), lam, chosen["gamma"])),
        }
        if distance:
            state["distance"] = self.distance()
        return state


@dataclass(frozen=True)
class RecAdamUpdate(AdamUpdate):
    """:class:`RecAdam` in a recipe, laid out over the run: no setting depends on lr or length.

    Args:
        lr, weight_decay, layer_decay: as in :class:`~holdfast.stages.Update`. Under a layer decay
            lower layers are pulled more slowly, as they learn more slowly.
        betas, eps: Adam's.
        pull: lr·γ at the peak learning rate, the fraction of the way back to θ* that an update
            goes while λ is near 0. The paper and every good run since have 0.1; 0 is no pull.
        gamma: γ itself, instead of ``pull``.
        t0: when λ reaches ½, as a fraction of the run.
        width: 1/k, the width of the shift from recalling to learning, as a fraction of the run.
        anneal: λ(t) itself, in updates, instead of ``t0`` and ``width``.
        importance: weigh the pull on each coordinate as EWC (``"fisher"``) or MAS (``"mas"``) do
            by default: from 1000 samples of the training data at θ*, scaled to a mean of 1 over
            what is pulled. None pulls on all alike.

    Example:
        >>> from holdfast.optim import RecAdamUpdate
        >>> RecAdamUpdate(lr=2e-5, t0=0.3).pull
        0.1
    """

    neutral: ClassVar[dict[str, Any] | None] = {"pull": 0.0, "anneal": Constant(1.0)}
    needs_reference: ClassVar[bool] = True

    pull: float = 0.1
    gamma: float | None = None
    t0: float = 0.25
    width: float = 0.02
    anneal: Anneal | None = None
    importance: Literal["fisher", "mas"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pull", at_least_zero("pull", self.pull))
        if self.gamma is not None:
            object.__setattr__(self, "gamma", at_least_zero("gamma", self.gamma))
            if self.pull != RecAdamUpdate.pull:
                raise ValueError(
                    f"pull={self.pull:g} and gamma={self.gamma:g} say the same thing (gamma = "
                    "pull / lr): give one of them"
                )
        Sigmoid.over(1, t0=self.t0, width=self.width)  # checks them
        if self.anneal is not None and not isinstance(self.anneal, Anneal):
            raise TypeError(f"anneal must be one of holdfast.anneal's, got {self.anneal!r}")
        if self.importance not in (None, "fisher", "mas"):
            raise ValueError(f"importance must be None, 'fisher' or 'mas', got {self.importance!r}")

    @property
    def pulls(self) -> bool:
        """Unless its settings leave nothing of the pull."""
        strength = self.pull if self.gamma is None else self.gamma
        return strength > 0 and self.anneal != Constant(1.0)

    def measure_importance(self, run: Run) -> Reference | None:
        """F at θ*, with a mean of 1, where the pull is weighted."""
        measure = {"fisher": EWC(), "mas": MAS(), None: None}[self.importance]
        return measure.measure_importance(run) if measure and (self.gamma or self.pull) else None

    def optimizer(self, groups: list[dict[str, Any]], run: Run, total_updates: int) -> Optimizer:
        """RecAdam over the groups; what has no anchor (a new head, LoRA's A) is not pulled."""
        if run.anchors is None:
            raise ValueError("RecAdam pulls to the pretrained weights, but the run has none")
        gamma = self.pull / (run.lr or math.inf) if self.gamma is None else self.gamma
        return RecAdam(
            part_anchored(groups, run.anchors),
            lr=run.lr,
            betas=self.betas,
            eps=self.eps,
            gamma=gamma,
            anneal=self.anneal or Sigmoid.over(total_updates, t0=self.t0, width=self.width),
            anchors=run.anchors,
            importance=run.importance[self],
        )
