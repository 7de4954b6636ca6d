"""How Adam-like optimizers store their state and walk over memory, with torch's operations.

- :class:`Columns`: the tensors of some parameters, one list per kind of tensor.
- :func:`cache_sized_parts`: a step on the CPU, in parts that stay in the cache.
- :func:`pull`: a share of the way back to θ*.
- :func:`unpack`, :func:`pack`: 8-bit moments and stochastic rounding around a float32 update.

8-bit moments: blocks of 256 elements share a scale, the largest magnitude in the block. An element
is a small floating-point number in units of that scale. m has a sign, 4 bits of exponent and 3 of
mantissa; v is stored as its root, with 4 bits of each. Codes are rounded stochastically, without
bias: with rounding to the nearest, an average that changes by a thousandth per step would never
move. √v is rounded to 0 only if it is 0, because m is divided by it; an m below 1/50,000 of its
block's scale becomes 0. Since √v is unbiased, v is about 2 % too large. A NaN gradient makes its
whole block NaN.

>>> import torch
>>> x = torch.tensor([-1.0, 0.5, 0.25, 0.0])
>>> codes, scales = encode(x, SIGNED, noise(0, 0, 4) & 0xFFFF)
>>> decode(codes, scales, SIGNED).tolist()
[-1.0, 0.5, 0.25, 0.0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F  # noqa: N812
from torch.optim.optimizer import Optimizer

from holdfast._torch.checks import at_least_zero
from holdfast._torch.dtypes import wide
from holdfast._torch.layout import flat, is_sharded, like, whole


class Columns(NamedTuple):
    """The tensors of some parameters: one list per kind of tensor, all in the same order."""

    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    anchors: list[Tensor | None]
    weights: list[Tensor | None]
    exp_avg_scales: list[Tensor | None]
    exp_avg_sq_scales: list[Tensor | None]

    def take(self, numbers: Sequence[int]) -> Columns:
        columns: Iterator[list[Any]] = ([column[i] for i in numbers] for column in self)
        return Columns(*columns)


# --- Adam's settings and state -------------------------------------------------------------------


def check_betas(name: str, betas: Any) -> tuple[float, float]:
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(isinstance(b, float | int) and 0 <= b < 1 for b in betas):
        raise ValueError(f"{name} must be two numbers in [0, 1), got {betas!r}")
    return float(betas[0]), float(betas[1])  # a recipe file has a list


def check_adam_group(group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        at_least_zero(name, group[name])
    check_betas("betas", group["betas"])
    if group["foreach"] and group["fused"]:
        raise ValueError("foreach and fused cannot both be True: choose one, or leave both None")
    if isinstance(group["lr"], Tensor) and group["foreach"] and not group["capturable"]:
        raise ValueError("lr as a tensor needs capturable=True with foreach=True")


def make_adam_state(
    state: dict[str, Tensor], p: Tensor, group: dict[str, Any], dtype: torch.dtype | Literal["8bit"]
) -> None:
    if dtype == "8bit" and is_sharded(p):
        raise ValueError("sharded parameters cannot have 8-bit moments: leave out state_dtype")
    # As in torch.optim.Adam: the count is on the CPU unless the implementation needs it on the
    # device. That saves a synchronization per parameter.
    on_device = group["capturable"] or (group["fused"] and dtype == p.dtype)
    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")
    for moment in ("exp_avg", "exp_avg_sq"):
        stored = torch.uint8 if dtype == "8bit" else dtype
        state[moment] = torch.zeros_like(p, dtype=stored, memory_format=torch.preserve_format)
        if dtype == "8bit":
            state[f"{moment}_scale"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)


def adam_columns(
    optimizer: Optimizer,
    group: dict[str, Any],
    params: Sequence[Tensor],
    on_device: Callable[[Tensor], bool] = lambda p: False,
) -> list[list[Tensor]]:
    """Parameters, gradients, both moments and step counts, with new state where there is none.

    Args:
        optimizer, group: the optimizer and the group of the parameters.
        params: parameters of the group that have a gradient.
        on_device: whether the count of a parameter must be on its device for another reason than
            the options of the group.
    """
    grads = [cast(Tensor, p.grad) for p in params]
    if any(grad.layout is not torch.strided for grad in grads):
        raise RuntimeError(
            f"{type(optimizer).__name__} does not support sparse gradients: make the embedding "
            "with sparse=False"
        )
    for p in params:
        if not optimizer.state[p]:
            fused = group["fused"] or on_device(p)
            make_adam_state(optimizer.state[p], p, {**group, "fused": fused}, p.dtype)
    states = [optimizer.state[p] for p in params]
    moments = [[s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step")]
    return [[*params], grads, *moments]


def only_makes_state(optimizer: Optimizer, grads: Sequence[Tensor]) -> bool:
    """Whether a step only initializes state: lr 0 and zero gradients.

    Distributed checkpointing calls such a step. A warm-up may begin with lr 0 too, but its
    gradients are not all zero.
    """
    if torch.compiler.is_compiling() or any(
        isinstance(g["lr"], Tensor) or g["lr"] != 0 for g in optimizer.param_groups
    ):
        return False
    return not any(bool(whole(g.any())) for g in grads)


# --- Cache-sized parts on the CPU ----------------------------------------------------------------

# Elements of a part per thread: θ, g, m and v take 8 MB in float32. The cache would prefer less,
# but each part costs about 30 µs for calls and for waiting until all threads are done.
SHARE = 2**19
# Boundaries between parts, in elements: whole vectors of any dtype, so that each element is
# computed exactly as in the whole tensor.
STRIDE = 64


def cache_sized_parts(
    columns: Sequence[Sequence[Any]], size: int | None = None
) -> Iterator[list[list[Any]]]:
    """Columns of tensors, in parts that stay in the cache between one operation and the next.

    Two in-place operations over all tensors read the weights from memory twice. Part by part, the
    second one finds them in the cache. A part is a slice of one long parameter, or several short
    parameters. Each operation still runs on all of torch's threads. Zero-dimensional tensors and
    None belong to all slices of their parameter. A parameter that is not contiguous is not sliced.
    The first column holds the parameters. A part has ``size`` elements, or ``SHARE`` per thread.

    >>> params = [torch.zeros(100), torch.zeros(9), torch.zeros(3)]
    >>> [[len(p) for p in part] for part, _ in cache_sized_parts([params, [None] * 3], size=64)]
    [[64], [36], [9, 3]]
    """
    size = size or SHARE * torch.get_num_threads()
    short: list[int] = []
    held = 0
    for i, p in enumerate(columns[0]):
        elements = p.numel()
        if elements > size and all(_sliceable(column[i], p) for column in columns):
            count = -(-elements // size)
            length = -(-elements // count)  # slices of about the same length
            yield from _slices([column[i] for column in columns], -(-length // STRIDE) * STRIDE)
            continue
        short.append(i)
        held += elements
        if held >= size:
            yield [[column[j] for j in short] for column in columns]
            short, held = [], 0
    if short:
        yield [[column[j] for j in short] for column in columns]


def _sliceable(t: Tensor | None, p: Tensor) -> bool:
    """Whether a tensor can be sliced like its parameter; subclasses (sharded tensors) cannot."""
    if t is None or (type(t) is Tensor and t.dim() == 0):
        return True
    plain = type(t) in (Tensor, Parameter) and t.layout == torch.strided and t.device == p.device
    return plain and t.shape == p.shape and t.is_contiguous()


def _slices(tensors: list[Tensor | None], length: int) -> Iterator[list[list[Any]]]:
    """Views of ``length`` elements of one parameter's tensors, as columns of one."""
    views = [None if t is None or t.dim() == 0 else t.view(-1).split(length) for t in tensors]
    parameter: Any = views[0]
    for k in range(len(parameter)):
        yield [[t] if v is None else [v[k]] for t, v in zip(tensors, views, strict=True)]


# --- The pull to θ* ------------------------------------------------------------------------------


def pull(
    params: Sequence[Tensor],
    anchors: Sequence[Tensor],
    importance: Sequence[Tensor | None],
    c: float | Tensor,
    *,
    foreach: bool,
) -> None:
    """θ ← θ − min(1, c·F)·(θ − θ*), in place; F is 1 for a parameter without importance.

    Weights that do not move keep their bits, except that −0 may become 0.
    """
    if not isinstance(c, Tensor) and c == 0:
        return
    if not foreach and len(params) > 1:
        for p, anchor, weight in zip(params, anchors, importance, strict=True):
            pull([p], [anchor], [weight], c, foreach=False)
        return
    alike = [i for i, weight in enumerate(importance) if weight is None]
    if alike:
        theta = [params[i] for i in alike]
        here = [like(anchors[i], params[i]) for i in alike]
        if isinstance(c, Tensor):  # which _foreach_lerp_ does not accept
            differences = torch._foreach_sub(here, theta)
            torch._foreach_mul_(differences, c.clamp(max=1.0))
            torch._foreach_add_(theta, differences)
        else:
            torch._foreach_lerp_(theta, here, min(1.0, c))
    weighted = [(i, weight) for i, weight in enumerate(importance) if weight is not None]
    if weighted:
        theta = [params[i] for i, _ in weighted]
        here = [like(anchors[i], params[i]) for i, _ in weighted]
        shares = torch._foreach_mul(
            [
                like(weight, p, wide(weight, p))
                for p, (_, weight) in zip(theta, weighted, strict=True)
            ],
            c,
        )
        torch._foreach_clamp_max_(shares, 1.0)
        torch._foreach_lerp_(
            theta, here, [s.to(p.dtype) for p, s in zip(theta, shares, strict=True)]
        )


# --- 8-bit moments and stochastic rounding -------------------------------------------------------

#: Elements that share a scale.
BLOCK = 256
_ONE = 0x3F800000  # the bits of 1.0


class Format(NamedTuple):
    """How a magnitude of at most 1 becomes a code: the upper bits of its float32."""

    shift: int  # the number of lower bits that are dropped
    most: int  # the code of 1

    @property
    def zero(self) -> int:
        """The upper bits that code 0 would have if it did not mean 0; ``most`` means 1."""
        return (_ONE >> self.shift) - self.most


#: Of m: 3 bits of mantissa, the eighth bit is the sign. The kernel uses the same formats.
SIGNED = Format(shift=20, most=127)
#: Of √v: 4 bits of mantissa.
UNSIGNED = Format(shift=19, most=255)


def encode(x: Tensor, form: Format, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a flat float32 tensor, given 16 random bits per element."""
    size = x.numel()
    blocks = F.pad(x, (0, -size % BLOCK)).view(-1, BLOCK)
    tops = blocks.abs().amax(1)
    shares = torch.where(tops[:, None] > 1e-37, blocks.abs() / tops[:, None], 0.0)
    bits = shares.flatten()[:size].view(torch.int32) + (noise.to(torch.int32) << (form.shift - 16))
    codes = ((bits >> form.shift) - form.zero).clamp(0, form.most)
    if form == SIGNED:
        codes += 128 * (x < 0)
    else:
        codes[(codes == 0) & (x > 0)] = 1
    return codes.to(torch.uint8), tops


def decode(codes: Tensor, scales: Tensor, form: Format) -> Tensor:
    q = codes.to(torch.int32) & form.most
    shares = ((q + form.zero) << form.shift).view(torch.float32)
    x = torch.where(q == 0, 0.0, shares * scales.repeat_interleave(BLOCK)[: codes.numel()])
    return torch.where(codes > form.most, -x, x)


def noise(seed: int | Tensor, number: int, size: int, device: torch.device | None = None) -> Tensor:
    """32 random bits per element: a hash of a seed, the tensor's number and the position."""
    x = torch.arange(size, device=device) + number * 0x85EBCA6B + seed * 0x9E3779B9
    x = _multiplied(x ^ ((x & 0xFFFFFFFF) >> 16), 0x7FEB352D)
    x = _multiplied(x ^ (x >> 15), 0x846CA68B)
    return x ^ (x >> 16)


def _multiplied(x: Tensor, by: int) -> Tensor:
    """A product modulo 2³²; the low bits of a wrapped int64 are right."""
    return ((x & 0xFFFFFFFF) * by) & 0xFFFFFFFF


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """float32 to bfloat16, rounded stochastically without bias, given 16 random bits each."""
    bits = x.view(torch.int32)
    rounded = ((bits + noise.to(torch.int32)) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()


def unpack(columns: Columns) -> Columns:
    """The columns of one parameter in float32 (or wider): copies to update, then :func:`pack`."""
    (p,), (m,), (v,) = columns.params, columns.exp_avgs, columns.exp_avg_sqs
    (m_scale,), (v_scale,) = columns.exp_avg_scales, columns.exp_avg_sq_scales
    if m_scale is None or v_scale is None:
        wide_m, wide_v = m.float(), v.float()
    else:
        wide_m = decode(flat(m), m_scale, SIGNED).as_strided(m.shape, m.stride())
        root = decode(flat(v), v_scale, UNSIGNED)
        wide_v = root.square().as_strided(v.shape, v.stride())
    wide_p = p.to(torch.promote_types(p.dtype, wide_m.dtype))
    return columns._replace(params=[wide_p], exp_avgs=[wide_m], exp_avg_sqs=[wide_v])


def pack(
    wide: Columns, columns: Columns, *, stochastic: bool, seed: int | Tensor, number: int
) -> None:
    """Store the updated copies of :func:`unpack`: 8-bit moments encoded, bfloat16 rounded.

    ``seed`` and ``number``, the parameter's own, determine the random bits.
    """
    (p,), (m,), (v,) = columns.params, columns.exp_avgs, columns.exp_avg_sqs
    (wide_p,), (wide_m,), (wide_v,) = wide.params, wide.exp_avgs, wide.exp_avg_sqs
    (m_scale,), (v_scale,) = columns.exp_avg_scales, columns.exp_avg_sq_scales
    if m_scale is None or v_scale is None:
        m.copy_(wide_m)
        v.copy_(wide_v)
    else:
        bits = noise(seed, number, p.numel(), p.device)
        codes, scales = encode(flat(wide_m), SIGNED, bits & 0xFFFF)
        roots, root_scales = encode(flat(wide_v).sqrt(), UNSIGNED, bits >> 16)
        for stored, new in (
            (flat(m), codes), (m_scale, scales), (flat(v), roots), (v_scale, root_scales)
        ):  # fmt: skip
            stored.copy_(new)
    if stochastic and p.dtype == torch.bfloat16:
        bits = noise(seed + 1, number, p.numel(), p.device).view(p.shape) & 0xFFFF
        p.copy_(round_stochastically(wide_p.contiguous(), bits))
    else:
        p.copy_(wide_p)
