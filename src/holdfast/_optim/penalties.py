"""Penalties attached to an optimizer: hooks of its step, and their state in its checkpoints.

A kernel does the arithmetic where there is one, otherwise torch.
"""

from __future__ import annotations

import operator
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from holdfast._optim.anchors import Anchors
from holdfast._optim.backends import only_makes_state, pull
from holdfast._torch.dtypes import wide
from holdfast._torch.layout import alike, is_sharded, like, local, same_objects, whole
from holdfast.kernels import available
from holdfast.reference import Reference

if TYPE_CHECKING:
    from holdfast.kernels.pull import PullStep
    from holdfast.stages import Penalty

# In param_groups, the only place that distributed checkpoints save.
COUNT, FINGERPRINT = "penalty_updates", "penalty_fingerprint"
#: Penalties that act, with their numbers.
Acting = Sequence[tuple[int, "Penalty"]]


def attach_penalties(
    optimizer: Optimizer,
    penalties: Sequence[Penalty],
    reference: Reference | None,
    importance: Reference | Sequence[Reference | None] | None = None,
    *,
    total_updates: int | None = None,
) -> AttachedPenalties:
    """Attach penalties to the step of any optimizer.

    ``optimizer.state_dict()`` then contains the count of updates and a fingerprint of the
    reference. To resume, attach the same penalties with the *pretrained* weights, then load the
    state. A copy or pickle of the optimizer loses the penalties, because torch does not copy hooks.

    Args:
        optimizer: any optimizer. Make it with ``model.named_parameters()``, unless the reference
            knows the parameters by identity.
        penalties: any number of penalties; they add up.
        reference: the pretrained weights. A parameter without a pretrained value is not penalized.
        importance: the importance of each coordinate, for penalties that weight coordinates: one
            for all of them, or a sequence with one (or None) per penalty. These penalties skip
            parameters without importance.
        total_updates: the number of updates of the run, for penalties that act at fractions of it.

    Example:
        >>> import torch
        >>> from holdfast import L2SP, Reference
        >>> from holdfast.optim import attach_penalties
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> attached = attach_penalties(optimizer, [L2SP(1.0)], Reference.of(model))
        >>> attached.values()
        {'L2SP': 0.0}
    """
    if reference is None:
        raise ValueError("penalties pull to the pretrained weights: pass the Reference")
    if getattr(optimizer, "_holdfast_penalties", None) is not None:
        raise ValueError("this optimizer already has penalties: attach all of them in one call")
    # The peak learning rate, which schedulers store: a warm-up may have begun at 0.
    lr = max((float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups), default=0.0)
    penalties = tuple(penalty.at(lr) for penalty in penalties)
    for penalty in penalties:
        penalty.acts_at(1, total_updates)  # raises now if it needs the total
        if penalty.acts and (warning := penalty.warning(lr)):
            warnings.warn(warning, stacklevel=2)
    importances = _one_for_each(penalties, importance)
    # If every penalty is turned off, it is no error that no parameter has an anchor.
    required = any(penalty.acts for penalty in penalties)
    anchors = Anchors(FINGERPRINT, reference, importances, required=required)
    return AttachedPenalties(optimizer, penalties, anchors, total_updates)


def _one_for_each(
    penalties: Sequence[Penalty], importance: Reference | Sequence[Reference | None] | None
) -> list[Reference | None]:
    if importance is None or isinstance(importance, Mapping):
        importance = [importance] * len(penalties)
    if len(importance) != len(penalties):
        raise ValueError(
            f"there are {len(penalties)} penalties and {len(importance)} importances: "
            "pass one per penalty, None for those that need none"
        )
    pairs = list(zip(penalties, importance, strict=True))
    for penalty, given in pairs:
        if penalty.weighted and penalty.acts and given is None:
            raise ValueError(
                f"{type(penalty).__name__} weights each coordinate: pass importance=, measured by "
                "a function of holdfast.optim such as fisher_importance(model, data)"
            )
    return [given if penalty.weighted else None for penalty, given in pairs]


class AttachedPenalties:
    """Penalties that act in an optimizer's step until :meth:`remove`."""

    def __init__(
        self,
        optimizer: Optimizer,
        penalties: Sequence[Penalty],
        anchors: Anchors,
        total_updates: int | None,
    ) -> None:
        self.optimizer, self.penalties, self._anchors = optimizer, penalties, anchors
        self.total_updates = total_updates
        # The parameters to penalize, how, and what that depends on: see _begin_update.
        self._rows: list[Penalized] = []
        self._plans: dict[Any, _Plan] = {}
        self._key: list[Any] = []
        self._params: list[Tensor] = []
        self._grads: list[Any] = []
        self._match_new_groups()
        keep_hooks(optimizer)
        optimizer._holdfast_penalties = self  # type: ignore[attr-defined]
        self._handles = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)),
            optimizer.register_step_post_hook(torch.compiler.disable(self._after_step)),
            optimizer.register_state_dict_pre_hook(self._before_save),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def remove(self) -> None:
        """Detach all penalties."""
        for handle in self._handles:
            handle.remove()
        self.optimizer._holdfast_penalties = None  # type: ignore[attr-defined]
        self._key, self._params, self._rows, self._plans = [], [], [], {}
        for group in self.optimizer.param_groups:
            group.pop(COUNT, None)
            group.pop(FINGERPRINT, None)

    @property
    def updates(self) -> int:
        """The number of updates so far, without steps that a GradScaler skipped."""
        return int(self.optimizer.param_groups[0][COUNT])

    @torch.no_grad()
    def values(self) -> dict[str, float]:
        """The current value of each penalty, for the log."""
        totals: dict[str, float] = {}
        for row in self._penalized():
            way = row.way()
            for k, penalty in enumerate(self.penalties):
                if (value := penalty.value(way, row.weight(k))) is not None:
                    name = type(penalty).__name__
                    totals[name] = totals.get(name, 0.0) + float(whole(value))
        return totals

    def _match_new_groups(self) -> None:
        groups = self.optimizer.param_groups
        begin = len(self._anchors.values)
        if not (new := groups[begin:]):
            return
        self._anchors.add(self._anchors.match(new))
        if begin == 0 and all(COUNT in group for group in groups):
            self._check_saved(groups)  # a state was loaded before they were attached
            return
        count = groups[0][COUNT] if begin else 0
        for group in new:
            group[COUNT], group[FINGERPRINT] = count, None

    def _penalized(self) -> Iterator[Penalized]:
        """Every anchored parameter, with its anchor and its importance for each penalty."""
        groups = self.optimizer.param_groups
        for i, (group, anchors) in enumerate(zip(groups, self._anchors.values, strict=True)):
            for j, (p, anchor) in enumerate(zip(group["params"], anchors, strict=True)):
                if anchor is None:
                    continue
                weights: list[Tensor | float] = []
                for penalty, found in zip(self.penalties, self._anchors.importances, strict=True):
                    weight, missing = found[i][j], 0.0 if penalty.weighted else 1.0
                    weights.append(missing if weight is None else weight)
                yield Penalized(i, p, anchor, p.grad is not None, weights)

    def _acting(self, *, coupled: bool) -> Acting:
        """The penalties of one kind that act at the next update."""
        update, total = self.updates + 1, self.total_updates
        some = [(k, p) for k, p in enumerate(self.penalties) if p.acts and p.coupled == coupled]
        return [(k, p) for k, p in some if p.acts_at(update, total)]

    def _begin_update(self) -> bool:
        """Discard the plans if anything changed. False if there is no update to make."""
        groups = self.optimizer.param_groups
        params = [p for group in groups for p in group["params"]]
        grads = [p.grad for p in params if p.grad is not None]
        if not grads or only_makes_state(self.optimizer, grads):
            return False
        # Hosts replace parameters (FSDP2), or move their memory and change their dtype in place.
        one_of_each_type = {type(p): p for p in params}.values()
        places = [local(p) for p in params] if any(map(is_sharded, one_of_each_type)) else params
        key = [*[p.data_ptr() for p in places], *[p.grad is None for p in params]]
        if key != self._key or not same_objects(params, self._params):
            self._anchors.shard(groups)
            self._key, self._params = key, params
            self._rows, self._plans = list(self._penalized()), {}
        return True

    def _before_step(self, _: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._match_new_groups()
        position = 1 if len(args) > 1 else "closure"  # args[0] is the optimizer
        closure = args[1] if position == 1 else kwargs.get("closure")
        if closure is None:
            self._add_gradients()
            return None

        def with_penalties() -> Any:  # the closure computes the gradients
            loss = closure()
            self._add_gradients()
            return loss

        if position == 1:
            return (args[0], with_penalties, *args[2:]), kwargs
        return args, {**kwargs, "closure": with_penalties}

    @torch.no_grad()
    def _add_gradients(self) -> None:
        acting = self._acting(coupled=True)
        if not acting or not self._begin_update():
            return
        grads = [local(row.grad) for row in self._rows if row.graded]
        kinds = [(g.dtype, g.layout is torch.strided and g.stride()) for g in grads]
        if kinds != self._grads:
            self._grads, self._plans = kinds, {}
        # A fused step under a GradScaler starts with scaled gradients.
        scale = getattr(self.optimizer, "grad_scale", None)
        groups = self.optimizer.param_groups
        signs = [-1.0 if group.get("maximize") else 1.0 for group in groups]
        kernels, rest = self._plan(acting, coupled=True)
        for penalty, rows, step in kernels:
            rates = [sign * (penalty.rate(1.0) or 0.0) for sign in signs]
            step(rates, [local(row.grad) for row in rows], scale)
        for row in (row for rows in rest for row in rows):
            way = row.way()
            terms = [penalty.gradient(way, row.weight(k)) for k, penalty in acting]
            added = reduce(operator.add, terms)
            added = added if scale is None else added * scale.to(row.grad.device)
            row.grad.add_(added.to(row.grad.dtype), alpha=signs[row.group])

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *args: Any) -> None:
        skipped = getattr(optimizer, "found_inf", None)
        if (skipped is not None and bool(skipped)) or not self._begin_update():
            return
        acting = self._acting(coupled=False)
        count = self.updates + 1
        for group in optimizer.param_groups:
            group[COUNT] = count
        if not acting:
            return
        lrs = [float(group["lr"]) for group in optimizer.param_groups]
        kernels, rest = self._plan(acting, coupled=False)
        for penalty, _, step in kernels:
            step([penalty.rate(lr) or 0.0 for lr in lrs])
        for rows in rest:
            _move(rows, acting, lrs[rows[0].group])

    def _plan(self, acting: Acting, *, coupled: bool) -> _Plan:
        key = (coupled, *(k for k, _ in acting))
        if key not in self._plans:
            graded = coupled or all(penalty.needs_gradient for _, penalty in acting)
            rows = [row for row in self._rows if row.graded or not graded]
            self._plans[key] = _planned(rows, acting, coupled)
        return self._plans[key]

    def _before_save(self, _: Optimizer) -> None:
        self._match_new_groups()
        self._anchors.take_fingerprints(self.optimizer.param_groups)

    def _before_load(self, _: Optimizer, state: dict[str, Any]) -> None:
        self._match_new_groups()
        self._check_saved(state["param_groups"])

    def _check_saved(self, saved: Sequence[dict[str, Any]]) -> None:
        names = ", ".join(type(penalty).__name__ for penalty in self.penalties)
        self._anchors.check_saved(
            saved,
            self.optimizer.param_groups,
            f"the saved state was made without penalties, but this optimizer has {names}: "
            "resume with the recipe of that run, or start a new run",
            "attach_penalties(optimizer, penalties, Reference.open(pretrained_directory))",
        )

    def _after_load(self, optimizer: Optimizer) -> None:
        count = max(int(group[COUNT]) for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            group[COUNT] = count


def keep_hooks(optimizer: Optimizer) -> None:
    """Bind the step that calls hooks to the optimizer itself.

    Some releases of torch remove these calls from the classes of torch.optim for good as soon as
    anything is compiled, for example a model. Hooks would silently stop acting.
    """
    if "step" in vars(optimizer):  # a scheduler has already done so
        return
    step: Callable[..., Any] = type(optimizer).step
    hooking = Optimizer.profile_hook_step(lambda self: None).__code__
    if getattr(step, "__code__", None) is not hooking:
        step = Optimizer.profile_hook_step(step)
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


# --- How penalties act ----------------------------------------------------------------------------


class Penalized(NamedTuple):
    """A parameter θ that has an anchor θ*."""

    group: int  # its number
    p: Tensor
    anchor: Tensor
    graded: bool  # whether it has a gradient
    #: The importance of its coordinates for each penalty: 1 if all count alike, 0 if it is unknown.
    weights: list[Tensor | float]

    @property
    def grad(self) -> Tensor:
        return cast(Tensor, self.p.grad)

    def way(self) -> Tensor:
        """θ − θ*."""
        return self.p.detach().to(wide(self.p)) - like(self.anchor, self.p, wide(self.p))

    def weight(self, k: int) -> Tensor | float:
        """The importance for the k-th penalty, on the parameter's device."""
        weight = self.weights[k]
        return like(weight, self.p, wide(self.p)) if isinstance(weight, Tensor) else weight

    def is_subject_to(self, penalty: Penalty, k: int) -> bool:
        unknown = not isinstance(self.weights[k], Tensor) and self.weights[k] == 0
        return not unknown and (self.graded or not penalty.needs_gradient)


class _Plan(NamedTuple):
    """How some penalties act: each with its kernel, and the parameters that torch updates."""

    kernels: list[tuple[Penalty, list[Penalized], PullStep]]
    rest: list[list[Penalized]]


def _planned(rows: list[Penalized], acting: Acting, coupled: bool) -> _Plan:
    """Assign to the kernels all penalties that have a rate, in float32 or if there is only one.

    In half precision each kernel would round, but all penalties together should round once.
    """
    here = [
        row for row in rows
        if all(penalty.rate(1.0) is not None for _, penalty in acting)
        and (len(acting) == 1 or row.p.dtype == torch.float32)
        and available(row.p.device)
        and not (coupled and not alike(row.grad, row.p))
    ]  # fmt: skip
    if not here:
        return _Plan([], _batches(rows))
    from holdfast.kernels.pull import Pulled, PullStep, takes  # needs Triton

    def pulled(row: Penalized, k: int) -> Pulled:
        weight = row.weights[k]
        return Pulled(
            row.group, local(row.p), local(row.anchor),
            local(weight) if isinstance(weight, Tensor) else None,
            local(row.grad) if coupled else None,
        )  # fmt: skip

    taken = [row for row in here if all(takes(pulled(row, k)) for k, _ in acting)]
    kernels = []
    for k, penalty in acting:
        own = [row for row in taken if row.is_subject_to(penalty, k)]
        kernels.append((penalty, own, PullStep([pulled(row, k) for row in own])))
    known = {id(row) for row in taken}
    return _Plan(kernels, _batches(row for row in rows if id(row) not in known))


def _batches(rows: Iterable[Penalized]) -> list[list[Penalized]]:
    """Parameters for one torch call: on a GPU those of a group that need no copy, else one each.

    On the CPU a foreach operation is the same loop, with more memory in use.
    """
    found: dict[Any, list[Penalized]] = {}
    for i, row in enumerate(rows):
        p, tensors = row.p, [t for t in row.weights if isinstance(t, Tensor)]
        near = all(t.device == p.device for t in (row.anchor, *tensors))
        together = near and p.device.type != "cpu" and row.anchor.dtype == p.dtype == wide(p)
        found.setdefault((row.group, p.device, p.dtype) if together else i, []).append(row)
    return list(found.values())


def _move(rows: list[Penalized], acting: Acting, lr: float) -> None:
    """Apply one penalty after the other; half precision is rounded once, at the end."""
    dtype = wide(rows[0].p)  # a batch has one dtype
    theta = [like(row.p, row.p, dtype) for row in rows]
    star = [like(row.anchor, row.p, dtype) for row in rows]
    for k, penalty in acting:
        own = [i for i, row in enumerate(rows) if row.is_subject_to(penalty, k)]
        weights = [rows[i].weight(k) for i in own]
        c = penalty.rate(lr)
        if c is not None and own:
            known = [weight if isinstance(weight, Tensor) else None for weight in weights]
            pull([theta[i] for i in own], [star[i] for i in own], known, c, foreach=True)
        elif c is None:
            for i, weight in zip(own, weights, strict=True):
                before = theta[i] - star[i]
                after = penalty.move(before, weight, lr)
                # Weights that do not move keep their bits: θ* + (θ − θ*) is θ up to rounding.
                theta[i] = torch.where(after == before, theta[i], star[i] + after)
    for row, moved in zip(rows, theta, strict=True):
        if moved is not row.p:
            row.p.copy_(moved)
