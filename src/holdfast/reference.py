"""The pretrained weights θ*, by parameter name, in memory or on disk.

>>> import torch, holdfast
>>> model = torch.nn.Linear(3, 2)
>>> reference = holdfast.Reference.of(model)          # a copy of the weights as they are now
>>> _ = model.weight.data.add_(1.0)
>>> round(reference.distance(model).total, 4)         # ‖θ − θ*‖ = √6
2.4495
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from holdfast._torch.checks import did_you_mean
from holdfast._torch.dtypes import wide
from holdfast._torch.fingerprint import fingerprint
from holdfast._torch.layers import within
from holdfast._torch.layout import is_sharded, like, storage_of, whole
from holdfast._torch.names import Alignment, align, shorten
from holdfast._torch.vocabulary import TokenRows, token_rows
from holdfast.io.files import write_whole
from holdfast.io.safetensors_files import map_safetensors


@dataclass(frozen=True)
class Distance:
    """The distance of a model from its pretrained weights, over the parameters that have them.

    Attributes:
        total: ‖θ − θ*‖, the Euclidean distance over all of them.
        relative: total / ‖θ*‖.
        per_parameter: the same distance for each parameter, by the model's own name.
        relative_per_parameter: each parameter's distance divided by its pretrained norm.
        without_anchor: parameters without a pretrained counterpart, which are not counted.
    """

    total: float
    relative: float
    per_parameter: dict[str, float] = field(repr=False)
    relative_per_parameter: dict[str, float] = field(repr=False)
    without_anchor: tuple[str, ...]


class Reference(Mapping[str, Tensor]):
    """The pretrained weights θ*, a read-only mapping from parameter name to tensor.

    Build one with :meth:`of` (from a live model, before training) or :meth:`open` (from
    safetensors files, memory-mapped), or pass a mapping, whose tensors are not copied. Tensors keep
    their dtype: an anchor in the checkpoint's dtype is exact. Do not modify them.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        if not isinstance(tensors, Mapping):
            raise TypeError(
                f"a Reference maps names to tensors, got {type(tensors).__name__}; for a model use "
                "Reference.of(model)"
            )
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise TypeError(
                    "a Reference must map parameter names to tensors, got "
                    f"{name!r}: {type(tensor).__name__}"
                )
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._owners: MutableMapping[Tensor, str] = {}  # parameter → its anchor
        self._names: MutableMapping[Tensor, str] = {}  # parameter → its own name, anchored or not
        self._path: Path | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        without: str | Sequence[str] = (),
        device: torch.device | str | None = None,
    ) -> Reference:
        """Copy a model's current parameters and saved buffers (BatchNorm's statistics).

        The result also knows the parameters by identity, so it works for optimizers that get
        tensors without names.

        Args:
            model: the model, holding its pretrained weights.
            without: new parts, which have no pretrained weights, such as ``"classifier"``.
            device: the device of the copy. If None, each parameter's own device.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"Reference.of needs a model, got {type(model).__name__}")
        parameters = dict(model.named_parameters())
        if not parameters:
            raise ValueError(f"{type(model).__name__} has no parameters")
        saved = model.state_dict(keep_vars=True)
        buffers = {name: b for name, b in model.named_buffers() if name in saved}
        kept = _leave_out({**parameters, **buffers}, without)
        reference = cls({name: t.detach().to(device=device, copy=True) for name, t in kept.items()})
        names = {p: name for name, p in parameters.items()}
        owners = {p: name for p, name in names.items() if name in kept}
        reference._owners = WeakTensorKeyDictionary(owners)
        reference._names = WeakTensorKeyDictionary(names)
        return reference

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        without: str | Sequence[str] = (),
        device: torch.device | str | None = None,
    ) -> Reference:
        """Open the weights in a safetensors file, or in a directory of them.

        A directory has the layout of Hugging Face: ``model.safetensors``, or shards that
        ``model.safetensors.index.json`` lists.

        Args:
            path: a ``.safetensors`` file or a directory.
            without: parts to leave out, such as the head of another task.
            device: the device into whose memory the weights are read. If None, they are mapped
                from disk: pages are read on use and can be dropped again. Keep the files, and do
                not save a tuned model over them.
        """
        root = Path(path)
        tensors = _leave_out(map_safetensors(root), without)
        if device is not None:
            # copy: a mapped tensor is on "cpu" already, but must be read into memory.
            tensors = {name: t.to(device, copy=True) for name, t in tensors.items()}
        reference = cls(tensors)
        reference._path = root.resolve() if device is None else None
        return reference

    def without(self, parts: str | Sequence[str]) -> Reference:
        """The same tensors without some parts."""
        kept = Reference(_leave_out(self, parts, missing_ok=True))
        owners = {p: name for p, name in self._owners.items() if name in kept}
        kept._owners, kept._names = WeakTensorKeyDictionary(owners), self._names
        kept._path = self._path
        return kept

    def pinned(self) -> Reference:
        """A copy of these weights in page-locked CPU memory, for a GPU to fetch from.

        The copy needs no GPU memory: :class:`~holdfast.RecAdam` fetches the weights in chunks while
        the backward pass runs. (Anchors of sharded parameters are on the GPU.) In CPU memory a
        tensor takes up to twice its size: torch rounds page-locked memory up to a power of 2.

            anchors = Reference.open("pretrained", device="cpu").pinned()
        """
        if not torch.cuda.is_available():
            raise RuntimeError("page-locked memory needs a GPU: leave out .pinned()")
        return self._with({name: tensor.cpu().pin_memory() for name, tensor in self.items()})

    def with_part(self, model: nn.Module, part: str) -> Reference:
        """These weights, with one part replaced by the model's current values."""
        named = [(self._owners.get(p), name, p) for name, p in model.named_parameters()]
        return self._with(
            {key: p.detach().clone() for key, name, p in named if key and within(name, (part,))}
        )

    def apart_from(self, model: nn.Module) -> Reference:
        """These weights, with copies of all tensors that share memory with the model."""
        live = {storage_of(t) for t in [*model.parameters(), *model.buffers()]}
        return self._with({n: t.clone() for n, t in self.items() if storage_of(t) in live})

    def _with(self, changed: dict[str, Tensor]) -> Reference:
        kept = self.without(())
        kept._tensors |= changed
        kept._path = None if changed else self._path
        return kept

    def bind(self, model: nn.Module) -> Reference:
        """Match a model's parameters by identity, for optimizers that get tensors without names.

        >>> import torch, holdfast
        >>> model = torch.nn.Linear(2, 2)
        >>> pretrained = holdfast.Reference({"weight": torch.eye(2)}).bind(model)
        >>> pretrained.match([model.weight, model.bias], None)[1] is None
        True
        """
        names = {p: name for name, p in model.named_parameters()}
        alignment = align(list(names.values()), self)
        anchors = {p: alignment(name) for p, name in names.items()}
        owners = {p: anchor for p, anchor in anchors.items() if anchor is not None}
        if not owners:
            raise ValueError(f"{type(model).__name__} shares no parameter name with the reference")
        self._owners, self._names = WeakTensorKeyDictionary(owners), WeakTensorKeyDictionary(names)
        return self

    def name_of(self, param: Tensor) -> str | None:
        """The name of a parameter of the model that this reference was built from or bound to."""
        return self._names.get(param)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights to one safetensors file, atomically."""
        tensors = {name: t.contiguous().cpu() for name, t in self.items()}
        write_whole(Path(path), lambda beside: save_file(tensors, beside))

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        size = sum(t.numel() for t in self.values())
        where = f"mapped from {self._path}" if self._path else "in memory"
        return f"Reference({len(self)} tensors, {size:,} weights, {where})"

    def __getstate__(self) -> dict[str, Any]:
        # Identities do not survive the process; memory-mapped files are mapped again.
        if self._path is None:
            return {"_tensors": self._tensors, "_owners": {}, "_names": {}, "_path": None}
        names = list(self)  # may be fewer than the files contain
        return {"_path": self._path, "names": names, "fingerprint": self.fingerprint()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["_path"] is None:
            self.__dict__.update(state)
            return
        opened = map_safetensors(state["_path"])
        self.__init__({n: opened[n] for n in state["names"] if n in opened})  # type: ignore[misc]
        self._path = state["_path"]
        if self.fingerprint() != state["fingerprint"]:
            raise ValueError(f"the weights in {self._path} have changed")

    def fingerprint(self) -> str:
        """A short text that is equal for references with the same weights.

        It covers shapes and float32 values in the order of the names, not the names themselves,
        and is the same on every device and after saving and opening again.
        """
        return fingerprint(self[name] for name in sorted(self))

    def distance(self, model: nn.Module) -> Distance:
        """The distance of ``model`` from these weights; ValueError if no parameter matches."""
        pairs, without = self._pairs(model)
        distances = {n: distance(p, a) for n, p, a in pairs}
        norms = {n: distance(torch.zeros_like(a), a) for n, _, a in pairs}
        total, norm = math.hypot(*distances.values()), math.hypot(*norms.values())
        relative = {n: _ratio(d, norms[n]) for n, d in distances.items()}
        return Distance(total, _ratio(total, norm), distances, relative, without)

    def total_distance(self, model: nn.Module) -> float:
        """``distance(model).total`` alone, in one pass, for a log."""
        return math.hypot(*(distance(p, a) for _, p, a in self._pairs(model)[0]))

    def _pairs(self, model: nn.Module) -> tuple[list[tuple[str, Tensor, Tensor]], tuple[str, ...]]:
        """Each parameter with its anchor, and the names of those without one."""
        named = dict(model.named_parameters())
        found = dict(zip(named, self.shared(list(named.values()), list(named)), strict=True))
        if all(pair is None for pair in found.values()):
            raise ValueError(self.nothing_matches(list(named)))
        without = tuple(name for name, pair in found.items() if pair is None)
        return [(name, *pair) for name, pair in found.items() if pair is not None], without

    def match(
        self,
        params: Sequence[Tensor],
        names: Sequence[str] | None,
        alignment: Alignment | None = None,
    ) -> list[Tensor | None]:
        """The anchor of each parameter, by identity if known, else by name; None if it has none.

        ``alignment`` translates the names. If None, it is derived from them. Raises ValueError,
        listing names, if an anchor has the wrong shape.
        """
        anchors = self._anchors(params, names, alignment)
        self._check_shapes(params, names, anchors)
        return anchors

    def shared(
        self, params: Sequence[Tensor], names: Sequence[str]
    ) -> list[tuple[Tensor, Tensor] | None]:
        """Each parameter with its anchor, or the rows of the tokens that both have as views.

        As :meth:`match`, for what needs no whole tensors: the model may have another number of
        tokens than these weights.
        """
        anchors = self._anchors(params, names, None)
        pairs = list(zip(params, anchors, strict=True))
        if sizes := _token_rows(params, names, anchors):
            for i, (p, a) in enumerate(pairs):
                # A slice of a sharded tensor is a copy.
                if a is not None and sizes.explain(a.shape, p.shape) and not is_sharded(p):
                    pairs[i] = p[: sizes.shared], a[: sizes.shared]
        self._check_shapes([p for p, _ in pairs], names, [a for _, a in pairs])
        return [None if a is None else (p, a) for p, a in pairs]

    def _anchors(
        self, params: Sequence[Tensor], names: Sequence[str] | None, alignment: Alignment | None
    ) -> list[Tensor | None]:
        if names is None and not self._owners:
            raise ValueError(
                "anchors are matched by name, but the parameters have no names: pass "
                "model.named_parameters() (or groups of them), or anchors=Reference.of(model), or "
                "anchors=Reference.open(path).bind(model)"
            )
        keys = [self._owners.get(p) for p in params]
        if names is not None:
            alignment = alignment or align(names, self)
            keys = [key or alignment(name) for key, name in zip(keys, names, strict=True)]
        return [None if key is None else self[key] for key in keys]

    def _check_shapes(
        self,
        params: Sequence[Tensor],
        names: Sequence[str] | None,
        anchors: Sequence[Tensor | None],
    ) -> None:
        names = names or [self._names.get(p) or self._owners.get(p) or "" for p in params]
        wrong = [
            f"{name} is {tuple(p.shape)}, its anchor {tuple(a.shape)}"
            for name, p, a in zip(names, params, anchors, strict=True)
            if a is not None and a.shape != p.shape
        ]
        if not wrong:
            return
        hint = 'If that part is new, leave it out: Reference.open(path, without="classifier")'
        if sizes := _token_rows(params, names, anchors):
            hint = (
                f"The model was resized from {sizes.base} to {sizes.tuned} tokens, but each of its "
                "weights needs an anchor: use the model after resizing, Reference.of(model)"
            )
        raise ValueError(f"anchors of the wrong shape: {shorten(wrong, '; ')}. {hint}")

    def nothing_matches(self, names: Sequence[str], what: str = "anchor") -> str:
        """The error message if no parameter has an anchor, or an importance."""
        known = f"{what.capitalize()}s: {shorten(list(self))}"
        return f"no parameter has an {what}. Parameters: {shorten(names)}. {known}"


def _token_rows(
    params: Sequence[Tensor], names: Sequence[str], anchors: Sequence[Tensor | None]
) -> TokenRows | None:
    matched = zip(names, params, anchors, strict=True)
    return token_rows((name, a.shape, p.shape) for name, p, a in matched if a is not None)


def distance(param: Tensor, anchor: Tensor) -> float:
    """‖θ − θ*‖ of one parameter, in at least float32."""
    dtype = wide(param, anchor)
    difference = param.detach().to(dtype) - like(anchor, param, dtype)
    return float(whole(torch.linalg.vector_norm(difference)))


def check_parts(parts: Sequence[str], names: Iterable[str], what: str) -> None:
    """Raise if the model has no such part; the error suggests similar names."""
    names = list(names)
    known = {n.rpartition(".")[0] for n in names} | {n.split(".")[0] for n in names}
    for part in parts:
        if not any(within(name, (part,)) for name in names):
            hint = did_you_mean(part, known, cutoff=0.4)
            raise ValueError(f"{what}={part!r} is not a part of the model{hint}")


def _leave_out(
    tensors: Mapping[str, Tensor], without: str | Sequence[str], *, missing_ok: bool = False
) -> dict[str, Tensor]:
    parts = (without,) if isinstance(without, str) else tuple(without)
    if not missing_ok:
        check_parts(parts, tensors, "without")
    kept = {name: tensor for name, tensor in tensors.items() if not within(name, parts)}
    if not kept:
        raise ValueError(f"without={without!r} excludes all weights")
    return kept


def _ratio(distance: float, norm: float) -> float:
    if norm > 0:
        return distance / norm
    return 0.0 if distance == 0 else math.inf
