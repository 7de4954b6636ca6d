"""Inputs derived from the target's: strongly augmented images, random pieces of token sequences.

The variation of a sample depends on the seed, the update and the content of the sample only. So it
is the same in any micro-batch, on any rank and after a restart. The random numbers are computed on
the device, without a synchronization.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.dtypes import widen

Inputs = Literal["varied", "target"]

_LEAST_PIECE = 3  # tokens, without the first and the last one
_SMALLEST_CROP = 0.1  # of the width and the height
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the increment of SplitMix64


@torch.no_grad()
def varied(inputs: Any, seed: int, update: int, pad_id: int | None = None) -> Any:
    """Return a variation of each sample of a batch.

    - Token sequences: a random contiguous piece between the first and the last token, which stay.
      The result has ``input_ids`` and ``attention_mask``, padded on the right.
    - Images: a mixture of two views of the same image (:func:`_view`).

    Args:
        inputs: the inputs of the model: a tensor of images (N, C, H, W), a mapping that has one, or
            a mapping with ``input_ids``.
        seed, update: determine the variation, with the content of the sample.
        pad_id: the padding token. If None, 0.
    """
    run = seed * 1_000_003 + update
    if _is_image(inputs):
        return _varied_images(inputs, run)
    if isinstance(inputs, Mapping):
        if isinstance(ids := inputs.get("input_ids"), Tensor) and ids.dim() == 2:
            return _pieces(ids, inputs.get("attention_mask"), run, pad_id)
        if len(names := [name for name, value in inputs.items() if _is_image(value)]) == 1:
            return {**inputs, names[0]: _varied_images(inputs[names[0]], run)}
    raise ValueError(
        f"only images (floating-point tensors of shape (N, C, H, W)) and input_ids of shape (N, L) "
        f"can be varied, got {_describe(inputs)}: use inputs='target', or another recall"
    )


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()


def _describe(inputs: Any) -> str:
    if isinstance(inputs, Mapping):
        return ", ".join(f"{name} {_describe(value)}" for name, value in inputs.items())
    if isinstance(inputs, Tensor):
        return f"{str(inputs.dtype).removeprefix('torch.')} {tuple(inputs.shape)}"
    return type(inputs).__name__


def _pieces(ids: Tensor, mask: Tensor | None, run: int, pad_id: int | None) -> dict[str, Tensor]:
    """A piece of each sequence, with the first and the last token of the sequence around it."""
    if mask is None or mask.shape != ids.shape:
        mask = torch.ones_like(ids) if pad_id is None else ids != pad_id
    mask = mask != 0
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    length = mask.sum(1)
    # Where a sequence begins, for padding on the left.
    first = mask.long().argmax(1)
    content = _mixed(ids + (places - first[:, None]) * _GOLDEN)
    start, size = _uniform(_keys((content * mask).sum(1), run), 2).unbind(1)
    inner = (length - 2).clamp(min=0)
    least = inner.clamp(max=_LEAST_PIECE)
    taken = least + (size * (inner - least + 1)).long()
    begin = (start * (inner - taken + 1)).long()

    source = (begin[:, None] + places).masked_fill(places == 0, 0)
    source = torch.where(places == taken[:, None] + 1, length[:, None] - 1, source)
    inside = places < torch.minimum(taken + 2, length)[:, None]
    piece = ids.gather(1, (first[:, None] + source).clamp(0, ids.shape[1] - 1))
    return {
        "input_ids": piece.masked_fill(~inside, 0 if pad_id is None else pad_id),
        "attention_mask": inside.long(),
    }


def _varied_images(images: Tensor, run: int) -> Tensor:
    """(1 − λ)·view + λ·another view of the same image, λ from 0 to ½."""
    wide = widen(images)
    content = wide.float().view(torch.int32).sum((1, 2, 3))  # an integer: exact in any order
    keys = _keys(content, run)
    mix, keys = 0.5 * _uniform(keys, 1).to(wide)[:, :, None, None], _mixed(keys)
    with torch.autocast(images.device.type, enabled=False):  # half precision would shift pixels
        views = _view(wide, keys), _view(wide, _mixed(keys))
    return torch.lerp(*views, mix).to(images)


def _view(images: Tensor, keys: Tensor) -> Tensor:
    """A crop, half of them rotated, with permuted channels, other brightness and other contrast."""
    n, channels = images.shape[:2]
    u = _uniform(keys, 5 + 3 * channels).to(images)
    scale = _SMALLEST_CROP + (1 - _SMALLEST_CROP) * u[:, 0]
    angle = (math.pi * (2 * u[:, 2] - 1)).masked_fill(u[:, 1] >= 0.5, 0.0)
    shift = (2 * u[:, 3:5] - 1) * (1 - scale)[:, None]
    cos, sin = scale * angle.cos(), scale * angle.sin()
    rows = [torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    x = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)

    order, contrast, brightness = u[:, 5:].view(n, 3, channels, 1, 1).unbind(1)
    x = x.gather(1, order.argsort(1).expand_as(x))
    # Relative to the image, so that any normalization of the pixels will do.
    mean, spread = images.mean((1, 2, 3), keepdim=True), images.std((1, 2, 3), keepdim=True)
    return mean + (x - mean) * (0.4 + 1.2 * contrast) + spread * (1.2 * brightness - 0.6)


def _keys(content: Tensor, run: int) -> Tensor:
    """A 64-bit key per sample. In a CUDA graph, ``run`` is a tensor."""
    return _mixed(_mixed(content) + (run & ((1 << 63) - 1)))


def _uniform(keys: Tensor, count: int) -> Tensor:
    """Numbers in [0, 1) per key, shape (N, count): SplitMix64 with the key as its state."""
    steps = torch.arange(1, count + 1, device=keys.device) * _GOLDEN
    return _shifted(_mixed(keys[:, None] + steps), 40).float() / (1 << 24)


def _mixed(z: Tensor) -> Tensor:
    """The output function of SplitMix64: https://doi.org/10.1145/2660193.2660195, figure 14."""
    z = (z ^ _shifted(z, 30)) * -4658895280553007687
    z = (z ^ _shifted(z, 27)) * -7723592293110705685
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """The shift to the right of an unsigned number, which torch does not have."""
    return (z >> by) & ((1 << (64 - by)) - 1)
