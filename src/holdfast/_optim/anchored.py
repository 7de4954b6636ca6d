"""Optimizers that know the pretrained weights θ*.

:class:`AnchoredOptimizer` holds one anchor (or None) per parameter and one count of updates for all
groups. Its checkpoints carry a fingerprint of the anchors instead of a copy. A method defines its
hyper-parameters, ``_check_group`` and ``step``. The functions below the class match a Reference to
parameters and compare fingerprints; penalties (:mod:`holdfast._optim.penalties`) use them too.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from holdfast._torch.checks import at_least_zero, flag
from holdfast._torch.fingerprint import tensor_fingerprint
from holdfast._torch.layout import is_sharded, like, storage_of, whole
from holdfast._torch.names import Alignment, align, shorten
from holdfast.anneal import Anneal
from holdfast.reference import Reference, distance

Group = dict[str, Any]
#: One tensor or None per parameter of each group.
Found = list[list[Tensor | None]]

# Refuses to capture a step into a CUDA graph unless it is capturable; torch 2.6 has another name.
_check_capture: Callable[[Optimizer], None] = getattr(
    Optimizer,
    "_accelerator_graph_capture_health_check",
    getattr(Optimizer, "_cuda_graph_capture_health_check", lambda _: None),
)
_STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class AnchoredOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` whose parameters have anchors θ*.

    Args:
        params: as in torch; a group may set ``anchored=False``.
        defaults: the method's hyper-parameters.
        anchors: a Reference, a mapping from names to tensors, or None for the current values.
        state_dtype: dtype of floating-point state, or "8bit"; None is the parameter's dtype.
        importance: the importance of each coordinate, matched like the anchors; None is 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        anchors: Reference | Mapping[str, Tensor] | None,
        state_dtype: torch.dtype | Literal["8bit"] | None,
        importance: Reference | Mapping[str, Tensor] | None = None,
    ) -> None:
        if isinstance(params, nn.Module):
            raise TypeError("pass the parameters, model.named_parameters(), not the model")
        anchors = _as_reference(anchors, "anchors", "Reference.open(path), Reference.of(model)")
        importance = _as_reference(importance, "importance", "fisher_importance(model, data)")
        if state_dtype not in (None, "8bit", *_STATE_DTYPES):
            allowed = ", ".join(map(str, _STATE_DTYPES))
            raise ValueError(
                f"state_dtype must be None, '8bit' or one of {allowed}, got {state_dtype!r}"
            )
        super().__init__(params, {**defaults, "anchored": True})
        self.state_dtype = state_dtype
        self._matcher = None if anchors is None else Matcher(anchors)
        self._importances = None if importance is None else Importances(importance)
        # By position, beside param_groups: hosts swap the parameters there (FSDP2), and anchors
        # in param_groups would be saved in every checkpoint. The count of updates and the
        # fingerprint are in param_groups, the only place that distributed checkpoints save.
        self._anchors: Found = []
        self._weights: Found = []
        self._released = False
        self._anchor_new_groups()
        self._share_update_count(0)

    def add_param_group(self, param_group: Group) -> None:
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

    def _check_group(self, group: Group) -> None:
        """Validate the newest group; extended by each method."""
        at_least_zero("lr", group["lr"])
        flag("anchored", group["anchored"])
        if unfit := [p.dtype for p in group["params"] if not p.is_floating_point()]:
            raise ValueError(
                f"{type(self).__name__} takes real floating-point parameters, got {unfit[0]}"
            )
        names: list[str] = group.get("param_names", [])
        others = {n for g in self.param_groups[:-1] for n in g.get("param_names", ())}
        twice = [n for n, count in Counter(names).items() if count > 1 or n in others]
        if twice:
            raise ValueError(f"duplicate parameter names: {shorten(sorted(twice))}")

    def _anchor_new_groups(self) -> None:
        """Match the anchors of groups that have none yet. Changes nothing if it fails."""
        new = self.param_groups[len(self._anchors) :]
        pulled = [group for group in new if group["anchored"]]
        if pulled and self._released:
            raise ValueError(
                "the anchors were released, so a new group cannot have any: add it with "
                "anchored=False, or make the optimizer with release=False"
            )
        if self._matcher is None:
            anchors: Found = [[p.detach().clone() for p in group["params"]] for group in pulled]
        else:
            anchors = self._matcher(pulled) if pulled else []
        weights: Found = [[None] * len(group["params"]) for group in pulled]
        if self._importances is not None and pulled:
            weights = self._importances(pulled)
        free = [
            label
            for group, found in zip(pulled, anchors, strict=True)
            for label, anchor in zip(self._labels(group), found, strict=True)
            if anchor is None
        ]
        if free:
            warnings.warn(
                f"{len(free)} parameters have no anchor and are updated without a pull: "
                f"{', '.join(free)}",
                stacklevel=4,
            )
        for group in new:
            group["anchor_fingerprint"] = None  # see take_fingerprints
            for found, kept in ((anchors, self._anchors), (weights, self._weights)):
                kept.append(found.pop(0) if group["anchored"] else [None] * len(group["params"]))

    def _labels(self, group: Group) -> list[str]:
        return labels(group, self._matcher.reference if self._matcher else None)

    def _share_update_count(self, updates: int | Tensor) -> None:
        """One count of updates for all groups, so that late groups do not start over."""
        params = (p for group in self.param_groups for p in group["params"])
        capturable = any(group.get("capturable") for group in self.param_groups)
        device = next(params).device if capturable else "cpu"
        count = torch.as_tensor(updates, dtype=torch.int64).to(device)
        for group in self.param_groups:
            group["updates"] = count

    def _shard_anchors(self) -> bool:
        """Shard the anchors as their parameters now are. True if any anchor changed."""
        params = [p for group in self.param_groups for p in group["params"]]
        sharded = any(map(is_sharded, params))
        if not torch.compiler.is_compiling():  # a compiled step cannot set attributes
            self._sharded = sharded
        if not sharded:
            return False
        changed = [shard(found, self.param_groups) for found in (self._anchors, self._weights)]
        return any(changed)

    def _begin_update(self) -> bool:
        """Check the gradients and count the update. False if there is no update to make."""
        _check_capture(self)
        grads = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if any(g.layout is not torch.strided for g in grads):
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients: make the embedding "
                "with sparse=False"
            )
        if not grads or only_makes_state(self, grads):
            return False
        self.param_groups[0]["updates"].add_(1)
        return True

    def distance(self) -> float:
        """‖θ − θ*‖ over all anchored parameters."""
        if self._released:
            raise RuntimeError("the anchors were released: create a Reference before training and call its distance()")
        return math.hypot(
            *(
                distance(p, anchor)
                for group, anchors in zip(self.param_groups, self._anchors, strict=True)
                for p, anchor in zip(group["params"], anchors, strict=True)
                if anchor is not None
            )
        )

    def _release_anchors(self) -> None:
        """Free the anchors permanently; checkpoints keep their fingerprint."""
        take_fingerprints(self.param_groups, self._anchors, "anchor_fingerprint")
        for found in (*self._anchors, *self._weights):
            found[:] = [None] * len(found)
        self._matcher = self._importances = None
        self._released = True

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain Python values, with a fingerprint in place of the anchors."""
        take_fingerprints(self.param_groups, self._anchors, "anchor_fingerprint")
        # Before the user's own hooks, so that they see the final values.
        handle = self.register_state_dict_post_hook(_make_plain, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state. A state with other anchors raises and changes nothing."""
        if self._released:
            raise ValueError(
                "the anchors were released, and a saved state may need them: make a new optimizer "
                "from the pretrained weights, and load the state into that"
            )
        loaded: dict[str, Any] = {}

        def receive(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            groups = [dict(group) for group in given["param_groups"]]
            self._check_saved(groups)
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
        """Raise if the saved state does not fit this optimizer; extended by each method."""

    def _check_saved(self, saved: list[Group]) -> None:
        own = self.state_dict()["param_groups"]
        refuse_other_groups(saved, own)
        if any("anchor_fingerprint" not in group for group in saved):
            raise ValueError(
                f"the saved state is not {type(self).__name__}'s: it has no anchor fingerprint"
            )
        refuse_other_anchors(
            [group["anchor_fingerprint"] for group in saved],
            [group["anchor_fingerprint"] for group in own],
            [self._labels(group) for group in self.param_groups],
            "anchors=Reference.open(pretrained_directory)",
        )

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps only defaults, state and param_groups when it copies and pickles.
        ours = ("state_dtype", "_matcher", "_importances", "_anchors", "_weights", "_released")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in ours}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_released", False)
        self._share_update_count(self.param_groups[0]["updates"])


@dataclass
class Matcher:
    """Finds the tensor of a Reference for each parameter of some groups; None where it has none.

    One name prefix holds for the whole model, also for groups that are added later. It is an error
    if the first groups match no tensor at all.
    """

    reference: Reference
    alignment: Alignment | None = None
    began: bool = False

    def __call__(self, groups: Sequence[Group]) -> Found:
        names = [name for group in groups for name in group.get("param_names", ())]
        if self.alignment is None and names:
            self.alignment = align(names, self.reference)
        found = [
            self.reference.match(group["params"], group.get("param_names"), self.alignment)
            for group in groups
        ]
        if not self.began and not any(t is not None for tensors in found for t in tensors):
            known = [name for group in groups for name in labels(group, self.reference)]
            raise ValueError(self.nothing_matches(known))
        self.began = True
        # A mapping may hold the live tensors (model.state_dict()), which move with the weights.
        live = {storage_of(p) for group in groups for p in group["params"]}
        return [
            [t.clone() if t is not None and storage_of(t) in live else t for t in tensors]
            for tensors in found
        ]

    def nothing_matches(self, names: Sequence[str]) -> str:
        return self.reference.nothing_matches(names)


class Importances(Matcher):
    """The same for the importance of each coordinate; the values are checked."""

    def __call__(self, groups: Sequence[Group]) -> Found:
        try:
            found = super().__call__(groups)
        except ValueError as error:
            raise ValueError(f"importance: {error}") from error
        for group, weights in zip(groups, found, strict=True):
            for label, weight in zip(labels(group, self.reference), weights, strict=True):
                if weight is not None and not bool((weight.isfinite() & (weight >= 0)).all()):
                    raise ValueError(f"the importance of {label} must be finite and ≥ 0")
        return found

    def nothing_matches(self, names: Sequence[str]) -> str:
        known = shorten(list(self.reference))
        return f"no parameter has one. Parameters: {shorten(names)}. Importance of: {known}"


def labels(group: Group, reference: Reference | None) -> list[str]:
    """The names of a group's parameters, or their numbers where the names are unknown."""
    if names := group.get("param_names"):
        return list(names)
    names = [None if reference is None else reference.name_of(p) for p in group["params"]]
    return [name or f"parameter {i}" for i, name in enumerate(names)]


def group_fingerprint(group: Group, anchors: Sequence[Tensor | None]) -> str:
    """The fingerprints of each parameter's shape and anchor, in order, separated by spaces."""
    return " ".join(
        tensor_fingerprint(p.shape, a) for p, a in zip(group["params"], anchors, strict=True)
    )


def take_fingerprints(groups: Sequence[Group], anchors: Found, key: str) -> None:
    """Store the fingerprints that are still None. Call it late: it reads every anchor."""
    for group, found in zip(groups, anchors, strict=True):
        if group[key] is None:
            group[key] = group_fingerprint(group, found)


def refuse_other_groups(saved: Sequence[Group], own: Sequence[Group]) -> None:
    """Raise if the groups of a saved state have other sizes."""
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, own)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            "the saved state belongs to another model or other groups: it has "
            f"{sizes[0]} parameters per group, this optimizer {sizes[1]}"
        )


def refuse_other_anchors(
    saved: Sequence[str], own: Sequence[str], labels: Sequence[Sequence[str]], how: str
) -> None:
    """Raise if fingerprints differ, one text per group; ``how`` shows how to pass θ*."""
    names = [f"{label} of group {i}" for i, group in enumerate(labels) for label in group]
    theirs, ours = ([x for text in texts for x in text.split()] for texts in (saved, own))
    other = [name for name, a, b in zip(names, theirs, ours, strict=True) if a != b]
    if other:
        which = "all of them" if len(other) == len(names) else shorten(other)
        raise ValueError(
            "the saved state was made with other anchors than this optimizer has, for "
            f"{which}. Anchors are the pretrained weights, not those of a checkpoint: make the "
            "optimizer before loading tuned weights, or pass the pretrained Reference, "
            f"{how}. If only a randomly initialized head differs, leave it without anchors from "
            'the start: Reference.of(model, without="classifier")'
        )


def only_makes_state(optimizer: Optimizer, grads: Sequence[Tensor]) -> bool:
    """Whether a step only initializes state: lr 0 and zero gradients.

    Distributed checkpointing calls such a step. A warm-up may begin with lr 0 too, but its
    gradients are not all zero.
    """
    if torch.compiler.is_compiling() or any(
        isinstance(g["lr"], Tensor) or g["lr"] != 0 for g in optimizer.param_groups
    ):
        return False
    return not any(bool(whole(g.any())) for g in grads)


def shard(found: Found, groups: Sequence[Group]) -> bool:
    """Shard tensors as their parameters now are. True if any tensor changed.

    Hosts shard a model after the optimizer is made.
    """
    changed = False
    for group, tensors in zip(groups, found, strict=True):
        for i, (p, tensor) in enumerate(zip(group["params"], tensors, strict=True)):
            if tensor is not None and is_sharded(p) and not is_sharded(tensor):
                tensors[i] = like(tensor, p, tensor.dtype)
                changed = True
    return changed


def split_anchored(groups: Sequence[Group], reference: Reference) -> list[Group]:
    """Groups of named parameters, each split into those with an anchor and those without."""
    named = [pair for group in groups for pair in group["params"]]
    anchors = reference.match([p for _, p in named], [name for name, _ in named])
    has = {name: anchor is not None for (name, _), anchor in zip(named, anchors, strict=True)}
    parts = [
        {**group, "params": [pair for pair in group["params"] if has[pair[0]] == anchored]}
        | {"anchored": anchored}
        for group in groups
        for anchored in (True, False)
    ]
    return [part for part in parts if part["params"]]


def _make_plain(_: Optimizer, saved: dict[str, Any]) -> None:
    """Replace everything that torch.load(weights_only=True) cannot read."""
    for group in saved["param_groups"]:
        group["updates"] = int(group["updates"])
        for name, value in group.items():
            if isinstance(value, Anneal):
                group[name] = value.to_dict()
            elif isinstance(value, np.generic):
                group[name] = value.item()


def _as_reference(
    given: Reference | Mapping[str, Tensor] | None, name: str, how: str
) -> Reference | None:
    if given is None or isinstance(given, Reference):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{name} must be a Reference ({how}) or a mapping from parameter names to tensors, "
            f"got {type(given).__name__}"
        )
    return Reference(given)
