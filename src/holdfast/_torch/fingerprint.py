"""Fingerprints of tensors, data, functions and models."""

import functools
import hashlib
import itertools
import json
import re
from array import array
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast._torch.adapters import (
    adapter_parts,
    adapters_are_new,
    base_name,
    full_copies,
    unwrapped,
    without_peft,
)
from holdfast._torch.layers import within
from holdfast._torch.layout import is_sharded, whole
from holdfast._torch.rng import preserve_rng

# Odd 64-bit constants that mix well (the golden ratio; two of splitmix64's finaliser), as signed
# numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
# Elements at a time: few enough for a CPU's cache, many enough for few launches on a GPU.
_CHUNK_CPU, _CHUNK_DEVICE = 1 << 18, 1 << 24


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """One fingerprint of several tensors in order, equal on every device."""
    return started_fingerprint(tensors)()


def started_fingerprint(tensors: Iterable[Tensor]) -> Callable[[], str]:
    """Start a fingerprint, which a GPU computes while the host goes on; a call returns it."""
    found = _started((tensor.shape, tensor) for tensor in tensors)
    return lambda: hashlib.sha256(" ".join(found()).encode()).hexdigest()[:32]


def tensor_fingerprints(tensors: Iterable[tuple[Iterable[int], Tensor | None]]) -> list[str]:
    """The fingerprint of each shape with its values, without spaces; None is no tensor."""
    return _started(tensors)()


def _started(
    tensors: Iterable[tuple[Iterable[int], Tensor | None]],
) -> Callable[[], list[str]]:
    shapes: list[str] = []
    digests = _Digests()
    for shape, tensor in tensors:
        shapes.append("x".join(map(str, shape)))
        if tensor is not None:
            digests.add(len(shapes) - 1, tensor)
    digests.start()

    def finish() -> list[str]:
        found = digests.values()
        return [
            f"{shape}:{found[i]:016x}" if i in found else f"{shape}:free"
            for i, shape in enumerate(shapes)
        ]

    return finish


class _Digests:
    """Σᵢ mix(bits of the value at i, i) modulo 2⁶⁴, of each of many tensors.

    The bits are those of the value in float32, so that equal values have equal fingerprints in all
    dtypes. A value of 8 bytes that float32 would round has its own bits.

    A wrapping sum of integers does not depend on the order of addition, so every device and every
    number of threads gives the same value. Mixing in the position detects permutations. Small
    tensors are computed together on a GPU, and nothing waits for it before the end.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, Tensor]] = []  # tensor, first element, values
        self.room = 0  # elements until the pieces are computed
        self.found: list[tuple[list[int], Tensor]] = []
        self.empty: list[int] = []

    def add(self, number: int, tensor: Tensor) -> None:
        flat = _numbers(whole(tensor.detach())).reshape(-1)
        if not flat.numel():
            self.empty.append(number)
        if self.pieces:
            last = self.pieces[-1][2]  # all pieces are of one kind
            if (last.device, last.dtype) != (flat.device, flat.dtype):
                self.start()
        start = 0
        while start < flat.numel():
            if not self.pieces:
                self.room = _CHUNK_CPU if flat.device.type == "cpu" else _CHUNK_DEVICE
            piece = flat[start : start + self.room]
            self.pieces.append((number, start, piece))
            start, self.room = start + piece.numel(), self.room - piece.numel()
            if not self.room:
                self.start()
        if not _packs(flat.device):
            self.start()
        elif self.pieces and is_sharded(tensor):  # a view would keep all that was gathered
            number, first, tail = self.pieces[-1]
            self.pieces[-1] = number, first, tail.clone() if first else tail

    def values(self) -> dict[int, int]:
        self.start()
        totals = dict.fromkeys(self.empty, 0)
        for numbers, sums in self.found:
            for number, value in zip(numbers, sums.tolist(), strict=True):
                totals[number] = (totals.get(number, 0) + value) % 2**64
        return totals

    def start(self) -> None:
        """Compute the pieces that wait, without waiting for a GPU."""
        if not self.pieces:
            return
        numbers, starts, values = zip(*self.pieces, strict=True)
        self.pieces = []
        flat = torch.cat(values) if len(values) > 1 else values[0]
        narrow = flat.float()
        bits = narrow.view(torch.int32).long()
        if flat.element_size() == 8:  # not by float64, which some devices do not have
            exact = (narrow.to(flat.dtype) == flat) | flat.isnan()
            if not flat.is_floating_point():
                exact &= flat.abs() < 2**62  # above, devices differ in the way back
            bits = torch.where(exact, bits, flat.view(torch.int64))
        position = torch.arange(starts[0] + 1, starts[0] + 1 + len(bits), device=bits.device)
        sizes = torch.tensor([len(piece) for piece in values])
        ends = sizes.cumsum(0)
        if len(values) > 1:  # each tensor counts its own elements
            back = (torch.tensor(starts) - starts[0] - ends + sizes).to(bits.device)
            position += back.repeat_interleave(sizes.to(bits.device), output_size=len(bits))
        h = bits.add_(position.mul_(_GOLDEN))
        h = h.bitwise_xor_(h >> 30).mul_(_MIX_1)
        h = h.bitwise_xor_(h >> 27).mul_(_MIX_2)
        h = h.bitwise_xor_(h >> 31)
        if len(values) > 1:
            sums = h.cumsum(0)[ends.to(bits.device) - 1]
            sums[1:] -= sums[:-1].clone()
        else:
            sums = h.sum()[None]
        self.found.append((list(numbers), sums))


def _numbers(tensor: Tensor) -> Tensor:
    """The values in a dtype with all operations; a complex number is two numbers."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.view(torch.int64) if tensor.dtype == torch.uint64 else tensor


def _packs(device: torch.device) -> bool:
    """Whether small tensors are computed together, to launch fewer kernels."""
    return device.type == "cuda"


def content_fingerprint(items: Iterable[Any]) -> str | None:
    """A fingerprint of types, shapes and values of items, in order; None if none is stable."""
    digest = hashlib.sha256()
    try:
        for item in items:
            _feed(digest, item)
    except (TypeError, ValueError, RuntimeError):
        return None
    return digest.hexdigest()[:32]


def data_fingerprint(data: Any) -> str | None:
    """A fingerprint of the number of samples and of all samples, in order.

    None for a stream, and for samples that change each time they are read. Data whose samples are
    slow to read may have a method ``fingerprint`` of its own.
    """
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return None
    # Some are read twice, to see whether they change.
    few = np.linspace(0, len(data) - 1, min(16, len(data))).round().astype(int).tolist()
    with preserve_rng():
        try:
            once, again = (content_fingerprint(data[i] for i in few) for _ in range(2))
            if once != again:
                return None
            if hasattr(data, "add_column") and data.format["type"] != "custom":
                return arrow_fingerprint(data)
            if callable(own := getattr(data, "fingerprint", None)):
                return own()  # type: ignore[no-any-return]
            every = (data[i] for i in range(len(data)))
            return content_fingerprint(itertools.chain([len(data)], every))
        except (OSError, LookupError):  # an unreadable sample
            return None


def same_content(one: str | None, other: str | None) -> bool:
    """Whether two fingerprints are equal; None counts as equal to all."""
    return one is None or other is None or one == other


def arrow_fingerprint(dataset: Any) -> str:
    """A fingerprint of a ``datasets.Dataset``; its own one differs between processes."""
    import pyarrow as pa  # comes with datasets

    digest = hashlib.sha256(repr(dataset.format["columns"]).encode())
    for table in dataset.select_columns(dataset.format["columns"]).with_format("arrow").iter(1000):
        bare = table.replace_schema_metadata(None).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, bare.schema) as writer:
            writer.write_table(bare)
        digest.update(sink.getvalue())
    return digest.hexdigest()[:32]


def base_fingerprint(model: nn.Module) -> str:
    """The fingerprint of the model under new PEFT adapters: equal with and without them."""
    inner: Any = without_peft(model)
    tensors = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
    added = [*adapter_parts(inner), *full_copies(inner)]
    ignored = added if adapters_are_new(inner) else []
    own = {base_name(n): t for n, t in tensors.items() if not within(n, ignored)}
    leaves = (
        (base_name(f"{n}.")[:-1], type(module).__name__, module.extra_repr())
        for n, module in inner.named_modules()
        if not within(n, added) and next(module.children(), None) is None
    )
    # Trainers set these. They do not change the predictions of a language model.
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    settings = {name: x for name, x in _settings(inner).items() if name not in tokens}
    about = (
        type(inner).__name__,
        sorted(leaves),
        [(name, str(own[name].dtype)) for name in sorted(own)],
        json.dumps(settings, sort_keys=True, default=str),
    )
    weights = fingerprint(own[name] for name in sorted(own))
    return f"{weights}-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}"


def _settings(model: Any) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    settings = dict(config.to_dict()) if hasattr(config, "to_dict") else {}
    for volatile in ("problem_type", "_name_or_path", "transformers_version", "use_cache"):
        settings.pop(volatile, None)  # changed by a forward pass, by loading or by trainers
    return settings


def model_fingerprint(model: nn.Module) -> str:
    """A fingerprint of a model's architecture, weights, buffers and configuration."""
    return started_model_fingerprint(model)()


def started_model_fingerprint(model: nn.Module) -> Callable[[], str]:
    """Start :func:`model_fingerprint`, see :func:`started_fingerprint`.

    It is the fingerprint of the weights that the model has now, also if they change before the
    result is fetched.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = started_fingerprint(state[name] for name in sorted(state))
    inner: Any = unwrapped(model)
    adapters = [
        (getattr(m, "_disable_adapters", None), str(getattr(m, "_active_adapter", None)))
        for m in inner.modules()
        if hasattr(m, "_disable_adapters")
    ]
    about = (
        re.sub("0x[0-9a-f]+", "", repr(inner)),
        [(name, str(state[name].dtype)) for name in sorted(state)],
        json.dumps(_settings(inner), sort_keys=True, default=str),
        adapters,
    )
    rest = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    return lambda: f"{weights()}-{rest}"


def _feed(digest: Any, item: Any) -> None:
    """Feed a value to the digest. Raises TypeError if its content cannot be read."""
    if isinstance(item, list | tuple):
        try:  # usually token ids: fast
            digest.update(array("q", item))
        except (TypeError, OverflowError):
            for x in item:
                _feed(digest, x)
        digest.update(b"]")
    elif isinstance(item, Mapping):
        for name in sorted(item, key=str):
            digest.update(f"{{{name}:".encode())
            _feed(digest, item[name])
    elif isinstance(item, Tensor):
        digest.update(f"{item.dtype}{tuple(item.shape)}".encode())
        values = item.detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().tobytes())
    elif isinstance(item, str | int | float | bool | bytes | type | torch.dtype | None):
        digest.update(f"{type(item).__name__}{item!r};".encode())
    elif isinstance(item, set | frozenset):
        _feed(digest, sorted(map(repr, item)))
    elif isinstance(item, np.ndarray | np.generic) or hasattr(item, "__array_interface__"):
        values_ = np.ascontiguousarray(item)
        digest.update(f"{values_.dtype}{values_.shape}".encode())
        digest.update(values_.tobytes())
    elif isinstance(item, nn.Module):
        digest.update(model_fingerprint(item).encode())
    elif callable(item):
        _feed_function(digest, item)
    else:
        _feed_repr(digest, item)


def _feed_function(digest: Any, function: Any) -> None:
    """Feed a function: its code, and the values that its result depends on."""
    if isinstance(function, functools.partial):
        _feed(digest, ["partial", function.func, function.args, function.keywords])
    elif hasattr(function, "__func__"):  # a method: the function and its object
        _feed(digest, [function.__func__, function.__self__])
    elif code := getattr(function, "__code__", None):
        digest.update(f"{function.__qualname__}{_code_text(code)}".encode())
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        simple = {
            name: value
            for name in code.co_names
            if isinstance(value := function.__globals__.get(name), str | int | float | bool)
        }
        _feed(digest, [function.__defaults__, function.__kwdefaults__, cells, simple])
    elif code := getattr(type(function).__call__, "__code__", None):  # an object: class and state
        digest.update(f"{type(function).__qualname__}{_code_text(code)}".encode())
        _feed(digest, vars(function))
    else:
        _feed_repr(digest, function)


def _feed_repr(digest: Any, item: Any) -> None:
    """Feed the repr of any other object (a tokenizer, a dataclass), unless it has an address."""
    text = repr(item)
    if re.search("0x[0-9a-f]{6}", text):
        raise TypeError(f"the content of {type(item).__name__} cannot be read")
    digest.update(text.encode())


def _code_text(code: Any) -> str:
    """A function's code, or a constant in it, as text that is equal in every process."""
    if not isinstance(code, CodeType):
        return repr(code)
    constants = [
        # A set has no order of its own.
        repr(sorted(map(repr, c))) if isinstance(c, frozenset) else _code_text(c)
        for c in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
