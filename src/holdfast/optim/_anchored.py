"""What optimizers that know the pretrained weights have in common.

Anchors (one tensor for each parameter, or None), one count of updates for all groups, and
checkpoints that carry a fingerprint of the anchors instead of a copy. A method defines its
hyper-parameters, ``_check_group`` and ``step``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from holdfast._fingerprint import fingerprint
from holdfast._names import shorten
from holdfast.anneal import Anneal
from holdfast.reference import Reference, distance


class AnchoredOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` whose parameters have anchors θ*.

    Args:
        params: as in torch; groups may say ``anchored=False``.
        defaults: the method's hyper-parameters.
        anchors: a Reference, a mapping from names to tensors, or None for the values now.
        state_dtype: dtype of floating-point state; None is the parameter's own.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        anchors: Reference | Mapping[str, Tensor] | None,
        state_dtype: torch.dtype | None,
    ) -> None:
        if anchors is not None and not isinstance(anchors, Mapping):
            raise TypeError(
                "anchors must be a Reference or a mapping from parameter names to tensors, "
                f"got {type(anchors).__name__}"
            )
        if state_dtype is not None and not state_dtype.is_floating_point:
            raise ValueError(f"state_dtype must be a floating-point dtype, got {state_dtype}")
        super().__init__(params, {**defaults, "anchored": True})
        if anchors is not None and not isinstance(anchors, Reference):
            anchors = Reference(anchors)
        self.state_dtype = state_dtype
        self._reference = anchors
        # By position, beside param_groups and not in them: hosts swap the parameters there
        # (FSDP2), and whatever is in param_groups goes into every checkpoint.
        self._anchors: list[list[Tensor | None]] = []
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
        """Validate a group; extended by each method."""
        require_numbers(group, "lr")
        if unfit := [p.dtype for p in group["params"] if not p.is_floating_point()]:
            raise ValueError(
                f"{type(self).__name__} takes real floating-point parameters, got {unfit[0]}"
            )
        names = [n for g in self.param_groups for n in g.get("param_names", ())]
        if duplicates := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"duplicate parameter names: {shorten(duplicates)}")

    def _anchor_new_groups(self) -> None:
        """Find the anchors of the groups that have none yet. Changes nothing if it fails."""
        new = self.param_groups[len(self._anchors) :]
        if self._reference is None:
            found = [
                [p.detach().clone() if group["anchored"] else None for p in group["params"]]
                for group in new
            ]
        else:
            found = self._resolve(self._reference)[len(self._anchors) :]
        self._anchors.extend(found)
        for group in new:
            group["anchor_fingerprint"] = None  # taken when first asked for: it reads every anchor

    def _resolve(self, reference: Reference) -> list[list[Tensor | None]]:
        """The anchors of all groups, looked up together: one prefix holds for the whole model."""
        anchored = [g for g in self.param_groups if g["anchored"]]
        params = [p for g in anchored for p in g["params"]]
        names = [n for g in anchored for n in g.get("param_names", ())]
        anchors = reference.resolve(params, names or None) if params else []
        free = [i for i, a in enumerate(anchors) if a is None]
        if free:
            which = [names[i] if names else f"parameter {i}" for i in free]
            warnings.warn(
                f"{len(free)} parameters have no anchor and are updated without one: "
                f"{shorten(which)}",
                stacklevel=5,
            )
        # A mapping may hold the live tensors themselves (model.state_dict()): as anchors they
        # would move with the weights.
        live = {p.untyped_storage().data_ptr() for p in params}
        apart = iter(
            a.clone() if a is not None and a.untyped_storage().data_ptr() in live else a
            for a in anchors
        )
        return [
            [next(apart) if group["anchored"] else None for _ in group["params"]]
            for group in self.param_groups
        ]

    def _share_update_count(self, updates: int | Tensor) -> None:
        """One count of updates, shared by all groups, so that late ones do not start over."""
        first = self.param_groups[0]
        device = first["params"][0].device if first.get("capturable") else "cpu"
        count = torch.as_tensor(updates, dtype=torch.int64).to(device)
        for group in self.param_groups:
            group["updates"] = count

    def _begin_update(self) -> None:
        """Check the gradients, then count the update if there is one to make."""
        grads = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if any(g.layout is not torch.strided for g in grads):
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients: make the embedding "
                "with sparse=False"
            )
        if grads:
            self.param_groups[0]["updates"].add_(1)

    def _anchored_parameters(self) -> Iterator[tuple[Tensor, Tensor]]:
        for group, anchors in zip(self.param_groups, self._anchors, strict=True):
            for p, anchor in zip(group["params"], anchors, strict=True):
                if anchor is not None:
                    yield p, anchor

    def distance(self) -> float:
        """‖θ − θ*‖ over all anchored parameters."""
        return math.hypot(*(distance(p, anchor) for p, anchor in self._anchored_parameters()))

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain Python values; of the anchors a fingerprint only."""
        for group, anchors in zip(self.param_groups, self._anchors, strict=True):
            if group["anchor_fingerprint"] is None:
                group["anchor_fingerprint"] = fingerprint(
                    (tuple(p.shape), a) for p, a in zip(group["params"], anchors, strict=True)
                )
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group["updates"] = int(group["updates"])
            if isinstance(group.get("anneal"), Anneal):
                group["anneal"] = group["anneal"].to_dict()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state. Refuses, unchanged, a state of other pretrained weights."""
        saved_groups = [dict(group) for group in state_dict["param_groups"]]
        self._check_saved(saved_groups)
        for group in saved_groups:
            group.pop("param_names", None)  # the live model's names stay
            if isinstance(group.get("anneal"), dict):
                group["anneal"] = Anneal.from_dict(group["anneal"])
        super().load_state_dict({**state_dict, "param_groups": saved_groups})
        self._share_update_count(saved_groups[0]["updates"])

        # torch has cast the floating-point state to the dtype of its parameter: take it again.
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            for p, index in zip(group["params"], saved_group["params"], strict=True):
                for key, value in state_dict["state"].get(index, {}).items():
                    if key != "step" and isinstance(value, Tensor) and value.is_floating_point():
                        dtype = self.state_dtype or value.dtype
                        self.state[p][key] = value.to(device=p.device, dtype=dtype)

    def _check_saved(self, saved_groups: list[dict[str, Any]]) -> None:
        own_groups = self.state_dict()["param_groups"]
        sizes = [[len(g["params"]) for g in groups] for groups in (saved_groups, own_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                "the saved state is of another model or other groups: it has "
                f"{sizes[0]} parameters a group, this optimizer {sizes[1]}"
            )
        if any("anchor_fingerprint" not in group for group in saved_groups):
            raise ValueError(
                f"the saved state is not {type(self).__name__}'s: it has no anchor fingerprint"
            )
        fingerprints = [
            [g["anchor_fingerprint"] for g in groups] for groups in (saved_groups, own_groups)
        ]
        if fingerprints[0] != fingerprints[1]:
            raise ValueError(
                "the saved state was made with other anchors than this optimizer has. Anchors are "
                "the pretrained weights, not those of a checkpoint: make the optimizer before "
                "loading tuned weights, or pass the pretrained Reference, "
                "anchors=Reference.open(pretrained_directory)"
            )

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps only defaults, state and param_groups when it copies and pickles.
        ours = ("state_dtype", "_reference", "_anchors")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in ours}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share_update_count(self.param_groups[0]["updates"])


def require_numbers(group: dict[str, Any], *names: str) -> None:
    """Every named hyper-parameter must be a finite number ≥ 0."""
    for name in names:
        value = group[name]
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number ≥ 0, got {value!r}")
