"""What optimizers that know the pretrained weights have in common.

Anchors (one tensor for each parameter, or None), one count of updates for all groups, and
checkpoints that carry a fingerprint of the anchors instead of a copy. A method defines its
hyper-parameters, ``_check_group`` and ``step``.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from holdfast._optim.matching import (
    Found,
    Importances,
    Matcher,
    group_fingerprint,
    labels,
    only_makes_state,
    refuse_other_anchors,
    refuse_other_groups,
    shard,
)
from holdfast._torch.checks import at_least_zero
from holdfast._torch.names import shorten
from holdfast._torch.sharding import is_sharded
from holdfast.anneal import Anneal
from holdfast.reference import Reference, distance

# Refuses to capture a step into a graph that is not capturable. torch 2.6 calls it otherwise.
_check_capture: Callable[[Optimizer], None] = getattr(
    Optimizer,
    "_accelerator_graph_capture_health_check",
    getattr(Optimizer, "_cuda_graph_capture_health_check", lambda _: None),
)
_STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class AnchoredOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` whose parameters have anchors θ*.

    Args:
        params: as in torch; groups may say ``anchored=False``.
        defaults: the method's hyper-parameters.
        anchors: a Reference, a mapping from names to tensors, or None for the values now.
        state_dtype: dtype of floating-point state, or "8bit"; None is the parameter's own.
        importance: how much each coordinate matters, found like the anchors; None is 1 for all.
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
        # in param_groups would go into every checkpoint. What belongs in a checkpoint, the count
        # of updates and the fingerprint, is in param_groups: distributed checkpoints know no
        # other place.
        self._anchors: Found = []
        self._weights: Found = []
        self._released = False
        self._anchor_new_groups()
        self._share_update_count(0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; without a Reference its parameters are anchored at their values now."""
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
        """Validate the newest group; extended by each method."""
        at_least_zero("lr", group["lr"])
        if not isinstance(group["anchored"], bool):
            raise TypeError(f"anchored must be True or False, got {group['anchored']!r}")
        if unfit := [p.dtype for p in group["params"] if not p.is_floating_point()]:
            raise ValueError(
                f"{type(self).__name__} takes real floating-point parameters, got {unfit[0]}"
            )
        names = group.get("param_names", [])
        others = {n for g in self.param_groups[:-1] for n in g.get("param_names", ())}
        twice = [n for n, count in Counter(names).items() if count > 1 or n in others]
        if twice:
            raise ValueError(f"duplicate parameter names: {shorten(sorted(twice))}")

    def _anchor_new_groups(self) -> None:
        """Find the anchors of the groups that have none yet. Changes nothing if it fails."""
        new = self.param_groups[len(self._anchors) :]
        pulled = [group for group in new if group["anchored"]]
        if pulled and self._released:
            raise ValueError(
                "the anchors were let go, a new group has none: add it with anchored=False, or "
                "make the optimizer with release=False"
            )
        anchors: Found = []
        if self._matcher is None:
            anchors = [[p.detach().clone() for p in group["params"]] for group in pulled]
        elif pulled:
            anchors = self._matcher(pulled)
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
            group["anchor_fingerprint"] = None  # taken when first asked for: it reads every anchor
            for found, kept in ((anchors, self._anchors), (weights, self._weights)):
                kept.append(found.pop(0) if group["anchored"] else [None] * len(group["params"]))

    def _labels(self, group: dict[str, Any]) -> list[str]:
        return labels(group, self._matcher.reference if self._matcher else None)

    def _share_update_count(self, updates: int | Tensor) -> None:
        """One count of updates, shared by all groups, so that late ones do not start over."""
        params = (p for group in self.param_groups for p in group["params"])
        capturable = any(group.get("capturable") for group in self.param_groups)
        device = next(params).device if capturable else "cpu"
        count = torch.as_tensor(updates, dtype=torch.int64).to(device)
        for group in self.param_groups:
            group["updates"] = count

    def _shard_anchors(self) -> bool:
        """Part the anchors as their parameters are by now. True if there was anything to part."""
        if not any(is_sharded(p) for group in self.param_groups for p in group["params"]):
            return False
        parted = [shard(found, self.param_groups) for found in (self._anchors, self._weights)]
        return any(parted)

    def _begin_update(self) -> bool:
        """Check the gradients, then count the update. False if there is none to make."""
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

    def _anchored_parameters(self) -> Iterator[tuple[Tensor, Tensor]]:
        for group, anchors in zip(self.param_groups, self._anchors, strict=True):
            for p, anchor in zip(group["params"], anchors, strict=True):
                if anchor is not None:
                    yield p, anchor

    def distance(self) -> float:
        """‖θ − θ*‖ over all anchored parameters."""
        if self._released:
            raise RuntimeError("the anchors were let go: compare with a Reference of your own")
        return math.hypot(*(distance(p, anchor) for p, anchor in self._anchored_parameters()))

    def _take_fingerprints(self) -> None:
        for group, anchors in zip(self.param_groups, self._anchors, strict=True):
            if group["anchor_fingerprint"] is None:
                group["anchor_fingerprint"] = group_fingerprint(group, anchors)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain Python values; of the anchors a fingerprint only."""
        self._take_fingerprints()
        # Before the user's own hooks, so that they see what is saved.
        handle = self.register_state_dict_post_hook(_make_plain, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state. Refuses, unchanged, a state of other pretrained weights."""
        if self._released:
            raise ValueError(
                "the anchors were let go, and a saved state may need them: make the optimizer "
                "anew, from the pretrained weights, and load the state into that"
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

        # Behind the user's own hooks, which may have renamed or changed things.
        handle = self.register_load_state_dict_pre_hook(receive)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        # torch has cast the state to the dtype of its parameter: take it again.
        wanted = None if self.state_dtype == "8bit" else self.state_dtype
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            for p, index in zip(group["params"], saved["params"], strict=True):
                for key, value in loaded["state"].get(index, {}).items():
                    if key != "step" and isinstance(value, Tensor):
                        self.state[p][key] = value.to(p.device, wanted or value.dtype)

    def _check_saved_state(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Refuse a state that is not for this optimizer; extended by each method."""

    def _check_saved(self, saved: list[dict[str, Any]]) -> None:
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


def _make_plain(_: Optimizer, saved: dict[str, Any]) -> None:
    """Leave only what torch.load(weights_only=True) reads."""
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
