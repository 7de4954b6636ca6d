r"""RecAdam: Adam that recalls the pretrained weights while it learns the target task.

Chen et al., *Recall and Learn: Fine-tuning Deep Pretrained Language Models with Less
Forgetting*, EMNLP 2020, https://arxiv.org/abs/2004.12651.

The objective λ(t)·Loss_T + (1−λ(t))·½γ·Σ(θ−θ*)² is minimized with the quadratic term decoupled
from Adam's moments. With u = m̂/(√v̂+ε), bias-corrected Adam on the gradient of Loss_T alone:

    θ ← θ − lr·wd·θ
    θ ← θ − lr·λ·u
    θ ← θ − c·(θ − θ*)          c = min(1, lr·(1−λ)·γ·F)

The paper's Algorithm 1 prints the pull without the learning rate. Its released code, which
produced its results, multiplies the pull by the learning rate and pulls the weights after the
step. This implementation does the same. F is 1: the paper drops the Fisher information because the
pretraining data is not available. Pass ``importance=`` to use it.

:class:`RecAdam` is the optimizer, :func:`recadam` its update as a function, and
:class:`RecAdamUpdate` the settings in a recipe.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from holdfast import kernels
from holdfast._optim.anchored import AnchoredOptimizer, split_anchored
from holdfast._optim.backends import (
    Columns,
    cache_sized_parts,
    check_adam_group,
    make_adam_state,
    pack,
    pull,
    unpack,
)
from holdfast._optim.importance import measured
from holdfast._torch.checks import at_least_zero, flag
from holdfast._torch.layout import dense, local, whole
from holdfast.anneal import Anneal, Constant, Linear, Sigmoid
from holdfast.methods.adamw import AdamUpdate
from holdfast.methods.ewc import fisher_importance
from holdfast.methods.mas import mas_importance
from holdfast.reference import Reference
from holdfast.stages import MedianLoss, SearchRange, SearchSpace

if TYPE_CHECKING:
    from holdfast.run import Run

Scalar = float | Tensor


class RecAdam(AnchoredOptimizer):
    r"""Adam with a decoupled, annealed pull to the pretrained weights.

    Args:
        params: parameters, ``model.named_parameters()``, or groups of either. A group may set its
            own ``lr``, ``betas``, ``eps``, ``weight_decay``, ``gamma`` and ``anneal``, and
            ``anchored=False`` for plain Adam (a new head).
        lr: learning rate; a 0-dim tensor for ``capturable`` runs.
        betas, eps: coefficients and ε of Adam.
        weight_decay: decoupled decay toward 0, as in AdamW (whose default is 0.01, not 0).
        gamma: strength γ of the pull. Each update moves θ by the fraction lr·(1−λ)·γ of its way
            back to θ*; keep lr·γ ≤ 1 (the paper: 2e-5 · 5000 = 0.1). Warm-up and decay of the
            learning rate scale the pull too.
        anneal: λ(t), see :mod:`holdfast.anneal`. λ scales the learning as well: anchored weights
            hardly learn while it is near 0. The default, the paper's, reaches ½ at update 250. For
            a run of another length use ``Sigmoid.over(total_steps)``, in updates.
        anchors: the pretrained weights θ*. None anchors each parameter at its current value. A
            :class:`~holdfast.Reference` or a mapping from names to tensors anchors by name
            (prefixes such as ``bert.`` or ``module.`` are resolved); a parameter without an
            anchor gets plain Adam. Anchors stay on their device. Anchors in page-locked host memory
            (:meth:`Reference.pinned <holdfast.Reference.pinned>`) need no GPU memory; they are
            fetched while the backward pass runs.
        importance: F, the importance of each coordinate, with a mean of 1 and matched like the
            anchors: ``fisher_importance`` or ``mas_importance`` of :mod:`holdfast.optim`, with
            ``normalize=True``. Parameters without one have F = 1. Checkpoints do not contain it.
        foreach, fused: the implementation. None is one fused kernel on a GPU (if Triton is
            installed) and torch's own choice on a CPU; ``fused=True`` makes one pass over memory
            on both.
        state_dtype: dtype of Adam's moments; None is the parameter's. With another dtype the
            arithmetic is done in the wider of the two and rounded once. ``"8bit"`` takes one byte
            per value, with a scale per 256 values: by a kernel on a GPU, slowly elsewhere. A
            loaded state keeps its saved dtype, unless one is given here.
        stochastic_rounding: round bfloat16 parameters stochastically, without bias, so that small
            updates are not lost. The random bits are the same in each run.
        release: free the anchors permanently once the remaining pull is below rounding error.
            :meth:`distance` is unavailable afterwards. Their memory is freed if nothing else holds
            them. Has no effect with ``capturable`` or with an annealing of your own, whose λ may
            decrease again.
        maximize: ascend instead of descend.
        capturable: keep all counts and rates on the device, for CUDA graphs. With ``fused=True``
            a step under a GradScaler does not wait for the GPU either.

    Example:
        >>> import torch
        >>> from holdfast import RecAdam
        >>> from holdfast.anneal import Sigmoid
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = RecAdam(model.parameters(), lr=1e-3, gamma=100, anneal=Sigmoid(t0=50))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.recall_state()["updates"]
        1

    Checkpoints (``state_dict()``) contain a fingerprint of the anchors, not the anchors. To resume,
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
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "gamma": gamma, "anneal": anneal, "stochastic_rounding": stochastic_rounding,
            "foreach": foreach, "fused": fused, "maximize": maximize, "capturable": capturable,
        }  # fmt: skip
        self.release = flag("release", release)
        self._plans: dict[int, _Plan] = {}
        self._peaks: dict[int, float] = {}
        super().__init__(params, defaults, anchors, state_dtype, importance)
        self._warn_of_fast_pull(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; without a Reference its parameters are anchored at their current values."""
        super().add_param_group(param_group)
        if hasattr(self, "_anchors"):
            self._warn_of_fast_pull(self.param_groups[-1:])

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_adam_group(group)
        at_least_zero("gamma", group["gamma"])
        flag("stochastic_rounding", group["stochastic_rounding"])
        if not isinstance(group["anneal"], Anneal):
            raise TypeError(
                "anneal must be Sigmoid, Linear or Constant of holdfast.anneal, or an Anneal of "
                f"your own, got {group['anneal']!r}"
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

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch's GradScaler leaves unscaling and skipping to the step."""
        return all(
            group["fused"] and group["capturable"] and kernels.wanted(group, p.device)
            for group in self.param_groups
            for p in group["params"]
        )

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            # The kernel needs the counts on the device, where it advances all of them at once.
            on_device = group["capturable"] or kernels.wanted(group, p.device)
            settings = {**group, "capturable": on_device}
            make_adam_state(state, p, settings, self.state_dtype or p.dtype)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one update. Parameters without a gradient are skipped."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        if self._shard_anchors():
            self._discard_plans()
        moves = self._begin_update()
        scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        if moves and found_inf is not None:
            found_inf = (found_inf != 0).float()  # torch may have summed over several devices
            self.param_groups[0]["updates"].sub_(found_inf.to(torch.int64))
        over = moves
        for number, group in enumerate(self.param_groups):
            # A tensor where a Python number would be baked into the graph.
            on_device = group["capturable"] or torch.compiler.is_compiling()
            lam = group["anneal"](group["updates"] if on_device else int(group["updates"]))
            done = self._pull_is_over(number, group, lam)
            plan = self._plan(number, group, pulled=not done)
            if moves:
                plan.update(group, 1.0 if done else lam, scale, found_inf)
            stays = done and isinstance(group["anneal"], Sigmoid | Linear | Constant)
            over = over and (stays or not any(a is not None for a in self._anchors[number]))
        if over and self.release and any(a is not None for found in self._anchors for a in found):
            self._release_anchors()
            self._discard_plans()
        return loss

    def _pull_is_over(self, number: int, group: dict[str, Any], lam: Scalar) -> bool:
        """Whether the remaining pull on a group, and 1 − λ, are below rounding error."""
        if isinstance(lam, Tensor) or 1 - lam > 1e-3:  # no dtype is so coarse
            return False
        # The peak of the learning rate, which schedulers store.
        lr = max(float(group["lr"]), float(group.get("initial_lr", 0.0)))
        if number not in self._peaks:  # the largest importance, at least 1: read once
            found = [w for w in self._weights[number] if w is not None and w.numel()]
            self._peaks[number] = max([1.0, *(float(whole(w.max())) for w in found)])
        left: float = (1 - lam) * max(1.0, lr * group["gamma"] * self._peaks[number])
        narrow = not group["stochastic_rounding"]
        dtypes = (p.dtype if narrow else torch.float32 for p in group["params"])
        return left < min((torch.finfo(dtype).eps for dtype in dtypes), default=1.0) / 64

    def _plan(self, number: int, group: dict[str, Any], *, pulled: bool) -> _Plan:
        """How to update a group: the plan of the last step if no tensor was replaced since."""
        params = [p for p in group["params"] if p.grad is not None]
        states = [self._state_of(p, group) for p in params]
        if torch.compiler.is_compiling():  # identities are unknown, and the graph is the cache
            return _Plan.make(number, group, self._columns(number, params, states, pulled), [])
        choices = [group[name] for name in ("foreach", "fused", "stochastic_rounding")]
        key = [*choices, *_key(params, states, pulled, self._sharded)]
        plan = self._plans.get(number)
        if plan is None or plan.key != key:
            if plan is not None:
                plan.discard_fetched()
            columns = self._columns(number, params, states, pulled)
            plan = self._plans[number] = _Plan.make(number, group, columns, key)
        return plan

    def _columns(
        self, number: int, params: list[Tensor], states: list[dict[str, Tensor]], pulled: bool
    ) -> Columns:
        of_group = self.param_groups[number]["params"]
        pulls = zip(of_group, self._anchors[number], self._weights[number], strict=True)
        known = {p: (anchor, weight) for p, anchor, weight in pulls if pulled}
        found = [known.get(p, (None, None)) for p in params]
        return Columns(
            params,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["step"] for state in states],
            [anchor for anchor, _ in found],
            [weight for _, weight in found],
            [state.get("exp_avg_scale") for state in states],
            [state.get("exp_avg_sq_scale") for state in states],
        )

    def _discard_plans(self) -> None:
        for plan in self._plans.values():
            plan.discard_fetched()
        self._plans.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; also frees anchors that were fetched for a step that was not made."""
        super().zero_grad(set_to_none)
        for plan in self._plans.values():
            plan.discard_fetched()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state. A state with other anchors raises and changes nothing."""
        super().load_state_dict(state_dict)
        self._discard_plans()

    def _check_saved_state(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Raise if 8-bit and full-precision moments would have to be converted."""
        moments = [m["exp_avg"] for m in state.values() if isinstance(m.get("exp_avg"), Tensor)]
        saved = {moment.dtype == torch.uint8 for moment in moments}
        own = self.state_dtype == "8bit"
        if saved - {own}:
            kinds = ["full-precision", "8-bit"]
            raise ValueError(
                f"the saved state has {kinds[not own]} moments, this optimizer {kinds[own]} ones, "
                "and they cannot be converted into each other: make the optimizer with "
                f"state_dtype={None if own else '8bit'!r}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "release": self.release}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("release", False)
        self._plans, self._peaks = {}, {}
        for group in self.param_groups:  # older checkpoints lack it
            group.setdefault("stochastic_rounding", False)

    @torch.no_grad()
    def recall_state(self, *, distance: bool = False, group: int | None = None) -> dict[str, float]:
        """The progress of the recall, ready for a log.

        Args:
            distance: also measure ‖θ − θ*‖ over all anchored parameters (reads every weight).
            group: the group to report; None is the first that has anchors.

        Returns:
            ``updates`` so far; ``lam`` = λ and ``pull`` = c, the fraction of the way back to θ*
            (at F = 1), of the last update (before the first one: of the first one) at the current
            learning rate; and on request ``distance``, NaN once the anchors were released.
        """
        pulled = [any(a is not None for a in anchors) for anchors in self._anchors]
        if group is not None and not 0 <= group < len(pulled):
            raise ValueError(f"group must be from 0 to {len(pulled) - 1}, got {group}")
        if group is None:
            group = pulled.index(True) if any(pulled) else 0
        chosen = self.param_groups[group]
        updates = int(chosen["updates"])
        lam = chosen["anneal"](max(1, updates)) if pulled[group] else 1.0
        c = min(1.0, float(chosen["lr"]) * (1 - lam) * chosen["gamma"])
        state = {"updates": updates, "lam": lam, "pull": c}
        if distance:
            state["distance"] = math.nan if self._released else self.distance()
        return state


# --- The plan of a group -------------------------------------------------------------------------


def _key(
    params: list[Tensor], states: list[dict[str, Tensor]], pulled: bool, sharded: bool
) -> list[Any]:
    """What a plan depends on: which tensors, where their memory is, and their step count.

    Hosts replace tensors (FSDP2), or move their memory and change their dtype in place
    (``Module.to``, DeepSpeed). The last entry is the version of the first step count: the kernel
    keeps the counts as Python numbers, so setting them from outside must be noticed.
    """
    held = [t for state in states for t in state.values()]
    tensors = [
        *params, *[state["exp_avg"] for state in states], *[state["exp_avg_sq"] for state in states]
    ]  # fmt: skip
    if sharded:
        tensors = [local(t) for t in tensors]
    version = states[0]["step"]._version if states else 0
    return [pulled, *map(id, params), *map(id, held), *map(Tensor.data_ptr, tensors), version]


@dataclass
class _Plan:
    """How the parameters of a group that have gradients are updated.

    Attributes:
        number: of the group, part of the seed for random rounding.
        columns: all their tensors.
        kernel: the Triton kernel, and ``taken``, the parameters that it updates.
        together: the parameters that one call of :func:`recadam` updates each, by torch.
        packed: parameters with 8-bit moments or stochastic rounding. Unpacked, one takes four
            times the memory, so they are updated one at a time.
        amp: whether torch's fused AdamW takes all of them, GradScaler included.
        key: see :func:`_key`.
    """

    number: int
    columns: Columns
    key: list[Any]
    kernel: Any = None
    taken: list[int] = field(default_factory=list)
    together: list[tuple[list[int], Columns]] = field(default_factory=list)
    packed: list[tuple[int, Columns]] = field(default_factory=list)
    amp: bool = False

    @classmethod
    def make(cls, number: int, group: dict[str, Any], columns: Columns, key: list[Any]) -> _Plan:
        """Decide which parameters the kernel updates, and which torch updates together."""
        plan = cls(number, columns, key)
        everyone = range(len(columns.params))
        rounds = group["stochastic_rounding"]
        packed = {
            i
            for i in everyone
            if columns.exp_avg_scales[i] is not None
            or (rounds and columns.params[i].dtype == torch.bfloat16)
        }
        # Without a pull, fused=True is torch's own kernel: AdamW to the last bit.
        plan.amp = bool(group["fused"]) and all(
            columns.anchors[i] is None
            and columns.params[i].dtype == columns.exp_avgs[i].dtype
            and i not in packed
            for i in everyone
        )
        devices = {p.device for p in columns.params}
        if not plan.amp and any(kernels.wanted(group, device) for device in devices):
            from holdfast.kernels.recadam import Operands, RecAdamStep, takes  # needs Triton

            rows = [Operands(*tensors) for tensors in zip(*columns, strict=True)]
            plan.taken = [i for i in everyone if takes(rows[i])]
            if plan.taken:
                plan.kernel = RecAdamStep([rows[i] for i in plan.taken])
        left = sorted(set(everyone) - set(plan.taken))
        plan.packed = [(i, columns.take([i])) for i in left if i in packed]
        anchored = [i for i in left if i not in packed and columns.anchors[i] is not None]
        free = [i for i in left if i not in packed and columns.anchors[i] is None]
        plan.together = [(some, columns.take(some)) for some in (anchored, free) if some]
        return plan

    def update(
        self,
        group: dict[str, Any],
        lam: Scalar,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Make one update with the current gradients."""
        grads = [cast(Tensor, p.grad) for p in self.columns.params]
        settings = {name: group[name] for name in ("lr", "gamma", "weight_decay", "eps")}
        settings["maximize"] = group["maximize"]
        settings["beta1"], settings["beta2"] = group["betas"]
        count: Tensor = group["updates"]
        on_device = count.device.type != "cpu"
        seed = 15485863 * self.number
        if self.kernel is not None:
            self.kernel(
                grads if len(self.taken) == len(grads) else [grads[i] for i in self.taken],
                lam=lam, grad_scale=grad_scale, found_inf=found_inf,
                stochastic=group["stochastic_rounding"],
                seed=(seed if on_device else seed + 7919 * int(count)) % 2**30,
                updates=count if on_device else None, **settings,
            )  # fmt: skip
        amp = {"grad_scale": grad_scale, "found_inf": found_inf} if self.amp else {}
        left = [columns.params[0].dtype for _, columns in (*self.together, *self.packed)]
        if left and found_inf is not None and not amp:
            raise RuntimeError(
                f"a parameter of {left[0]} cannot be updated under a GradScaler with fused=True "
                "and capturable=True: leave out one of them"
            )
        settings |= {name: group[name] for name in ("foreach", "fused", "capturable")} | amp
        for some, columns in self.together:
            _by_torch(columns, [grads[i] for i in some], lam, settings)
        for i, columns in self.packed:
            wide = unpack(columns)
            _by_torch(wide, [grads[i].to(wide.params[0].dtype)], lam, settings)
            pack(
                wide, columns, stochastic=group["stochastic_rounding"],
                seed=seed + 7919 * (count if on_device else int(count)), number=i,
            )  # fmt: skip
        if self.key and grads:
            self.key[-1] = self.columns.steps[0]._version

    def discard_fetched(self) -> None:
        """Free anchors that were fetched for an update that is not made."""
        if self.kernel is not None:
            self.kernel.discard_fetched()


def _by_torch(
    columns: Columns, grads: list[Tensor], lam: Scalar, settings: Mapping[str, Any]
) -> None:
    """Update parameters that all have an anchor, or of which none has one."""
    pulled = columns.anchors[0] is not None
    recadam(
        columns.params, grads, columns.exp_avgs, columns.exp_avg_sqs, columns.steps,
        cast(list[Tensor], columns.anchors) if pulled else None, columns.weights,
        lam=lam if pulled else 1.0, **settings,
    )  # fmt: skip


# --- The update as a function --------------------------------------------------------------------


def recadam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    anchors: Sequence[Tensor] | None,
    importance: Sequence[Tensor | None] | None = None,
    *,
    lr: Scalar,
    lam: Scalar,
    gamma: float,
    weight_decay: float,
    foreach: bool | None,
    fused: bool | None,
    capturable: bool,
    **adam: Any,
) -> None:
    """Make one RecAdam update of a list of tensors, in place.

    Adam's part is torch's own implementation with the learning rate lr·λ, so a neutral pull gives
    torch's AdamW to the last bit. ``anchors=None`` is no pull. ``importance=None`` is 1 everywhere,
    as is a None in it. ``adam`` are Adam's other options (beta1, beta2, eps, maximize).
    """
    if any(p.dtype != m.dtype for p, m in zip(params, exp_avgs, strict=True)):
        # In the wider dtype of parameter and moments, rounded once at the end.
        wide = [
            torch.promote_types(p.dtype, m.dtype) for p, m in zip(params, exp_avgs, strict=True)
        ]
        theta, g, m, v = (
            [t.to(dtype) for t, dtype in zip(tensors, wide, strict=True)]
            for tensors in (params, grads, exp_avgs, exp_avg_sqs)
        )
        foreach, fused = foreach or fused, False  # torch's fused kernel needs one dtype for all
    else:
        theta, g, m, v = list(params), list(grads), list(exp_avgs), list(exp_avg_sqs)
    if fused and torch.compiler.is_compiling():
        foreach, fused = True, False  # a compiled step cannot contain it: the compiler fuses
    if fused and theta[0].device.type == "cpu":  # torch's kernel assumes equal strides there
        g = [dense(grad, p) for grad, p in zip(g, theta, strict=True)]

    lr_step, decay = lr * lam, _decay_first(theta, lr, lam, weight_decay)
    c = lr * (1 - lam) * gamma
    if isinstance(lr_step, Tensor):
        # torch divides by a tensor learning rate: 0/0 where it is 0 and so is a second moment.
        # Its fused kernel reads a float32. A compiled step has tensor rates on any device, for
        # which torch requires the flag.
        lr_step = lr_step.clamp(min=1e-30)
        lr_step = lr_step.float() if fused else lr_step
        capturable = capturable or torch.compiler.is_compiling()
    steps, weights = list(state_steps), importance or [None] * len(theta)
    if anchors is not None and fused and _in_parts(theta, g, lr_step, c):
        # torch's fused implementation, then the pull on each part while it is in the cache.
        torch._foreach_add_(steps, 1)
        adam |= {"lr": lr_step, "weight_decay": decay, "amsgrad": False}
        for p, grad, exp_avg, exp_avg_sq, step, anchor, weight in cache_sized_parts(
            [theta, g, m, v, steps, anchors, weights]
        ):
            torch._fused_adamw_(p, grad, exp_avg, exp_avg_sq, (), step, **adam)
            pull(p, anchor, weight, c, foreach=True)
    else:
        adam |= {"foreach": foreach, "fused": fused, "capturable": capturable, "amsgrad": False}
        adamw(theta, g, m, v, [], steps, lr=lr_step, weight_decay=decay, **adam)
        if anchors is not None:
            # On the CPU a foreach operation is the same loop, with more memory in use.
            together = (fused or foreach is not False) and theta[0].device.type != "cpu"
            pull(theta, anchors, weights, c, foreach=together)

    narrow = [*params, *exp_avgs, *exp_avg_sqs]
    if any(a is not b for a, b in zip(narrow, theta + m + v, strict=True)):
        torch._foreach_copy_(narrow, theta + m + v)


def _in_parts(theta: list[Tensor], grads: list[Tensor], lr: Scalar, c: Scalar) -> bool:
    """Whether to update part by part: on a CPU, in one dtype, with a pull."""
    first = theta[0]
    if first.device.type != "cpu" or isinstance(lr, Tensor) or isinstance(c, Tensor) or c == 0:
        return False
    return all(t.dtype == first.dtype and t.device == first.device for t in (*theta, *grads))


def _decay_first(theta: list[Tensor], lr: Scalar, lam: Scalar, weight_decay: float) -> float:
    """θ ← θ − lr·wd·θ, here or in Adam: returns the weight decay to pass to Adam.

    Adam gets the learning rate lr·λ and decays by lr·λ·(wd/λ). If λ is too small to divide by, or
    is a tensor, the weights are decayed here.
    """
    if weight_decay == 0 or not (isinstance(lam, Tensor) or lam < 1e-6):
        return weight_decay / cast(float, lam) if weight_decay else 0.0
    torch._foreach_mul_(theta, 1 - lr * weight_decay)
    return 0.0


# --- The settings in a recipe --------------------------------------------------------------------

_PULL = 0.1  # lr·γ of the paper


@dataclass(frozen=True)
class RecAdamUpdate(AdamUpdate):
    """The settings of :class:`RecAdam` in a recipe, independent of learning rate and run length.

    Args:
        lr, weight_decay, layer_decay: as in :class:`~holdfast.stages.Update`. With a layer
            decay, lower layers are pulled more slowly, as they learn more slowly.
        betas, eps: coefficients and ε of Adam.
        pull: lr·γ at the peak learning rate: the fraction of the way back to θ* per update while λ
            is near 0. None is 0.1, as in the paper, unless ``gamma`` is given; 0 is no pull.
        gamma: γ itself, instead of ``pull``.
        t0: when λ reaches ½, as a fraction of the run.
        width: 1/k, the width of the shift from recalling to learning, as a fraction of the run.
        anneal: λ(t) itself, in updates, instead of ``t0`` and ``width``.
        importance: weight the pull on each coordinate by its Fisher information (``"fisher"``) or
            by :func:`~holdfast.optim.mas_importance` (``"mas"``), measured on 1000 samples of the
            training data at θ* and scaled to a mean of 1 over the pulled parameters. None pulls on
            all coordinates alike.
        eight_bit: store Adam's moments in 8 bits. With pretrained weights in half precision,
            RecAdam then needs less memory than plain AdamW in float32.

    Example:
        >>> from holdfast import RecAdamUpdate
        >>> RecAdamUpdate(lr=2e-5, t0=0.3).gamma_at(2e-5)
        5000.0
    """

    neutral: ClassVar[dict[str, Any] | None] = {"pull": 0.0, "anneal": Constant(1.0)}
    needs_reference: ClassVar[bool] = True
    plotted: ClassVar[tuple[str, ...]] = ("lam",)

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
                f"pull={self.pull!r} and gamma={self.gamma!r} set the same thing (gamma = pull / "
                "lr): give one of them and leave the other None"
            )
        for name in ("pull", "gamma"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, at_least_zero(name, getattr(self, name)))
        Sigmoid.over(1, t0=self.t0, width=self.width)  # checks them
        if self.anneal is not None and not isinstance(self.anneal, Anneal):
            raise TypeError(f"anneal must be an annealing of holdfast.anneal, got {self.anneal!r}")
        if self.importance not in (None, "fisher", "mas"):
            raise ValueError(f"importance must be None, 'fisher' or 'mas', got {self.importance!r}")
        flag("eight_bit", self.eight_bit)

    @property
    def pulls(self) -> bool:
        """False if the settings leave no pull."""
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
        """F at θ*, with a mean of 1, if the pull is weighted."""
        if self.importance is None or not self.pulls:
            return None
        if self.importance == "fisher":
            return measured(run, True, fisher_importance, task=run.task, samples=1000)
        return measured(run, True, mas_importance, samples=1000)

    def optimizer(self, groups: list[dict[str, Any]], run: Run, total_updates: int) -> Optimizer:
        """RecAdam over the groups; parameters without an anchor (a new head) are not pulled."""
        if run.anchors is None:
            raise ValueError("RecAdam pulls to the pretrained weights, but the run has none")
        return RecAdam(
            split_anchored(groups, run.anchors),
            lr=run.lr,
            betas=self.betas,
            eps=self.eps,
            gamma=self.gamma_at(run.lr),
            anneal=self.anneal or Sigmoid.over(total_updates, t0=self.t0, width=self.width),
            anchors=run.anchors,
            importance=run.importance[self],
            state_dtype="8bit" if self.eight_bit else None,
        )
