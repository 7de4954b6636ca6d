r"""RecAdam: Adam that recalls the pretrained weights while it learns the target task.

Chen et al., *Recall and Learn: Fine-tuning Deep Pretrained Language Models with Less
Forgetting*, EMNLP 2020, https://arxiv.org/abs/2004.12651.

The objective λ(t)·Loss_T + (1−λ(t))·½γ·Σ(θ−θ*)² is minimized with the quadratic term decoupled
from Adam's moments. With u = m̂/(√v̂+ε), bias-corrected Adam on the gradient of Loss_T alone:

    θ ← θ − lr·wd·θ
    θ ← θ − lr·λ·u
    θ ← θ − c·(θ − θ*)          c = min(1, lr·(1−λ)·γ·F)

In the paper's Algorithm 1, the pull is not multiplied by the learning rate. In its released code,
which produced its results, the pull is multiplied by it and follows the step. This implementation
does the same. F is 1: the paper drops the Fisher information because the
pretraining data is not available. Pass ``importance=`` to use it.

:class:`RecAdam` is the optimizer, :func:`recadam` its update as a function, and
:class:`RecAdamUpdate` the settings in a recipe.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from holdfast import kernels
from holdfast._optim import backends
from holdfast._optim.anchors import Anchors, labels, split_anchored
from holdfast._optim.backends import Columns
from holdfast._optim.importance import measured, tokens_read
from holdfast._torch.checks import at_least_zero, flag, named_settings, one_of
from holdfast._torch.layout import all_strided, any_sharded, dense, local, same_objects, whole
from holdfast._torch.names import shorten
from holdfast.anneal import Anneal, Constant, Linear, Sigmoid, check_anneal
from holdfast.kernels import recadam_cpu
from holdfast.methods.adamw import AdamUpdate
from holdfast.methods.ewc import fisher_importance
from holdfast.methods.mas import mas_importance
from holdfast.reference import Reference, distance
from holdfast.stages import (
    IMPORTANCE_BYTES,
    Checks,
    Cost,
    MedianLoss,
    Planned,
    Run,
    SearchRange,
    SearchSpace,
)

Scalar = float | Tensor

# Refuses to capture a step into a CUDA graph unless it is capturable; torch 2.6 has another name.
_check_capture: Callable[[Optimizer], None] = getattr(
    Optimizer,
    "_accelerator_graph_capture_health_check",
    getattr(Optimizer, "_cuda_graph_capture_health_check", lambda _: None),
)
_STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class RecAdam(Optimizer):
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
        anchors: the pretrained weights θ*. If None, each parameter is anchored at its current
            value. A :class:`~holdfast.Reference` or a mapping from names to tensors is matched by
            name, without prefixes such as ``bert.`` or ``module.``; a parameter without an anchor
            gets plain Adam. Anchors stay on their device. Anchors in page-locked CPU memory
            (:meth:`Reference.pinned <holdfast.Reference.pinned>`) need no GPU memory; they are
            fetched while the backward pass runs.
        importance: F, the importance of each coordinate, with mean 1, matched like the anchors:
            ``fisher_importance`` or ``mas_importance`` of :mod:`holdfast.optim`, with
            ``normalize=True``. If None, the pull is equal for all coordinates. Parameters that it
            does not contain have F = 1. Checkpoints do not contain it.
        foreach, fused: the implementation. If None, one fused kernel is used on a GPU with Triton,
            and torch's default on a CPU. ``fused=True`` makes one pass over memory on both. On a
            CPU that needs a C compiler; without one, the weights are read twice.
        state_dtype: dtype of Adam's moments. If None, it is that of the parameter; otherwise, the
            wider of the two is used for the arithmetic. ``"8bit"`` takes one byte per value, with
            a scale per 256 values; it needs a GPU to be fast. A loaded state keeps its saved dtype,
            unless one is given here.
        stochastic_rounding: round bfloat16 parameters stochastically, without bias, so that small
            updates are not lost. The random bits are the same in each run.
        release: free the anchors once the remaining pull is below rounding error. Their memory is
            released unless other code holds a reference to them. Afterwards, :meth:`distance`
            raises an error. With the default annealing that is near update 450, with
            ``Sigmoid.over(n)`` never. Has no effect with ``capturable`` or with your own annealing,
            whose λ may decrease again.
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

    @named_settings
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
            "anchored": True,
        }  # fmt: skip
        if isinstance(params, nn.Module):
            raise TypeError("pass the parameters, model.named_parameters(), not the model")
        if state_dtype not in (None, "8bit", *_STATE_DTYPES):
            allowed = ", ".join(map(str, _STATE_DTYPES))
            raise ValueError(
                f"state_dtype must be None, '8bit' or one of {allowed}, got {state_dtype!r}"
            )
        self.release, self.state_dtype = flag("release", release), state_dtype
        self._plans: dict[int, _Plan] = {}
        self._peaks: dict[int, float] = {}
        super().__init__(params, defaults)
        self._anchors = Anchors("anchor_fingerprint", anchors, [importance])
        self._anchor_new_groups()
        self._share_update_count(0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; without a Reference its parameters are anchored at their current values."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
            if hasattr(self, "_anchors"):  # not while __init__ is still collecting the groups
                self._anchor_new_groups()
                self._share_update_count(self.param_groups[0]["updates"])
        except BaseException:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        backends.check_adam_group(group)
        at_least_zero("gamma", group["gamma"])
        flag("anchored", group["anchored"])
        flag("stochastic_rounding", group["stochastic_rounding"])
        check_anneal("anneal", group["anneal"])
        if unfit := [p.dtype for p in group["params"] if not p.is_floating_point()]:
            raise ValueError(f"RecAdam takes real floating-point parameters, got {unfit[0]}")
        names: list[str] = group.get("param_names", [])
        others = {n for g in self.param_groups[:-1] for n in g.get("param_names", ())}
        twice = [n for n, count in Counter(names).items() if count > 1 or n in others]
        if twice:
            raise ValueError(f"duplicate parameter names: {shorten(sorted(twice))}")

    def _anchor_new_groups(self) -> None:
        """Match the anchors of groups that have none yet. Changes nothing if it fails."""
        anchors = self._anchors
        new = self.param_groups[len(anchors.values) :]
        pulled = [group for group in new if group["anchored"]]
        if pulled and anchors.released:
            raise ValueError(
                "the anchors were released, so a new group cannot have any: add it with "
                "anchored=False, or make the optimizer with release=False"
            )
        rates = [float(g["lr"]) * g["gamma"] for g in pulled if g["anneal"] != Constant(1.0)]
        if (fastest := max(rates, default=0.0)) > 1:
            warnings.warn(
                f"lr·gamma = {fastest:g} is above 1: the pull is clamped, and while λ is near 0 "
                "every update puts the weights back onto the anchors. The paper has "
                "lr·gamma = 0.1: set gamma = 0.1 / lr for that.",
                stacklevel=4,
            )
        matched = anchors.match(pulled)
        free = [
            label
            for group, found in zip(pulled, matched[0], strict=True)
            for label, anchor in zip(labels(group, anchors.reference), found, strict=True)
            if anchor is None
        ]
        if free:
            warnings.warn(
                f"{len(free)} parameters have no anchor and are updated without a pull: "
                f"{', '.join(free)}",
                stacklevel=4,
            )
        for group in new:
            group[anchors.key] = None  # see Anchors.take_fingerprints
            none: list[Tensor | None] = [None] * len(group["params"])
            anchors.add([[of.pop(0) if group["anchored"] else [*none]] for of in matched])

    def _share_update_count(self, updates: int | Tensor) -> None:
        """One count of updates for all groups, so that late groups do not start over."""
        params = (p for group in self.param_groups for p in group["params"])
        capturable = any(group.get("capturable") for group in self.param_groups)
        device = next(params).device if capturable else "cpu"
        count = torch.as_tensor(updates, dtype=torch.int64).to(device)
        for group in self.param_groups:
            group["updates"] = count

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
            backends.make_adam_state(state, p, settings, self.state_dtype or p.dtype)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one update. Parameters without a gradient are skipped."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        grads = [[p.grad for p in group["params"]] for group in self.param_groups]
        moves = self._begin_update([g for some in grads for g in some if g is not None])
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
            plan = self._plan(number, group, grads[number], pulled=not done)
            if moves:
                own = [g for g in grads[number] if g is not None]
                plan.update(group, own, 1.0 if done else lam, scale, found_inf)
            stays = done and isinstance(group["anneal"], Sigmoid | Linear | Constant)
            over = over and (stays or not any(a is not None for a in self._anchors.values[number]))
        kept = self._anchors.values
        if over and self.release and any(a is not None for found in kept for a in found):
            self._anchors.release(self.param_groups)
            self._discard_plans()
        return loss

    def _begin_update(self, grads: list[Tensor]) -> bool:
        """Check the gradients and count the update. Return False if there is nothing to update."""
        _check_capture(self)
        sharded = any_sharded([p for group in self.param_groups for p in group["params"]])
        if not torch.compiler.is_compiling():  # a compiled step cannot set attributes
            self._sharded = sharded
        if sharded and self._anchors.shard(self.param_groups):  # the trainer sharded them
            self._discard_plans()
        if not all_strided(grads):
            raise RuntimeError(
                "RecAdam does not support sparse gradients: make the embedding with sparse=False"
            )
        if not grads or backends.only_makes_state(self, grads):
            return False
        self.param_groups[0]["updates"].add_(1)
        return True

    def _pull_is_over(self, number: int, group: dict[str, Any], lam: Scalar) -> bool:
        """Whether the remaining pull on a group, and 1 − λ, are below rounding error."""
        if isinstance(lam, Tensor) or 1 - lam > 1e-3:  # no dtype is so coarse
            return False
        # The peak of the learning rate, which schedulers store.
        lr = max(float(group["lr"]), float(group.get("initial_lr", 0.0)))
        if number not in self._peaks:  # the largest importance, at least 1: read once
            weights = self._anchors.importances[0][number]
            found = [w for w in weights if w is not None and w.numel()]
            self._peaks[number] = max([1.0, *(float(whole(w.max())) for w in found)])
        left: float = (1 - lam) * max(1.0, lr * group["gamma"] * self._peaks[number])
        narrow = not group["stochastic_rounding"]
        dtypes = (p.dtype if narrow else torch.float32 for p in group["params"])
        return left < min((torch.finfo(dtype).eps for dtype in dtypes), default=1.0) / 64

    def _plan(
        self, number: int, group: dict[str, Any], grads: list[Tensor | None], *, pulled: bool
    ) -> _Plan:
        """How to update a group: the plan of the last step if no tensor was replaced since."""
        both = zip(group["params"], grads, strict=True)
        params = [p for p, grad in both if grad is not None]
        if torch.compiler.is_compiling():  # identities are unknown, and the graph is the cache
            states = [self._state_of(p, group) for p in params]
            return _Plan(number, group, self._columns(number, params, states, pulled), [])
        plan = self._plans.get(number)
        same = plan is not None and same_objects(plan.columns.params, params)
        # Looking up the state of each parameter takes longer than all the rest.
        if (
            plan is not None
            and same
            and all(plan.states)
            and same_objects(plan.all_states, [*self.state.values()])
        ):
            states, values = plan.states, plan.values
        else:
            states = [self._state_of(p, group) for p in params]
            values = [state.values() for state in states]
        choices = [group[name] for name in ("foreach", "fused", "stochastic_rounding")]
        key = [*choices, *_key(params, states, values, pulled, self._sharded)]
        if plan is None or not same or plan.key != key:
            if plan is not None:
                plan.discard_fetched()
            if any(kernels.wanted(group, device) for device in {p.device for p in params}):
                _put_counts_together(states)
                key = [*choices, *_key(params, states, values, pulled, self._sharded)]
            columns = self._columns(number, params, states, pulled)
            plan = self._plans[number] = _Plan(number, group, columns, key)
        if plan.states is not states:
            plan.states, plan.values = states, values
            plan.all_states = [*self.state.values()]
        return plan

    def _columns(
        self, number: int, params: list[Tensor], states: list[dict[str, Tensor]], pulled: bool
    ) -> Columns:
        of_group, kept = self.param_groups[number]["params"], self._anchors
        pulls = zip(of_group, kept.values[number], kept.importances[0][number], strict=True)
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
        """As in torch. Also discards anchors prefetched for a step that did not take place."""
        super().zero_grad(set_to_none)
        for plan in self._plans.values():
            plan.discard_fetched()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain Python values, with a fingerprint in place of the anchors."""
        self._anchors.take_fingerprints(self.param_groups)
        # Before the user's own hooks, so that they see the final values.
        handle = self.register_state_dict_post_hook(_make_plain, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state. A state with other anchors raises and changes nothing."""
        if self._anchors.released:
            raise ValueError(
                "the anchors were released, and a saved state may need them: make a new optimizer "
                "from the pretrained weights, and load the state into that"
            )
        loaded: dict[str, Any] = {}

        def receive(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            groups = [dict(group) for group in given["param_groups"]]
            self._anchors.check_saved(
                groups,
                self.param_groups,
                "the saved state is not RecAdam's: it has no anchor fingerprint",
                "anchors=Reference.open(pretrained_directory)",
            )
            self._check_saved_state(given["state"])
            for group in groups:
                group.pop("param_names", None)  # the live model's names stay
                if isinstance(group.get("anneal"), dict):
                    group["anneal"] = Anneal.from_dict(group["anneal"])
            loaded.update(given, param_groups=groups)
            return loaded

        # After the user's own hooks, which may have renamed or changed things.
        handle = self.register_load_state_dict_pre_hook(receive)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        # torch has cast the state to the dtype of its parameter: restore the saved dtype.
        wanted = None if self.state_dtype == "8bit" else self.state_dtype
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            for p, index in zip(group["params"], saved["params"], strict=True):
                for key, value in loaded["state"].get(index, {}).items():
                    if key != "step" and isinstance(value, Tensor):
                        self.state[p][key] = value.to(p.device, wanted or value.dtype)

    def _check_saved_state(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        moments = [m["exp_avg"] for m in state.values() if isinstance(m.get("exp_avg"), Tensor)]
        saved = {moment.dtype == torch.uint8 for moment in moments}
        own = self.state_dtype == "8bit"
        if saved - {own}:
            kinds = ["full-precision", "8-bit"]
            raise ValueError(
                f"cannot load a state with {kinds[not own]} moments into an optimizer with "
                f"{kinds[own]} moments: create the optimizer with "
                f"state_dtype={None if own else '8bit'!r}"
            )

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps only defaults, state and param_groups when it copies and pickles.
        ours = ("release", "state_dtype", "_anchors")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in ours}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans, self._peaks = {}, {}
        self._share_update_count(self.param_groups[0]["updates"])
        for group in self.param_groups:  # older checkpoints lack it
            group.setdefault("stochastic_rounding", False)

    def distance(self) -> float:
        """‖θ − θ*‖ over all anchored parameters."""
        if self._anchors.released:
            raise RuntimeError(
                "the anchors were released: create a Reference before training and call its "
                "distance()"
            )
        params = [p for group in self.param_groups for p in group["params"]]
        anchors = [a for found in self._anchors.values for a in found]
        pairs = zip(params, anchors, strict=True)
        return math.hypot(*(distance(p, a) for p, a in pairs if a is not None))

    @torch.no_grad()
    def recall_state(self, *, distance: bool = False, group: int | None = None) -> dict[str, float]:
        """The progress of the recall, ready for a log.

        Args:
            distance: also measure ‖θ − θ*‖ over all anchored parameters (reads every weight).
            group: the group to report. If None, the first group that has anchors is reported.

        Returns:
            A dict. ``updates`` is the number of updates so far. ``lam`` is the value of λ at the
            last update, or at the first update if none was made. ``pull`` is the fraction c by
            which that update moves the weights toward θ*, for F = 1 and the current learning rate.
            ``distance``, only if requested, is NaN after the anchors were released.
        """
        pulled = [any(a is not None for a in anchors) for anchors in self._anchors.values]
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
            state["distance"] = math.nan if self._anchors.released else self.distance()
        return state


def _make_plain(_: Optimizer, saved: dict[str, Any]) -> None:
    """Replace everything that torch.load(weights_only=True) cannot read."""
    for group in saved["param_groups"]:
        group["updates"] = int(group["updates"])
        for name, value in group.items():
            if isinstance(value, Anneal):
                group[name] = value.to_dict()
            elif isinstance(value, np.generic):
                group[name] = value.item()


# --- The plan of a group -------------------------------------------------------------------------


def _key(
    params: list[Tensor],
    states: list[dict[str, Tensor]],
    values: list[ValuesView[Tensor]],
    pulled: bool,
    sharded: bool,
) -> list[Any]:
    """What a plan depends on besides the parameters: where the memory is, and the step count.

    ``values`` are the live views of the states: making them anew takes as long as all addresses.

    Hosts replace tensors (FSDP2), or move their memory and change their dtype in place
    (``Module.to``, DeepSpeed). The last entry is the version of the first step count: the kernel
    keeps the counts as Python numbers, so setting them from outside must be noticed.
    """
    tensors: Iterable[Tensor] = chain(params, chain.from_iterable(values))
    if sharded:
        tensors = map(local, tensors)
    version = states[0]["step"]._version if states else 0
    return [pulled, *map(Tensor.data_ptr, tensors), version]


def _put_counts_together(states: list[dict[str, Tensor]]) -> None:
    """Make the step counts views of one tensor, which the kernel can advance at once."""
    counts = [state["step"] for state in states]
    device, *others = {count.device for count in counts}
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if not others and not is_captured:  # a graph's memory is its own
        together = torch.stack([whole(count) for count in counts])
        for state, count in zip(states, together.unbind(), strict=True):
            state["step"] = count


class _Plan:
    """How the parameters of a group that have gradients are updated.

    The number of the group is part of the seed for random rounding. For the key see :func:`_key`.
    """

    def __init__(
        self, number: int, group: dict[str, Any], columns: Columns, key: list[Any]
    ) -> None:
        self.number, self.columns, self.key = number, columns, key
        self.states: list[dict[str, Tensor]] = []  # of the parameters
        self.values: list[ValuesView[Tensor]] = []  # their tensors
        self.all_states: list[dict[str, Tensor]] = []  # of the optimizer, when they were looked up
        everyone = range(len(columns.params))
        rounds = group["stochastic_rounding"]
        packed = {
            i
            for i in everyone
            if columns.exp_avg_scales[i] is not None
            or (rounds and columns.params[i].dtype == torch.bfloat16)
        }
        # Without a pull, fused=True is torch's own kernel, GradScaler included: AdamW to the last
        # bit.
        self.amp = bool(group["fused"]) and all(
            columns.anchors[i] is None
            and columns.params[i].dtype == columns.exp_avgs[i].dtype
            and i not in packed
            for i in everyone
        )
        self.kernel: Any = None
        self.taken: list[int] = []  # the parameters that the kernel updates
        devices = {p.device for p in columns.params}
        if not self.amp and any(kernels.wanted(group, device) for device in devices):
            from holdfast.kernels.recadam import Operands, RecAdamStep, takes  # needs Triton

            rows = [Operands(*tensors) for tensors in zip(*columns, strict=True)]
            self.taken = [i for i in everyone if takes(rows[i])]
            if self.taken:
                self.kernel = RecAdamStep([rows[i] for i in self.taken])
        left = sorted(set(everyone) - set(self.taken))
        # Unpacked, a parameter takes four times the memory: these are updated one at a time.
        self.packed = [(i, columns.take([i])) for i in left if i in packed]
        anchored = [i for i in left if i not in packed and columns.anchors[i] is not None]
        free = [i for i in left if i not in packed and columns.anchors[i] is None]
        self.together = [(some, columns.take(some)) for some in (anchored, free) if some]
        # By a kernel on the CPU, if the pull acts at the update.
        self.on_cpu: recadam_cpu.RecAdamStep | None = None
        if anchored and group["fused"] and not torch.compiler.is_compiling():
            tensors = self.together[0][1][:6]
            self.on_cpu = recadam_cpu.RecAdamStep(tensors) if recadam_cpu.takes(tensors) else None

    def update(
        self,
        group: dict[str, Any],
        grads: list[Tensor],
        lam: Scalar,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        names = ("lr", "gamma", "weight_decay", "eps", "maximize")
        settings = {name: group[name] for name in names}
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
            own = [grads[i] for i in some]
            pulled = columns.anchors[0] is not None
            if not (pulled and self.on_cpu and self.on_cpu(own, {**settings, "lam": lam})):
                _by_torch(columns, own, lam, settings)
        for i, columns in self.packed:
            wide = backends.unpack(columns)
            _by_torch(wide, [grads[i].to(wide.params[0].dtype)], lam, settings)
            backends.pack(
                wide, columns, stochastic=group["stochastic_rounding"],
                seed=seed + 7919 * (count if on_device else int(count)), number=i,
            )  # fmt: skip
        if self.key and grads:
            self.key[-1] = self.columns.steps[0]._version

    def discard_fetched(self) -> None:
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
    torch's AdamW to the last bit. Without ``anchors`` there is no pull. Without ``importance``, or
    where it contains None, F is 1. ``adam`` are Adam's other options (beta1, beta2, eps, maximize).
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
        for p, grad, exp_avg, exp_avg_sq, step, anchor, weight in backends.cache_sized_parts(
            [theta, g, m, v, steps, anchors, weights]
        ):
            torch._fused_adamw_(p, grad, exp_avg, exp_avg_sq, (), step, **adam)
            backends.pull(p, anchor, weight, c, foreach=True)
    else:
        adam |= {"foreach": foreach, "fused": fused, "capturable": capturable, "amsgrad": False}
        adamw(theta, g, m, v, [], steps, lr=lr_step, weight_decay=decay, **adam)
        if anchors is not None:
            # On the CPU a foreach operation is the same loop, with more memory in use.
            together = (fused or foreach is not False) and theta[0].device.type != "cpu"
            backends.pull(theta, anchors, weights, c, foreach=together)

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
_SAMPLES = 1000  # on which the importance is measured


@dataclass(frozen=True)
class RecAdamUpdate(AdamUpdate):
    """The settings of :class:`RecAdam` in a recipe, independent of learning rate and run length.

    Args:
        lr, weight_decay, layer_decay: as in :class:`~holdfast.stages.Update`. With a layer
            decay, lower layers are pulled more slowly, as they learn more slowly.
        betas, eps: coefficients and ε of Adam.
        pull: lr·γ at the peak learning rate: the fraction of the way back to θ* per update while λ
            is near 0. If None and ``gamma`` is not given, 0.1 as in the paper. 0 is no pull.
        gamma: γ itself, instead of ``pull``.
        t0: when λ reaches ½, as a fraction of the run.
        width: 1/k, the width of the shift from recalling to learning, as a fraction of the run.
        anneal: λ(t) itself, in updates, instead of ``t0`` and ``width``.
        importance: weight the pull on each coordinate by its Fisher information (``"fisher"``) or
            by :func:`~holdfast.optim.mas_importance` (``"mas"``), measured on 1000 samples of the
            training data at θ* and scaled to mean 1 over the pulled parameters. If None, the pull
            is equal for all coordinates.
        eight_bit: store Adam's moments in 8 bits. With pretrained weights in half precision,
            RecAdam then needs less memory than plain AdamW in float32.
        stochastic_rounding: round bfloat16 weights stochastically, so that small updates are not
            lost.

    Example:
        >>> from holdfast import RecAdamUpdate
        >>> RecAdamUpdate(lr=2e-5, t0=0.3).gamma_at(2e-5)
        5000.0
    """

    checks: ClassVar[Checks] = {
        "pull": at_least_zero, "gamma": at_least_zero, "anneal": check_anneal, "eight_bit": flag,
        "stochastic_rounding": flag,
        "importance": partial(one_of, allowed=("fisher", "mas")),
    }  # fmt: skip
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
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pull is not None and self.gamma is not None:
            raise ValueError(
                f"pull={self.pull!r} and gamma={self.gamma!r} set the same thing (gamma = pull / "
                "lr): give one of them and leave the other None"
            )
        Sigmoid.over(1, t0=self.t0, width=self.width)  # checks them

    @property
    def pulls(self) -> bool:
        return 0 not in (self.pull, self.gamma) and self.anneal != Constant(1.0)

    @property
    def reads_data(self) -> bool:
        return self.importance is not None and self.pulls

    @property
    def needs_fitted_head(self) -> bool:
        return self.reads_data  # importance is measured through the head

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        pull, gamma = SearchRange(0.003, 1.0, _PULL), SearchRange(0.003 / lr, 1.0 / lr, _PULL / lr)
        strength = {"pull": pull} if self.gamma is None else {"gamma": gamma}
        if self.anneal is not None:  # replaces t0 and width; λ = 1 leaves no pull either
            return {} if self.anneal == Constant(1.0) else strength
        shift = {
            "t0": SearchRange(0.0, 0.9, RecAdamUpdate.t0, log=False),
            "width": SearchRange(0.005, 1.0, RecAdamUpdate.width),
        }
        return {**strength, **shift}

    def cost(self, planned: Planned) -> Cost:
        """Adam's moments, perhaps in 8 bits. One pass over memory reads θ* as well."""
        moments = 2 * planned.value
        if self.eight_bit:
            moments = 2 * (1 + 4 / backends.BLOCK)
        state, moved = {"optimizer state": moments}, 3 * planned.value + 2 * moments
        kernel = "recadam_8bit" if self.eight_bit else "recadam_fused"
        if self.pulls:
            moved += planned.anchor
        if not self.reads_data:
            return Cost(state, moved, kernel)
        state["importance"] = IMPORTANCE_BYTES
        read = tokens_read(_SAMPLES, planned)
        return Cost(state, moved + IMPORTANCE_BYTES, kernel, before_trained=read)

    def log(self, run: Run) -> dict[str, float]:
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
        if not self.reads_data:
            return None
        if self.importance == "fisher":
            return measured(run, True, fisher_importance, task=run.task, samples=_SAMPLES)
        return measured(run, True, mas_importance, samples=_SAMPLES)

    def optimizer(self, groups: list[dict[str, Any]], run: Run, total_updates: int) -> Optimizer:
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
            stochastic_rounding=self.stochastic_rounding,
        )
