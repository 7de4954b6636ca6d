"""The distance of the weights, ‖θ − θ*‖: in total, per layer, per kind and per tensor.

Both checkpoints are read once, in slices.
"""

import math
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from holdfast._torch.finite import is_finite
from holdfast._torch.progress import progress_bar
from holdfast._torch.slices import slices
from holdfast.evaluate.report import Drift, DriftRow, Vocabulary
from holdfast.io.checkpoint import WeightsSource, open_weights
from holdfast.io.pairing import Pair, pair
from holdfast.io.weights import Scratch, Weights, Workers, widened
from holdfast.kernels import distance_cpu

#: From this many weights on, a kernel is worth its compilation.
_MANY = 1 << 29
#: Common names of modules at the input and at the output of a model.
_INPUT = re.compile(r"embed|wte|wpe|shared|stem|cls_token|(^|\.)(conv1|bn1)$")
_OUTPUT = re.compile(r"head|classifier|score|outputs?$|(^|\.)(cls|fc)(\.|$)|embed_out")


def drift(
    base: WeightsSource, tuned: WeightsSource, *, allow_pickle: bool = False, progress: bool = False
) -> Drift:
    """Measure the distance of a tuned model's weights from those of its base.

    Sums over 4096 weights are in float32, sums of these in float64. Integer tensors (counters,
    packed quantized weights) are ignored. A tensor with NaN or infinity in either model is named in
    ``not_finite`` and counts as not moved; ``base_not_finite`` names those of the base. If the
    models differ in their number of tokens, the rows of the tokens that both have count. The
    arguments are those of :func:`open_weights`; a tuned adapter is combined with the base.

    Example:
        >>> base, tuned = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> _ = tuned.load_state_dict(base.state_dict())
        >>> _ = tuned.weight.data.add_(1.0)
        >>> round(drift(base, tuned).total.distance, 4)
        2.0
    """
    before = open_weights(base, allow_pickle=allow_pickle)
    after = open_weights(tuned, base=before, allow_pickle=allow_pickle)
    pairing = pair(before, after)

    def counts(p: Pair) -> bool:
        dtypes = before[p.base].dtype, after[p.tuned].dtype
        return not p.again and all(dtype.is_floating_point for dtype in dtypes)

    rows: list[DriftRow] = []
    not_finite: list[str] = []
    base_not_finite: list[str] = []
    for p, distance, norm in _measured(before, after, filter(counts, pairing.pairs), progress):
        if not is_finite(norm):
            base_not_finite.append(p.name)
            norm = 0.0
        if not is_finite(distance):
            not_finite.append(p.name)
            distance = 0.0
        rows.append(DriftRow(p.name, distance, norm, p.size, *layer_and_kind(p.name)))
    rows.sort(key=lambda row: (_place(row.layer), row.kind))
    sizes = pairing.token_rows
    return Drift(
        total=_together("total", rows),
        layers=_grouped(rows, "layer"),
        kinds=_grouped(rows, "kind"),
        tensors=tuple(rows),
        only_base=pairing.only_base,
        only_tuned=(*pairing.only_tuned, *pairing.resized),
        not_finite=tuple(not_finite),
        base_not_finite=tuple(base_not_finite),
        vocabulary=Vocabulary(*sizes, pairing.new_tokens) if sizes else None,
    )


_Slice: TypeAlias = tuple[Pair, int, int]  # of a pair of tensors, from one weight to another


def _measured(
    base: Weights, tuned: Weights, pairs: Iterable[Pair], progress: bool
) -> Iterator[tuple[Pair, float, float]]:
    """Yield the distance and the pretrained norm of each pair, in order."""
    sizes = {p: p.size for p in pairs}
    parts = ((p, begin, end) for p, size in sizes.items() for begin, end in slices(size))
    work = partial(_sums, base, tuned, Scratch(), many=sum(sizes.values()) >= _MANY)
    moved = pretrained = 0.0
    bar = progress_bar(sum(sizes.values()), "drift", shown=progress, unit="weight")
    with bar, Workers() as workers:
        for (p, begin, end), d, n in workers.map(work, parts):
            moved, pretrained = moved + d, pretrained + n
            bar.update(end - begin)
            if end == sizes[p]:
                yield p, math.sqrt(moved), math.sqrt(pretrained)
                moved = pretrained = 0.0


def _sums(
    base: Weights, tuned: Weights, scratch: Scratch, part: _Slice, *, many: bool = False
) -> tuple[_Slice, float, float]:
    """Return ‖θ − θ*‖² and ‖θ*‖² of a slice. Of ``many`` weights, a kernel computes them."""
    p, begin, end = part
    before = base.read(p.base, begin, end, scratch)
    after = tuned.read(p.tuned, begin, end, scratch)
    if many and (found := distance_cpu.square_sums(before, after)):
        return part, *found
    before, after = widened(before, after, scratch)
    moved = torch.sub(after, before, out=scratch("moved", len(after), after.dtype))
    return part, square_sum(moved), square_sum(before)


def square_sum(values: Tensor) -> float:
    """Return Σx² of a flat tensor: within rows in its own dtype, over rows in float64.

    >>> square_sum(torch.full((10_000,), 1e-25)) > 0  # the squares underflow in float32
    True
    """
    whole = values.numel() // 4096 * 4096
    rows = torch.linalg.vector_norm(values[:whole].view(-1, 4096), dim=1).double()
    total = float(torch.dot(rows, rows))
    if whole < values.numel():
        rest = float(torch.linalg.vector_norm(values[whole:]))
        total += rest * rest
    if 1e-30 < total < 1e30 or not values.any():
        return total
    exact = values.double()  # squares beyond the range of float32, or NaN
    return float(torch.dot(exact, exact))


def layer_and_kind(name: str) -> tuple[str, str]:
    """Return the layer of a tensor, and its kind within the layer.

    A layer's name ends with the first number. A tensor outside of numbered layers forms its own
    layer and its own kind.

    >>> layer_and_kind("model.layers.11.self_attn.q_proj.weight")
    ('model.layers.11', 'self_attn.q_proj.weight')
    >>> layer_and_kind("model.embed_tokens.weight")
    ('model.embed_tokens', 'model.embed_tokens.weight')
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
    if number is None:
        return name.rpartition(".")[0] or name, name
    return ".".join(parts[: number + 1]), ".".join(parts[number + 1 :])


def _place(layer: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a sort key for the position of a layer between input and output."""
    parts = layer.split(".")
    if _OUTPUT.search(layer):
        group = 3
    elif parts[-1].isdigit():
        group = 1
    else:
        group = 0 if _INPUT.search(layer) else 2
    # An encoder comes before its decoder, against the alphabetical order.
    natural = [
        (int(part), "") if part.isdigit() else (0, part.replace("encoder", "a_encoder"))
        for part in parts
    ]
    return group, natural


def _grouped(rows: Iterable[DriftRow], by: str) -> tuple[DriftRow, ...]:
    groups: dict[str, list[DriftRow]] = {}
    for row in rows:
        groups.setdefault(getattr(row, by), []).append(row)
    return tuple(_together(name, members) for name, members in groups.items())


def _together(name: str, rows: list[DriftRow]) -> DriftRow:
    distance = math.hypot(*(row.distance for row in rows))
    norm = math.hypot(*(row.norm for row in rows))
    return DriftRow(name, distance, norm, sum(row.size for row in rows))
