"""Merge checkpoints on disk with their base, tensor by tensor.

The merged checkpoint has the files of the first tuned one, or of the base if an adapter was tuned.
It is written aside and then moved into place: a directory with ``config.json`` is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holdfast._torch.checks import named_settings
from holdfast._torch.dtypes import wide
from holdfast._torch.merging import Result, Slice, Where, between, places
from holdfast._torch.names import shorten
from holdfast._torch.progress import progress_bar
from holdfast._torch.slices import slices
from holdfast.io.adapter import AdaptedWeights
from holdfast.io.checkpoint import PICKLES, WeightsSource, open_weights
from holdfast.io.outputs import claim, finished, written_aside
from holdfast.io.pairing import check_complete, pair
from holdfast.io.safetensors_files import header_for
from holdfast.io.untrusted import read_object
from holdfast.io.weights import Scratch, Spec, Weights, Workers

if TYPE_CHECKING:
    from holdfast.stages import Merging

#: Weights of any format and their indices are not copied, nor are files of trainers.
_NOT_COPIED = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json", *PICKLES)
_NOT_COPIED_NAMES = (
    "trainer_state.json", "adapter_config.json", "README.md", "training.json", "config.yaml",
)  # fmt: skip

#: Files of a checkpoint, which may be replaced by those of another.
_CHECKPOINT = (
    *(f"*{suffix}" for suffix in _NOT_COPIED), "config.json", "*_config.json", "training.json",
    "tokenizer*", "*token*.json", "vocab.*", "merges.txt", "*.model", "chat_template.*",
    "holdfast_recipe.yaml", "config.yaml", "README.md", ".gitattributes", "trainer_state.json",
)  # fmt: skip

#: Narrow dtypes whose values :func:`torch.lerp` computes in float32 and rounds once.
_HALF = (torch.bfloat16, torch.float16)


@named_settings
def merge_on_disk(
    base: WeightsSource,
    tuned: WeightsSource | Sequence[WeightsSource],
    out: str | os.PathLike[str],
    method: Merging,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    progress: bool = False,
) -> Path:
    """Write a base and tuned models, merged by a method, as a checkpoint.

    Tensors that only the first tuned model has (a new head), resized tensors and integer tensors
    are copied from it. If the models differ in their number of tokens, the rows of tokens that both
    have are merged, and the others are copied. Merging is in float32, the result has the first
    tuned model's dtype. Settings that keep the tuned model give its weights exactly.

    Tensors are read in slices, so that memory stays small. A method that must know something of a
    whole tensor first, such as a threshold, reads it twice or three times.

    Args:
        base: as for :func:`holdfast.io.checkpoint.open_weights`.
        tuned: a directory, a file or an adapter, whose effective weights are merged; a list of
            them if the method merges several.
        out: the output directory. Configuration and tokenizer are copied into it.
        method: any method of stage 4, such as ``WiseFT(0.5)``.
        overwrite: replace the checkpoint in ``out``.
        allow_pickle: also read pickled weights; the output is always safetensors.
        progress: show a progress bar.
    """
    out, several = Path(out).resolve(), isinstance(tuned, Sequence) and not isinstance(tuned, str)
    sources: list[Any] = list(tuned) if several else [tuned]  # type: ignore[arg-type]
    check_number(method, len(sources))
    if len(sources) > 1:
        _check_different(sources)
    before = open_weights(base, allow_pickle=allow_pickle)
    models = [open_weights(one, base=before, allow_pickle=allow_pickle) for one in sources]
    after = models[0]
    if not after.shards:
        raise ValueError(
            f"{after.label} has no files to write again: save it with save_pretrained first"
        )
    shared, where = _tensors(before, models), places(after)
    if reason := method.unfit_tensors(where.values()):
        raise ValueError(f"{after.label}: {reason}")
    files, size = after.shards, sum(spec.bytes for spec in after.values())
    if len(files) == 1:
        files = {"model.safetensors": next(iter(files.values()))}

    companions = _companions(after)
    ours = partial(_check_replaced, overwrite, companions)
    with claim(out, "merge", _paths([before, *models]), ours=ours):
        _check_room(out, size)
        with written_aside(out, partial(_remove_replaced, out)) as aside:
            for name, companion in companions.items():
                shutil.copyfile(companion, aside / name)
            if isinstance(after, AdaptedWeights) and after.tokens and "config.json" in companions:
                _set_tokens(aside / "config.json", after.tokens)
            bar = progress_bar(size, "merge", shown=progress, unit="B")
            with bar, Workers() as workers:
                merge = _Merge(before, models, shared, method, where, workers)
                for file, names in files.items():
                    for written in merge.write(aside / file, names):
                        bar.update(written)
            if len(files) > 1:
                _write_index(aside, files, size)
        finished(out)
    return out


def check_number(method: Merging, models: int) -> None:
    """Refuse a method that does not merge tensors, or not this number of tuned models."""
    if not hasattr(method, "tensorwise"):
        raise TypeError(f"method must be a method of the stage merging, got {method!r}")
    name, least, most = type(method).__name__, method.least_models, method.most_models
    if not method.tensorwise:
        raise ValueError(f"{name} does not merge: there is nothing to write")
    if models < least:
        raise ValueError(f"{name} merges {least} or more tuned models, got {models}")
    if most is not None and models > most:
        raise ValueError(
            f"{name} merges {most} tuned model with its base, got {models}: merge them one by one, "
            "or use a method for several models"
        )


def _check_different(sources: Sequence[Any]) -> None:
    paths = [Path(one).resolve() for one in sources if isinstance(one, str | os.PathLike)]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{path} is given twice: merge different tuned models")


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the base: its name there and in each tuned model, and its shared size."""

    base: str
    tuned: tuple[str, ...]
    size: int


def _tensors(base: Weights, models: Sequence[Weights]) -> dict[str, _Tensor]:
    """The tensors that all models share, by the first tuned model's names."""
    pairings = [pair(base, model) for model in models]
    for model, pairing in zip(models, pairings, strict=True):
        check_complete(base, model, pairing)
    # The first pair of a tensor counts; a second one is a head that the tuned model ties.
    found = {p.tuned: p for p in reversed(pairings[0].pairs)}
    names = {name: [name] for name in found}
    for model, pairing in zip(models[1:], pairings[1:], strict=True):
        by_base = {p.base: p for p in reversed(pairing.pairs)}
        by_name = {p.name: p for p in reversed(pairing.pairs)}
        for name, first in found.items():
            own = by_name.get(first.name) or by_base.get(first.base)
            if own is None or own.size != first.size:
                raise ValueError(
                    f"{model.label} and {models[0].label} differ in {name}: merge models with the "
                    "same tensors and tokens"
                )
            names[name].append(own.tuned)
    return {name: _Tensor(p.base, tuple(names[name]), p.size) for name, p in found.items()}


@dataclass(frozen=True)
class _Merge:
    """All models, the tensors that they share, and the method."""

    base: Weights
    models: Sequence[Weights]
    shared: Mapping[str, _Tensor]
    method: Merging
    places: Mapping[str, Where]
    workers: Workers
    scratch: Scratch = field(default_factory=Scratch)

    def write(self, file: Path, names: list[str]) -> Iterator[int]:
        """Write a file in slices; yield the number of bytes of each slice."""
        specs = {name: self.models[0][name] for name in names}
        header, offsets = header_for(specs)
        file.write_bytes(header)
        tasks = self._tasks(specs, offsets)
        yield from self.workers.map(partial(self._write_slice, file), tasks)

    def _tasks(self, specs: Mapping[str, Spec], offsets: Mapping[str, int]) -> Iterator[_Task]:
        """The slices of all tensors: of their merged weights, then of those that are copied."""
        for name, spec in specs.items():
            shared = self._shared_size(name, spec)
            if shared:
                values = self._values(name)
                for ends in slices(shared):
                    yield _Task(values, spec.dtype, offsets[name], *ends)
            own = partial(self.models[0].read, name, scratch=self.scratch)
            for ends in slices(spec.size, shared):
                yield _Task(own, spec.dtype, offsets[name], *ends)

    def _shared_size(self, name: str, spec: Spec) -> int:
        """Return how many of a tensor's weights are merged. They come first."""
        merges = spec.dtype.is_floating_point and not self._is_kept(self.places[name])
        return self.shared[name].size if name in self.shared and merges else 0

    def _is_kept(self, where: Where) -> bool:
        scale = self.method.scale(where)
        return scale == 1 or (scale is None and where.is_statistic)

    def _values(self, name: str) -> Callable[[int, int], torch.Tensor]:
        """A function that computes merged values of a tensor, given begin and end."""
        where, tensor = self.places[name], _Slices(self, self.shared[name])
        scale = self.method.scale(where)
        if scale == 0:
            return partial(self.base.read, self.shared[name].base, scratch=self.scratch)
        if scale is not None:
            return partial(self._between, tensor, scale)
        known = self.method.survey(where, tensor)
        return lambda *ends: self.method.merged_slice(where, tensor.part(*ends), known)

    def _between(self, tensor: _Slices, scale: float, begin: int, end: int) -> torch.Tensor:
        base, tuned, *_ = read = tensor.read(begin, end)
        if not (base.dtype == tuned.dtype and base.dtype in _HALF):
            base, tuned, *_ = tensor.widened(read)
        return between(base, tuned, scale, self.scratch("between", len(base), base.dtype))

    def _write_slice(self, file: Path, task: _Task) -> int:
        values = self.scratch.cast("stored", task.values(task.begin, task.end), task.dtype)
        content = values.view(torch.uint8)
        with open(file, "r+b") as opened:  # which writes all of it, or raises
            opened.seek(task.offset + task.begin * task.dtype.itemsize)
            opened.write(content.numpy().data)
        return content.numel()


class _Task(NamedTuple):
    """A slice to write: a function that computes it, and its place in the file."""

    values: Callable[[int, int], torch.Tensor]
    dtype: torch.dtype
    offset: int
    begin: int
    end: int


@dataclass(frozen=True)
class _Slices:
    """The slices of a tensor that all models share, in their common dtype, at least float32."""

    merge: _Merge
    tensor: _Tensor

    @property
    def size(self) -> int:
        return self.tensor.size

    @property
    def models(self) -> int:
        return len(self.tensor.tuned)

    def map(self, do: Callable[[Slice], Result]) -> Iterator[Result]:
        return self.merge.workers.map(lambda ends: do(self.part(*ends)), slices(self.size))

    def part(self, begin: int, end: int) -> Slice:
        """Read a slice; this thread's next slice overwrites it."""
        base, *tuned = self.widened(self.read(begin, end))
        return Slice(begin, base, tuned, self.merge.scratch)

    def read(self, begin: int, end: int) -> list[torch.Tensor]:
        """Read a slice as it is stored: of the base, then of each tuned model."""
        named = [(self.merge.base, self.tensor.base)]
        named += zip(self.merge.models, self.tensor.tuned, strict=True)
        return [model.read(name, begin, end, self.merge.scratch) for model, name in named]

    def widened(self, read: list[torch.Tensor]) -> list[torch.Tensor]:
        dtype, cast = wide(*read), self.merge.scratch.cast
        return [cast(f"wide {i}", values, dtype) for i, values in enumerate(read)]


def _paths(sources: list[Weights]) -> list[str]:
    sources = [*sources, *(s.base for s in sources if isinstance(s, AdaptedWeights))]
    return [str(source.path) for source in sources if source.path is not None]


def _check_replaced(overwrite: bool, companions: Collection[str], out: Path) -> bool:
    """Whether the output directory may be written: it is empty, or a checkpoint to replace."""
    inside = sorted(out.iterdir())
    if inside and not overwrite:
        raise FileExistsError(
            f"{out} is not empty: choose another directory, or replace it with --overwrite "
            "(overwrite=True)"
        )
    known = {p.name for p in inside if p.name in companions or _is_of_checkpoint(p.name)}
    other = [p.name for p in inside if p.is_dir() or p.name not in known]
    if other:
        raise FileExistsError(
            f"{out} contains {shorten(other)}, which is not part of a checkpoint, and would be "
            "deleted: choose another directory"
        )
    return True


def _is_of_checkpoint(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _CHECKPOINT)


def _remove_replaced(out: Path) -> None:
    """Remove the previous checkpoint, its configuration first: what is left is no model."""
    old = [p for p in out.iterdir() if p.is_file() and _is_of_checkpoint(p.name)]
    for file in sorted(old, key=lambda file: file.name != "config.json"):
        file.unlink()


def _check_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            f"{directory} has {free / 1e9:.1f} GB of free space, but the merged weights need "
            f"{needed / 1e9:.1f} GB"
        )


def _companions(tuned: Weights) -> dict[str, Path]:
    """Configuration and tokenizer by name; those of an adapter replace those of its base."""
    chain = [tuned.base, tuned] if isinstance(tuned, AdaptedWeights) else [tuned]
    directories = [w.path for w in chain if w.path is not None and w.path.is_dir()]
    return {
        file.name: file
        for directory in directories
        for file in directory.iterdir()
        if file.is_file()
        and not file.name.startswith(".")
        and file.name not in _NOT_COPIED_NAMES
        and not file.name.endswith(_NOT_COPIED)
    }


def _set_tokens(file: Path, tokens: int) -> None:
    """Set the number of tokens in the configuration of a base whose adapter has more of them."""
    config = read_object(file)
    text = config.get("text_config")  # of a multimodal model
    for part in (config, text) if isinstance(text, dict) else (config,):
        if "vocab_size" in part:
            part["vocab_size"] = tokens
    _write_json(file, config)


def _write_index(directory: Path, files: Mapping[str, list[str]], size: int) -> None:
    weight_map = sorted((name, file) for file, names in files.items() for name in names)
    index = {"metadata": {"total_size": size}, "weight_map": dict(weight_map)}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")
