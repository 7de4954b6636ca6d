"""Depthwise convolutions of images whose channels are last, by Triton kernels.

cuDNN takes most of a small model's training time for them. Here each pass reads its inputs once
from memory; sums are in float32. Weights and outputs have the dtype that autocast asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

TILE = 1024  # values that a program writes: channels times columns of a row
PROGRAMS = 4096  # that the gradient of the weight is divided among


class Shape(NamedTuple):
    """The sizes of a convolution: padding is above and on the left, the rest follows."""

    height: int
    width: int
    out_height: int
    out_width: int
    kernel: int
    stride: int
    above: int
    left: int


@triton.jit
def _write(
    source, weight, out, channels, height, width, out_height, out_width, above, left,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, BACK: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A part of a row of the output, or, going back, of the gradient of the input."""
    parts = tl.cdiv(out_width, COLUMNS)
    place = tl.program_id(0)
    row, part = place // parts, place % parts
    image = row // out_height
    x = part * COLUMNS + tl.arange(0, COLUMNS)
    y = row % out_height + 0 * x  # Triton's interpreter wants masks of one shape
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    for tap in tl.static_range(KERNEL * KERNEL):
        if BACK:
            up, across = y + above - tap // KERNEL, x + left - tap % KERNEL
            h, w = up // STRIDE, across // STRIDE
            fits = (up >= 0) & (up % STRIDE == 0) & (across >= 0) & (across % STRIDE == 0)
        else:
            h, w = y * STRIDE - above + tap // KERNEL, x * STRIDE - left + tap % KERNEL
            fits = (h >= 0) & (w >= 0)
        fits = fits & (h < height) & (w < width) & (x < out_width)
        at = ((image * height + h).to(tl.int64) * width + w) * channels
        values = tl.load(
            source + at[:, None] + c[None, :], mask=fits[:, None] & (c < channels)[None, :],
            other=0.0,
        )  # fmt: skip
        scale = tl.load(weight + tap * channels + c, mask=c < channels, other=0.0)
        total += values.to(tl.float32) * scale.to(tl.float32)[None, :]
    at = (row.to(tl.int64) * out_width + x) * channels
    tl.store(
        out + at[:, None] + c[None, :], total.to(out.dtype.element_ty),
        mask=(x < out_width)[:, None] & (c < channels)[None, :],
    )  # fmt: skip


@triton.jit
def _weigh(
    source, grad, out, channels, rows, rows_each, height, width, out_height, out_width, above,
    left, KERNEL: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradient of the weight, of some rows of the output; TAPS is a power of two."""
    first = tl.program_id(0) * rows_each
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    tap = tl.arange(0, TAPS)
    total = tl.zeros((TAPS, COLUMNS, CHANNELS), tl.float32)
    known = (c < channels)[None, None, :] & (tap < KERNEL * KERNEL)[:, None, None]
    for row in range(first, tl.minimum(first + rows_each, rows)):
        image, y = row // out_height, row % out_height
        h = (y * STRIDE - above + tap // KERNEL)[:, None]
        base = (image * height + h).to(tl.int64) * width
        for begin in range(0, out_width, COLUMNS):
            x = begin + tl.arange(0, COLUMNS)
            at = (x.to(tl.int64) + row * out_width) * channels
            slope = tl.load(
                grad + at[:, None] + c[None, :],
                mask=(x < out_width)[:, None] & (c < channels)[None, :], other=0.0,
            )  # fmt: skip
            w = (x * STRIDE - left)[None, :] + (tap % KERNEL)[:, None]
            fits = (h >= 0) & (h < height) & (w >= 0) & (w < width) & (x < out_width)[None, :]
            values = tl.load(
                source + ((base + w) * channels)[:, :, None] + c[None, None, :],
                mask=fits[:, :, None] & known, other=0.0,
            )  # fmt: skip
            total += values.to(tl.float32) * slope.to(tl.float32)[None]
    at = (tl.program_id(0) * KERNEL * KERNEL + tap) * channels
    tl.store(
        out + at[:, None] + c[None, :], tl.sum(total, 1),
        mask=(tap < KERNEL * KERNEL)[:, None] & (c < channels)[None, :],
    )  # fmt: skip


class Depthwise(torch.autograd.Function):
    """A convolution of each channel by itself; weights are (kernel², channels)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.shape = shape
        out = torch.empty(
            *x.shape[:2], shape.out_height, shape.out_width, dtype=x.dtype, device=x.device,
            memory_format=torch.channels_last,
        )  # fmt: skip
        return _written(x, weight, out, shape, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _written(grad, weight, torch.empty_like(x), ctx.shape, back=True)
        if ctx.needs_input_grad[1]:
            of_weight = _weight_gradient(x, grad, ctx.shape).to(weight.dtype)
        return of_x, of_weight, None


def _written(source: Tensor, weight: Tensor, out: Tensor, shape: Shape, *, back: bool) -> Tensor:
    count, channels, height, width = out.shape
    block = min(128, triton.next_power_of_2(channels))
    columns = min(TILE // block, triton.next_power_of_2(width))
    grid = count * height * triton.cdiv(width, columns), triton.cdiv(channels, block)
    _write[grid](
        source, weight, out, channels, *source.shape[2:], height, width, shape.above, shape.left,
        KERNEL=shape.kernel, STRIDE=shape.stride, BACK=back, COLUMNS=columns, CHANNELS=block,
    )  # fmt: skip
    return out


def _weight_gradient(x: Tensor, grad: Tensor, shape: Shape) -> Tensor:
    """(kernel², channels) in float32. Each program sums some rows, and torch sums the programs."""
    channels, taps = x.shape[1], shape.kernel**2
    block, columns = (64, 4) if shape.kernel == 3 else (32, 4)
    block = min(block, triton.next_power_of_2(channels))
    rows, blocks = len(grad) * shape.out_height, triton.cdiv(channels, block)
    each = max(1, rows * blocks // PROGRAMS)
    programs = triton.cdiv(rows, each)
    out = x.new_empty((programs, taps, channels), dtype=torch.float32)
    _weigh[programs, blocks](
        x, grad, out, channels, rows, each, *x.shape[2:], *grad.shape[2:], shape.above, shape.left,
        KERNEL=shape.kernel, TAPS=triton.next_power_of_2(taps), STRIDE=shape.stride,
        COLUMNS=columns, CHANNELS=block,
    )  # fmt: skip
    return out.sum(0)


def depthwise(
    x: Tensor, weight: Tensor, stride: int = 1, padding: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> Tensor:
    """``conv2d`` with a group per channel, in the dtype of autocast.

    Args:
        x: (n, channels, height, width).
        weight: (channels, 1, kernel, kernel).
        stride: in both directions.
        padding: left, right, above and below, as in ``torch.nn.functional.pad``.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
    left, right, above, below = padding
    kernel = weight.shape[-1]
    height, width = x.shape[2:]
    out_height = (height + above + below - kernel) // stride + 1
    out_width = (width + left + right - kernel) // stride + 1
    shape = Shape(height, width, out_height, out_width, kernel, stride, above, left)
    taps = weight.flatten(1).t().contiguous()
    apply = cast(Callable[..., Tensor], Depthwise.apply)
    return apply(x, taps, shape)


def use_kernels(model: nn.Module) -> nn.Module:
    """Let the kernels compute a model's depthwise convolutions without a bias."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.shape[1] == 1 < module.groups:
            if module.bias is not None or module.groups != module.out_channels:
                raise ValueError(f"{module} has a bias or several outputs per channel")
            setattr(module, "forward", MethodType(_forward, module))  # noqa: B010
    return model


def _forward(module: Any, x: Tensor) -> Tensor:
    """Of a convolution, with the zeros that a padding of its own would add."""
    pad = getattr(module, "static_padding", None)
    if isinstance(pad, nn.ZeroPad2d):
        left, right, above, below = pad.padding
    else:
        above, left = below, right = module.padding
    return depthwise(x, module.weight, module.stride[0], (left, right, above, below))
