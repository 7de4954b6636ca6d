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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from holdfast._checks import at_least_zero
from holdfast._fingerprint import tensor_fingerprint
from holdfast._names import Alignment, align, shorten
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
        state_dtype: dtype of floating-point state; None is the parameter's own.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        anchors: Reference | Mapping[str, Tensor] | None,
        state_dtype: torch.dtype | None,
    ) -> None:
        if isinstance(params, nn.Module):
            raise TypeError("pass the parameters, model.named_parameters(), not the model")
        if anchors is not None and not isinstance(anchors, Mapping):
            raise TypeError(
                "anchors must be a Reference (Reference.open(path), Reference.of(model)) or a "
                f"mapping from parameter names to tensors, got {type(anchors).__name__}"
            )
        if state_dtype not in (None, *_STATE_DTYPES):
            allowed = ", ".join(map(str, _STATE_DTYPES))
            raise ValueError(f"state_dtype must be None or one of {allowed}, got {state_dtype}")
        super().__init__(params, {**defaults, "anchored": True})
        if anchors is not None and not isinstance(anchors, Reference):
            anchors = Reference(anchors)
        self.state_dtype = state_dtype
        self._reference = anchors
        self._alignment: Alignment | None = None
        # By position, beside param_groups: hosts swap the parameters there (FSDP2), and anchors
        # in param_groups would go into every checkpoint. What belongs in a checkpoint, the count
        # of updates and the fingerprint, is in param_groups: distributed checkpoints know no
        # other place.
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
        first = not self._anchors
        new = self.param_groups[len(self._anchors) :]
        if self._reference is None:
            found = [
                [p.detach().clone() if group["anchored"] else None for p in group["params"]]
                for group in new
            ]
        else:
            if first and "param_names" in new[0]:
                # One prefix holds for the whole model, for groups that come later too.
                names = [n for g in new if g["anchored"] for n in g["param_names"]]
                self._alignment = align(names, self._reference)
            found = [self._match(self._reference, group) for group in new]
            anchored = [
                (label, a)
                for group, anchors in zip(new, found, strict=True)
                if group["anchored"]
                for label, a in zip(self._labels(group), anchors, strict=True)
            ]
            free = [label for label, a in anchored if a is None]
            if first and anchored and len(free) == len(anchored):
                raise ValueError(self._reference.nothing_matches(free))
            if free:
                warnings.warn(
                    f"{len(free)} parameters have no anchor and are updated without a pull: "
                    f"{', '.join(free)}",
                    stacklevel=4,
                )
        self._anchors.extend(found)
        for group in new:
            group["anchor_fingerprint"] = None  # taken when first asked for: it reads every anchor

    def _match(self, reference: Reference, group: dict[str, Any]) -> list[Tensor | None]:
        params = group["params"]
        if not group["anchored"]:
            return [None] * len(params)
        anchors = reference.match(params, group.get("param_names"), self._alignment)
        # A mapping may hold the live tensors themselves (model.state_dict()): as anchors they
        # would move with the weights.
        live = {p.untyped_storage().data_ptr() for g in self.param_groups for p in g["params"]}
        return [
            a.clone() if a is not None and a.untyped_storage().data_ptr() in live else a
            for a in anchors
        ]

    def _labels(self, group: dict[str, Any]) -> list[str]:
        """The parameters' names, or where they are not known their numbers."""
        if names := group.get("param_names"):
            return list(names)
        known = self._reference.name_of if self._reference is not None else lambda _: None
        return [known(p) or f"parameter {i}" for i, p in enumerate(group["params"])]

    def _share_update_count(self, updates: int | Tensor) -> None:
        """One count of updates, shared by all groups, so that late ones do not start over."""
        params = (p for group in self.param_groups for p in group["params"])
        capturable = any(group.get("capturable") for group in self.param_groups)
        device = next(params).device if capturable else "cpu"
        count = torch.as_tensor(updates, dtype=torch.int64).to(device)
        for group in self.param_groups:
            group["updates"] = count

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
        if not grads or self._only_makes_state(grads):
            return False
        self.param_groups[0]["updates"].add_(1)
        return True

    def _only_makes_state(self, grads: list[Tensor]) -> bool:
        """Distributed checkpointing calls step() with lr 0 and zero gradients to have state made.

        A warm-up may begin with lr 0 too, but not with gradients that are all zero.
        """
        if torch.compiler.is_compiling() or any(
            isinstance(g["lr"], Tensor) or g["lr"] != 0 for g in self.param_groups
        ):
            return False
        return not any(bool(g.any()) for g in grads)

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
                group["anchor_fingerprint"] = " ".join(
                    tensor_fingerprint(p.shape, a)
                    for p, a in zip(group["params"], anchors, strict=True)
                )
        # Before the user's own hooks, so that they see what is saved.
        handle = self.register_state_dict_post_hook(_make_plain, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state. Refuses, unchanged, a state of other pretrained weights."""
        loaded: dict[str, Any] = {}

        def receive(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            groups = [dict(group) for group in given["param_groups"]]
            self._check_saved(groups)
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
        # torch has cast the floating-point state to the dtype of its parameter: take it again.
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            for p, index in zip(group["params"], saved["params"], strict=True):
                for key, value in loaded["state"].get(index, {}).items():
                    if key != "step" and isinstance(value, Tensor) and value.is_floating_point():
                        dtype = self.state_dtype or value.dtype
                        self.state[p][key] = value.to(device=p.device, dtype=dtype)

    def _check_saved(self, saved: list[dict[str, Any]]) -> None:
        own = self.state_dict()["param_groups"]
        sizes = [[len(g["params"]) for g in groups] for groups in (saved, own)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                "the saved state is of another model or other groups: it has "
                f"{sizes[0]} parameters a group, this optimizer {sizes[1]}"
            )
        if any("anchor_fingerprint" not in group for group in saved):
            raise ValueError(
                f"the saved state is not {type(self).__name__}'s: it has no anchor fingerprint"
            )
        labels = [
            f"{label} of group {i}"
            for i, group in enumerate(self.param_groups)
            for label in self._labels(group)
        ]
        theirs, ours = (
            [x for g in groups for x in g["anchor_fingerprint"].split()] for groups in (saved, own)
        )
        other = [n for n, a, b in zip(labels, theirs, ours, strict=True) if a != b]
        if other:
            which = "all of them" if len(other) == len(labels) else shorten(other)
            raise ValueError(
                "the saved state was made with other anchors than this optimizer has, for "
                f"{which}. Anchors are the pretrained weights, not those of a checkpoint: make the "
                "optimizer before loading tuned weights, or pass the pretrained Reference, "
                "anchors=Reference.open(pretrained_directory). Is it only a new head, drawn at "
                "random? Leave it without anchors from the start: Reference.of(model, "
                'without="classifier"), or {"params": head, "anchored": False}'
            )

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps only defaults, state and param_groups when it copies and pickles.
        ours = ("state_dtype", "_reference", "_alignment", "_anchors")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in ours}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
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
