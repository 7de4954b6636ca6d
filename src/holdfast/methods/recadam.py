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
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast import kernels
from holdfast._optim.anchored import AnchoredOptimizer
from holdfast._torch.checks import at_least_zero
from holdfast._torch.sharding import whole
from holdfast.anneal import Anneal, Constant, Linear, Sigmoid
from holdfast.methods._adam import check_adam_group, make_adam_state
from holdfast.methods._recadam import Row, Scalar, current_lambda, is_over, pull_rate
from holdfast.methods._recadam_group import GroupUpdate
from holdfast.reference import Reference

__all__ = ["RecAdam"]


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
            anchor gets plain Adam. Anchors stay where they are. In page-locked memory of the host
            (:meth:`Reference.pinned <holdfast.Reference.pinned>`) they cost no memory on the
            GPU, and come over while the backward pass runs.
        importance: F, how much each coordinate matters, with a mean of 1 and found like the
            anchors: ``fisher_importance`` or ``mas_importance`` of :mod:`holdfast.optim`, with
            ``normalize=True``. Parameters without one have F = 1. It is not in checkpoints.
        foreach, fused: which implementation to use. On a GPU None is one fused kernel (where
            Triton is installed), on a CPU torch's own choice; ``fused=True`` is one pass over
            memory on both.
        state_dtype: dtype of Adam's moments; None is the parameter's own. With another dtype the
            arithmetic is done in the wider one of the two and rounded once. ``"8bit"`` takes a
            byte for each, with a scale for every 256: by a kernel on a GPU, slowly elsewhere. A
            state that is loaded keeps the dtype it was saved in, unless one is given here.
        stochastic_rounding: round bfloat16 parameters up or down with the odds of being nearer,
            so that small updates are not lost; the same at each run.
        release: let the anchors go once the pull is lost in rounding, for good: :meth:`distance`
            is not known from then on. Their memory is free if nobody else holds them. Not under
            ``capturable``, nor with an annealing of your own, whose λ may fall again.
        maximize: ascend instead of descend.
        capturable: keep all counts and rates on the device, for CUDA graphs. With ``fused=True``
            a step under a GradScaler does not wait for the GPU either.

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
        state_dtype: torch.dtype | Literal["8bit"] | None = None,
        stochastic_rounding: bool = False,
        release: bool = False,
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
            "stochastic_rounding": stochastic_rounding,
        }
        if not isinstance(release, bool):
            raise TypeError(f"release must be True or False, got {release!r}")
        self.release = release
        self._strongest: dict[int, float] = {}
        self._updates: dict[int, tuple[list[int], GroupUpdate]] = {}
        super().__init__(params, defaults, anchors, state_dtype, importance)
        self._warn_of_fast_pull(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; without a Reference its parameters are anchored at their values now."""
        super().add_param_group(param_group)
        if hasattr(self, "_anchors"):
            self._warn_of_fast_pull(self.param_groups[-1:])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch's GradScaler leaves it to the step to unscale gradients, or do nothing."""
        return all(
            group["fused"] and group["capturable"] and kernels.wanted(group, p.device)
            for group in self.param_groups
            for p in group["params"]
        )

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
        if not isinstance(group["stochastic_rounding"], bool):
            raise TypeError(
                f"stochastic_rounding must be True or False, got {group['stochastic_rounding']!r}"
            )
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

        if self._shard_anchors():
            self._forget_updates()
        moves = self._begin_update()
        scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        if moves and found_inf is not None:
            found_inf = (found_inf != 0).float()  # torch may have added up those of several devices
            self.param_groups[0]["updates"].sub_(found_inf.to(torch.int64))
        over = moves
        for number, group in enumerate(self.param_groups):
            lam = current_lambda(group)
            done = self._is_over(number, group, lam)
            update = self._update_of(number, group, pulled=not done)
            if moves:
                update(group, 1.0 if done else lam, scale, found_inf)
            stays = done and isinstance(group["anneal"], Sigmoid | Linear | Constant)
            over = over and (stays or not any(a is not None for a in self._anchors[number]))
        if over and self.release and any(a is not None for found in self._anchors for a in found):
            self._release()
        return loss

    def _update_of(self, number: int, group: dict[str, Any], *, pulled: bool) -> GroupUpdate:
        """How a group is updated: as at the last step if nothing was exchanged since then."""
        params = [p for p in group["params"] if p.grad is not None]
        states = [self._state_of(p, group) for p in params]
        key = [pulled, *map(id, params)]
        if not torch.compiler.is_compiling():  # a compiler knows no identity, and needs no memory
            key += [id(t) for state in states for t in state.values()]
            known, update = self._updates.get(number, (None, None))
            if update is not None and key == known and update.fits():
                return update
        found = zip(group["params"], self._anchors[number], self._weights[number], strict=True)
        others = {p: (a, w) for p, a, w in found} if pulled else {}
        rows = [
            Row(
                p, s["exp_avg"], s["exp_avg_sq"], s["step"], *others.get(p, (None, None)),
                s.get("exp_avg_scale"), s.get("exp_avg_sq_scale"),
            )
            for p, s in zip(params, states, strict=True)
        ]  # fmt: skip
        update = GroupUpdate(rows, group, number)
        if not torch.compiler.is_compiling():
            if number in self._updates:
                self._updates[number][1].let_go()
            self._updates[number] = key, update
        return update

    def _is_over(self, number: int, group: dict[str, Any], lam: Scalar) -> bool:
        """Whether the pull on a group is lost in rounding, and λ is 1 but for that."""
        if isinstance(lam, Tensor):
            return False
        if number not in self._strongest:
            found = [w for w in self._weights[number] if w is not None and w.numel()]
            weights = [float(whole(w.max())) for w in found]
            self._strongest[number] = max([1.0, *weights])
        # At the peak of the learning rate, which a scheduler keeps there.
        lr = max(float(group["lr"]), float(group.get("initial_lr", 0.0)))
        left = (1 - lam) * max(1.0, lr * group["gamma"] * self._strongest[number])
        narrow = not group["stochastic_rounding"]
        dtypes = (p.dtype if narrow else torch.float32 for p in group["params"])
        return is_over(left, dtypes)

    def _release(self) -> None:
        """Let go of the anchors, of which checkpoints have the fingerprint."""
        self._take_fingerprints()
        for found in (*self._anchors, *self._weights):
            found[:] = [None] * len(found)
        self._matcher = self._importances = None
        self._released = True
        self._forget_updates()

    def _forget_updates(self) -> None:
        for _, update in self._updates.values():
            update.let_go()
        self._updates.clear()

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            # The kernel's counts are on the device, where all of them are advanced at once.
            there = {"capturable": group["capturable"] or kernels.wanted(group, p.device)}
            make_adam_state(state, p, {**group, **there}, self.state_dtype or p.dtype)
        return state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; anchors that were fetched for a step that was not made are let go."""
        super().zero_grad(set_to_none)
        for _, update in self._updates.values():
            update.let_go()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state. Refuses, unchanged, a state of other pretrained weights."""
        super().load_state_dict(state_dict)
        self._forget_updates()  # they know the counts of steps

    def _check_saved_state(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Moments of 8 bits and others are not made of one another."""
        moments = [m["exp_avg"] for m in state.values() if isinstance(m.get("exp_avg"), Tensor)]
        saved = {moment.dtype == torch.uint8 for moment in moments}
        own = self.state_dtype == "8bit"
        if saved - {own}:
            what = ["not of 8 bits", "of 8 bits"]
            raise ValueError(
                f"the saved state has moments {what[not own]}, this optimizer has them "
                f"{what[own]}: make it with state_dtype={None if own else '8bit'!r}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "release": self.release}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("release", False)
        self._updates, self._strongest = {}, {}
        for group in self.param_groups:  # of a checkpoint that knew no such thing
            group.setdefault("stochastic_rounding", False)

    @torch.no_grad()
    def recall_state(self, *, distance: bool = False, group: int | None = None) -> dict[str, float]:
        """Where the recall stands, ready for a log.

        Args:
            distance: also measure ‖θ − θ*‖ over all anchored parameters (reads every weight).
            group: the group to report; None is the first that has anchors.

        Returns:
            ``updates`` so far; ``lam`` = λ and ``pull`` = c, the fraction of the way back to θ*
            (at F = 1), of the last update (before the first one: of the first one) at the current
            learning rate; and ``distance`` if asked for, NaN once the anchors were let go.
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
            state["distance"] = math.nan if self._released else self.distance()
        return state
