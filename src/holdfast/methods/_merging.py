"""Merge a tuned model with the pretrained weights in memory, tensor by tensor."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from holdfast._torch.adapters import adapter_parameters, has_adapters, not_linear
from holdfast._torch.dtypes import wide
from holdfast._torch.layout import like, local, whole
from holdfast._torch.merging import Where, between, places
from holdfast.data import Collate
from holdfast.methods._batch_norm import statistics_of
from holdfast.reference import Reference
from holdfast.stages import Merging, Recipe, Result


class Pair(NamedTuple):
    """A tensor of a tuned model, its pretrained values, and where it is."""

    tensor: Tensor
    base: Tensor
    where: Where


@dataclass(frozen=True)
class TensorMerging(Merging):
    """A method that overrides ``scale`` or ``merged_slice``: both define the merged tensors."""

    needs_reference: ClassVar[bool] = True

    def conflict(self, recipe: Recipe) -> str | None:
        if self.least_models > 1:
            return (
                f"{type(self).__name__} merges {self.least_models} or more tuned models, but a "
                "recipe trains one: train them one by one, then use 'holdfast merge'"
            )
        return self._refused if recipe.trainable.keeps_base else None

    def unfit(self, model: nn.Module, has_old_data: bool) -> str | None:
        if has_adapters(model) and (reason := self._refused or not_linear(model)):
            return reason
        return self.unfit_tensors(places(name for name, _ in model.named_parameters()).values())

    def merge(
        self,
        model: nn.Module,
        reference: Reference | None,
        *,
        data: Any = None,
        collate: Collate | None = None,
    ) -> nn.Module:
        """Merge a tuned model in place; of LoRA adapters, only B is scaled.

        The reference may be None if only LoRA adapters were trained. With other adapters, it holds
        the values of their parameters at which they change nothing.
        """
        if reason := self.unfit(model, has_old_data=False):
            raise ValueError(reason)
        for pair in self._pairs(model, reference):
            merge_tensor(self, pair)
        return model

    def sweep(
        self,
        model: nn.Module,
        reference: Reference | None,
        values: Sequence[float],
        evaluate: Callable[[nn.Module], Result],
        *,
        data: Any = None,
        collate: Collate | None = None,
    ) -> dict[float, Result]:
        """Evaluate the model at several values of a setting, and restore the tuned model.

        The setting is :attr:`swept`; the other arguments are as in :meth:`merge`.
        """
        if self.swept is None:
            return super().sweep(model, reference, values, evaluate)
        merges = {value: replace(self, **{self.swept: value}) for value in values}
        for method in merges.values():  # before the first evaluation
            method._check_data(model, data)
        changed = [pair.tensor for pair in self._pairs(model, reference)]
        changed += [buffer for norm in statistics_of(model) for buffer in norm.buffers()]
        tuned = copies_of(changed)
        results: dict[float, Result] = {}
        try:
            for value, method in merges.items():
                method.merge(model, reference, data=data, collate=collate)
                results[value] = evaluate(model)
                restore(changed, tuned)
        finally:
            restore(changed, tuned)
        return results

    def _pairs(self, model: nn.Module, reference: Reference | None) -> list[Pair]:
        return [*pairs_of(model, reference, buffers=self.interpolates)]

    def _check_data(self, model: nn.Module, data: Any) -> None:
        """Raise if the method needs data that was not passed."""

    @property
    def _refused(self) -> str | None:
        """Why the method cannot merge adapters; None if it can."""
        if self.interpolates:
            return None
        name = type(self).__name__
        return (
            f"{name} needs the effective weights, and adapters are factors of their change: "
            f"train without {name}, then use 'holdfast merge', which also reads adapters"
        )


def pairs_of(model: nn.Module, reference: Reference | None, *, buffers: bool) -> Iterator[Pair]:
    """The tensors of a tuned model that a merge changes, each with its pretrained values.

    Of LoRA adapters this is B, of others the parameters that the reference knows. Parameters
    without pretrained values (a new head) are left out, and so are the rows of new tokens.
    """
    named: dict[str, Tensor] = dict(model.named_parameters())
    where = places([*named, *(name for name, _ in model.named_buffers())])
    if reason := not_linear(model, reference):
        raise ValueError(reason)
    adapters = {name: (p, is_b) for name, p, is_b in adapter_parameters(model)}
    scaled = {name: p for name, (p, is_b) in adapters.items() if is_b}
    for name, b in scaled.items():
        yield Pair(b, torch.zeros(()).expand_as(b), where[name])
    if reference is None:
        if not scaled:
            raise ValueError("a merge needs the pretrained weights: pass the Reference")
        return
    # A quantized base has integer weights. It is frozen and needs no merge.
    named = {name: p for name, p in named.items() if name not in adapters}
    if buffers:
        named |= dict(model.named_buffers())
    named = {name: t for name, t in named.items() if t.is_floating_point()}
    pairs = reference.shared([*named.values()], [*named])
    if not scaled and all(pair is None for pair in pairs):
        raise ValueError(reference.nothing_matches([*named]))
    for name, pair in zip(named, pairs, strict=True):
        if pair is not None:
            yield Pair(*pair, where[name])


@torch.no_grad()
def merge_tensor(method: Merging, pair: Pair) -> None:
    """Set a tensor to its merged values, which are those that a merge on disk computes."""
    tensor, base, where = pair
    if (scale := method.scale(where)) is not None:
        interpolate([pair], scale)
        return
    # Whole tensors, not the shards of each rank.
    before, after = whole(base), whole(tensor)
    dtype = wide(before, after)
    flat = [t.to(after.device, dtype).reshape(-1) for t in (before, after)]
    merged = method.merged(where, flat[0], flat[1:]).view(after.shape)
    tensor.copy_(like(merged.to(tensor.dtype), tensor))


@torch.no_grad()
def interpolate(pairs: Iterable[Pair], scale: float) -> None:
    """θ ← θ* + s·(θ − θ*), to the last bit at the ends."""
    for tensor, base, _ in pairs:
        if scale != 1:
            dtype = wide(tensor, base)
            tensor.copy_(between(like(base, tensor, dtype), tensor.to(dtype), scale))


def copies_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies in CPU memory, because the device may be full; of sharded tensors, the shards."""
    return [local(tensor).detach().to("cpu", copy=True) for tensor in tensors]


@torch.no_grad()
def restore(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Set tensors to the copies that :func:`copies_of` has made of them."""
    for tensor, copy in zip(tensors, copies, strict=True):
        local(tensor).copy_(copy)
