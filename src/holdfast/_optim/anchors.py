"""The pretrained weights θ* of an optimizer's parameters, and their fingerprint in checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from holdfast._torch.fingerprint import tensor_fingerprints
from holdfast._torch.layout import is_sharded, like, storage_of
from holdfast._torch.names import Alignment, align, shorten
from holdfast.reference import Reference

Group = dict[str, Any]
#: One tensor or None per parameter of each group.
Found = list[list[Tensor | None]]


class Anchors:
    """The anchor θ* of each parameter, and importances of its coordinates.

    They are kept by position, beside ``param_groups``: hosts swap the parameters there (FSDP2), and
    tensors there would be saved in every checkpoint. A fingerprint of the anchors is in
    ``param_groups[i][key]``, the only place that distributed checkpoints save. Without a reference,
    the anchors are the current values. If ``required``, the first groups must have an anchor.
    """

    def __init__(
        self,
        key: str,
        reference: Reference | Mapping[str, Tensor] | None,
        importances: Sequence[Reference | Mapping[str, Tensor] | None],
        *,
        required: bool = True,
    ) -> None:
        reference = _as_reference("anchors", reference)
        given = [_as_reference("importance", importance) for importance in importances]
        self.key, self.reference, self.released = key, reference, False
        self.values: Found = []
        self.importances: list[Found] = [[] for _ in importances]
        self._matchers = [
            None if reference is None else Matcher(reference, began=not required),
            *(None if one is None else Importances(one) for one in given),
        ]

    def match(self, groups: Sequence[Group]) -> list[Found]:
        """The anchors of some groups, and their importances; :meth:`add` keeps them."""
        if not groups:
            return [[] for _ in self._matchers]
        found: list[Found] = [
            [[None] * len(group["params"]) for group in groups] if of is None else of(groups)
            for of in self._matchers
        ]
        if self._matchers[0] is None:
            found[0] = [[p.detach().clone() for p in group["params"]] for group in groups]
        return found

    def add(self, matched: Sequence[Found]) -> None:
        for kept, found in zip((self.values, *self.importances), matched, strict=True):
            kept += found

    def shard(self, groups: Sequence[Group]) -> bool:
        """Shard as the host sharded the parameters since. True if any tensor changed."""
        changed = False
        for found in (self.values, *self.importances):
            for group, tensors in zip(groups, found, strict=True):
                for i, (p, tensor) in enumerate(zip(group["params"], tensors, strict=True)):
                    if tensor is not None and is_sharded(p) and not is_sharded(tensor):
                        tensors[i] = like(tensor, p, tensor.dtype)
                        changed = True
        return changed

    def release(self, groups: Sequence[Group]) -> None:
        """Free all tensors permanently; checkpoints keep the fingerprint."""
        self.take_fingerprints(groups)
        for found in (self.values, *self.importances):
            for tensors in found:
                tensors[:] = [None] * len(tensors)
        self._matchers, self.reference = [None] * len(self._matchers), None
        self.released = True

    def take_fingerprints(self, groups: Sequence[Group]) -> None:
        """Store the fingerprints that are still None. Call it late: it reads every anchor."""
        for group, anchors in zip(groups, self.values, strict=True):
            if group[self.key] is None:
                group[self.key] = _fingerprint(group, anchors)

    def check_saved(
        self, saved: Sequence[Group], groups: Sequence[Group], missing: str, how: str
    ) -> None:
        """Raise if saved groups have other sizes or anchors.

        ``missing`` is the error if they have no fingerprint. ``how`` shows how to pass θ*.
        """
        sizes = [[len(group["params"]) for group in some] for some in (saved, groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                "the saved state belongs to another model or other groups: it has "
                f"{sizes[0]} parameters per group, this optimizer {sizes[1]}"
            )
        if any(self.key not in group for group in saved):
            raise ValueError(missing)
        own = [_fingerprint(g, found) for g, found in zip(groups, self.values, strict=True)]
        of = [labels(group, self.reference) for group in groups]
        names = [f"{label} of group {i}" for i, found in enumerate(of) for label in found]
        theirs = " ".join(g[self.key] or text for g, text in zip(saved, own, strict=True))
        rows = zip(names, theirs.split(), " ".join(own).split(), strict=True)
        other = [name for name, a, b in rows if a != b]
        if other:
            which = "all of them" if len(other) == len(names) else shorten(other)
            raise ValueError(
                "the saved state was made with other anchors than this optimizer has, for "
                f"{which}. Anchors are the pretrained weights, not those of a checkpoint: make the "
                "optimizer before loading tuned weights, or pass the pretrained Reference, "
                f"{how}. If only a randomly initialized head differs, leave it without anchors "
                'from the start: Reference.of(model, without="classifier")'
            )


@dataclass
class Matcher:
    """Finds the tensor of a Reference for each parameter of some groups; None where it has none.

    One name prefix holds for the whole model, also for groups that are added later. It is an error
    if the first groups match no tensor at all.
    """

    reference: Reference
    alignment: Alignment | None = None
    began: bool = False
    what: ClassVar[str] = "anchor"

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
            raise ValueError(self.reference.nothing_matches(known, self.what))
        self.began = True
        # A mapping may hold the live tensors (model.state_dict()), which move with the weights.
        live = {storage_of(p) for group in groups for p in group["params"]}
        return [
            [t.clone() if t is not None and storage_of(t) in live else t for t in tensors]
            for tensors in found
        ]


class Importances(Matcher):
    """The same for the importance of each coordinate; the values are checked."""

    what = "importance"

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


def labels(group: Group, reference: Reference | None) -> list[str]:
    """The names of a group's parameters, or their numbers where the names are unknown."""
    if names := group.get("param_names"):
        return list(names)
    names = [None if reference is None else reference.name_of(p) for p in group["params"]]
    return [name or f"parameter {i}" for i, name in enumerate(names)]


def _fingerprint(group: Group, anchors: Sequence[Tensor | None]) -> str:
    """The fingerprints of each parameter's shape and anchor, in order, separated by spaces."""
    shapes = [p.shape for p in group["params"]]
    return " ".join(tensor_fingerprints(zip(shapes, anchors, strict=True)))


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


def _as_reference(name: str, given: Reference | Mapping[str, Tensor] | None) -> Reference | None:
    if given is None or isinstance(given, Reference):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{name} must be a Reference, such as Reference.open(path), or a mapping from "
            f"parameter names to tensors, got {type(given).__name__}"
        )
    return Reference(given)
