"""Points between the pretrained and the tuned weights, θ = α·θ₁ + (1−α)·θ*."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from holdfast._torch.adapters import adapter_parameters
from holdfast._torch.layout import like, local
from holdfast.reference import Reference

Pairs = Sequence[tuple[Tensor, Tensor]]


def pairs_to_interpolate(
    model: nn.Module, reference: Reference | None, *, buffers: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of a tuned model that change with α, each with its value at α = 0.

    Of LoRA adapters this is B. Parameters without pretrained values (a new head) are left out, and
    so are the rows of new tokens.
    """
    adapters = {name: (p, is_b) for name, p, is_b in adapter_parameters(model)}
    scaled = [p for p, is_b in adapters.values() if is_b]
    yield from ((b, torch.zeros(()).expand_as(b)) for b in scaled)
    if reference is None:
        if not scaled:
            raise ValueError("an interpolation needs the pretrained weights: pass the Reference")
        return
    # A quantized base has integer weights. It is frozen and needs no interpolation.
    named: list[tuple[str, Tensor]] = [
        (n, p) for n, p in model.named_parameters() if n not in adapters
    ]
    if buffers:
        named += list(model.named_buffers())
    named = [(n, t) for n, t in named if t.is_floating_point()]
    names, tensors = [n for n, _ in named], [t for _, t in named]
    pairs = reference.shared(tensors, names)
    if not scaled and all(pair is None for pair in pairs):
        raise ValueError(reference.nothing_matches(names))
    yield from filter(None, pairs)


@torch.no_grad()
def interpolate(pairs: Pairs, alpha: float) -> None:
    """θ ← α·θ + (1−α)·θ*, to the last bit at the ends."""
    for tensor, base in pairs:
        if alpha == 0:
            tensor.copy_(base)
        elif alpha != 1:
            tensor.copy_(torch.lerp(like(base, tensor), tensor, alpha))


def copies_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies in CPU memory, because the device may be full; of sharded tensors, the shards."""
    return [local(tensor).detach().to("cpu", copy=True) for tensor in tensors]


@torch.no_grad()
def restore(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Set tensors to the copies that :func:`copies_of` has made of them."""
    for tensor, copy in zip(tensors, copies, strict=True):
        local(tensor).copy_(copy)
