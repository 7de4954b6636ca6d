"""A tensor of a Reference for each parameter of an optimizer, and its trace in checkpoints.

Shared by the optimizers that know θ* and by the penalties in any optimizer's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from holdfast._torch.fingerprint import tensor_fingerprint
from holdfast._torch.names import Alignment, align, shorten
from holdfast._torch.sharding import is_sharded, like, storage_of, whole
from holdfast.reference import Reference

Group = dict[str, Any]
Found = list[list[Tensor | None]]


@dataclass
class Matcher:
    """Finds the tensors of a Reference for the parameters of groups, None where there is none.

    One prefix holds for the whole model, for groups that come later too. If the first groups have
    no tensor at all, that is an error.
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
            raise ValueError(self.nothing_matches([n for g in groups for n in self.labels(g)]))
        self.began = True
        # A mapping may hold the live tensors (model.state_dict()), which move with the weights.
        live = {storage_of(p) for group in groups for p in group["params"]}
        return [
            [t.clone() if t is not None and storage_of(t) in live else t for t in tensors]
            for tensors in found
        ]

    def labels(self, group: Group) -> list[str]:
        """The parameters' names, or where they are not known their numbers."""
        return labels(group, self.reference)

    def nothing_matches(self, names: Sequence[str]) -> str:
        """The error message for when not one parameter has a tensor."""
        return self.reference.nothing_matches(names)


class Importances(Matcher):
    """The same for how much each coordinate matters; the values are checked."""

    def __call__(self, groups: Sequence[Group]) -> Found:
        try:
            found = super().__call__(groups)
        except ValueError as error:
            raise ValueError(f"importance: {error}") from error
        for group, weights in zip(groups, found, strict=True):
            for label, weight in zip(self.labels(group), weights, strict=True):
                if weight is not None and not bool((weight.isfinite() & (weight >= 0)).all()):
                    raise ValueError(f"the importance of {label} must be finite and ≥ 0")
        return found

    def nothing_matches(self, names: Sequence[str]) -> str:
        """The error message for when not one parameter has an importance."""
        known = shorten(list(self.reference))
        return f"no parameter has one. Parameters: {shorten(names)}. Importance of: {known}"


def labels(group: Group, reference: Reference | None) -> list[str]:
    """The names of a group's parameters, or where they are not known their numbers."""
    if names := group.get("param_names"):
        return list(names)
    names = [None if reference is None else reference.name_of(p) for p in group["params"]]
    return [name or f"parameter {i}" for i, name in enumerate(names)]


def group_fingerprint(group: Group, anchors: Sequence[Tensor | None]) -> str:
    """Of each parameter's shape and anchor, in order, parted by spaces."""
    return " ".join(
        tensor_fingerprint(p.shape, a) for p, a in zip(group["params"], anchors, strict=True)
    )


def refuse_other_groups(saved: Sequence[Group], own: Sequence[Group]) -> None:
    """Raise if a saved state is of groups of other sizes."""
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, own)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            "the saved state is of another model or other groups: it has "
            f"{sizes[0]} parameters a group, this optimizer {sizes[1]}"
        )


def refuse_other_anchors(
    saved: Sequence[str], own: Sequence[str], labels: Sequence[Sequence[str]], how: str
) -> None:
    """Raise if fingerprints differ, a text for each group; ``how`` says how to pass θ*."""
    names = [f"{label} of group {i}" for i, group in enumerate(labels) for label in group]
    theirs, ours = ([x for text in texts for x in text.split()] for texts in (saved, own))
    other = [name for name, a, b in zip(names, theirs, ours, strict=True) if a != b]
    if other:
        which = "all of them" if len(other) == len(names) else shorten(other)
        raise ValueError(
            "the saved state was made with other anchors than this optimizer has, for "
            f"{which}. Anchors are the pretrained weights, not those of a checkpoint: make the "
            "optimizer before loading tuned weights, or pass the pretrained Reference, "
            f"{how}. Is it only a new head, drawn at random? Leave it without anchors from the "
            'start: Reference.of(model, without="classifier")'
        )


def only_makes_state(optimizer: Optimizer, grads: Sequence[Tensor]) -> bool:
    """Distributed checkpointing calls step() with lr 0 and zero gradients to have state made.

    A warm-up may begin with lr 0 too, but not with gradients that are all zero.
    """
    if torch.compiler.is_compiling() or any(
        isinstance(g["lr"], Tensor) or g["lr"] != 0 for g in optimizer.param_groups
    ):
        return False
    return not any(bool(whole(g.any())) for g in grads)


def shard(found: Found, groups: Sequence[Group]) -> bool:
    """Part tensors as the parameters that they go with are parted by now. True if there were any.

    Hosts shard a model after the optimizer is made.
    """
    sharded = False
    for group, tensors in zip(groups, found, strict=True):
        for i, (p, tensor) in enumerate(zip(group["params"], tensors, strict=True)):
            if tensor is not None and is_sharded(p) and not is_sharded(tensor):
                tensors[i] = like(tensor, p, tensor.dtype)
                sharded = True
    return sharded


def part_anchored(groups: Sequence[Group], reference: Reference) -> list[Group]:
    """Groups of named parameters, each parted into what has an anchor and what has none."""
    named = [row for group in groups for row in group["params"]]
    anchors = reference.match([p for _, p in named], [name for name, _ in named])
    has = {name: anchor is not None for (name, _), anchor in zip(named, anchors, strict=True)}
    parts = [
        {**group, "params": [row for row in group["params"] if has[row[0]] == anchored]}
        | {"anchored": anchored}
        for group in groups
        for anchored in (True, False)
    ]
    return [part for part in parts if part["params"]]
