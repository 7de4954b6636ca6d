"""Interpolate two checkpoints on disk, θ = α·θ₁ + (1−α)·θ*, in constant memory.

The merged checkpoint has the files of the tuned one, or of the base if an adapter was tuned. It is
written aside and then moved into place: a directory with ``config.json`` is complete.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast._torch.checks import named_settings, share
from holdfast._torch.names import shorten
from holdfast._torch.progress import progress_bar
from holdfast.io.adapter import AdaptedWeights
from holdfast.io.checkpoint import PICKLES, WeightsSource, open_weights
from holdfast.io.outputs import claim, finished, written_aside
from holdfast.io.pairing import Pair, check_complete, pair
from holdfast.io.safetensors_files import header_for
from holdfast.io.untrusted import read_object
from holdfast.io.weights import Scratch, Weights, in_parallel, slices, widened

#: Weights of any format and their indices are not copied, nor are files of trainers.
_NOT_COPIED = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json", *PICKLES)
_NOT_COPIED_NAMES = ("trainer_state.json", "adapter_config.json", "README.md")

#: Files of a checkpoint, which may be replaced by those of another.
_CHECKPOINT = (
    *(f"*{suffix}" for suffix in _NOT_COPIED), "config.json", "*_config.json", "training.json",
    "tokenizer*", "*token*.json", "vocab.*", "merges.txt", "*.model", "chat_template.*",
    "holdfast_recipe.yaml", "config.yaml", "README.md", ".gitattributes", "trainer_state.json",
)  # fmt: skip


@named_settings
def merge_on_disk(
    base: WeightsSource,
    tuned: WeightsSource,
    out: str | os.PathLike[str],
    alpha: float = 0.5,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    progress: bool = False,
) -> Path:
    """Write the interpolation of a base and a tuned model as a checkpoint.

    Tensors that only the tuned model has (a new head), resized tensors and integer tensors are
    copied from the tuned model. If the models differ in their number of tokens, the rows of tokens
    that both have are interpolated, and the others are copied. Interpolation is in float32, the
    result has the tuned model's dtype. α = 1 gives the tuned weights exactly, α = 0 the base's in
    the tuned model's dtype.

    Args:
        base: as for :func:`holdfast.io.checkpoint.open_weights`.
        tuned: a directory, a file or a LoRA adapter, whose effective weights are interpolated.
        out: the output directory. Configuration and tokenizer are copied into it.
        alpha: the share of the tuned weights, between 0 and 1.
        overwrite: replace the checkpoint in ``out``.
        allow_pickle: also read pickled weights; the output is always safetensors.
        progress: show a progress bar.
    """
    alpha, out = share("alpha", alpha), Path(out).resolve()
    before = open_weights(base, allow_pickle=allow_pickle)
    after = open_weights(tuned, base=before, allow_pickle=allow_pickle)
    if not after.shards:
        raise ValueError(
            f"{after.label} has no files to write again: save it with save_pretrained first"
        )
    pairing = pair(before, after)
    check_complete(before, after, pairing)
    # The first pair of a tensor counts; a second one is a head that the tuned model ties.
    partner = {p.tuned: p for p in reversed(pairing.pairs)}
    merge = _Merge(before, after, partner, alpha)
    files, size = after.shards, sum(spec.bytes for spec in after.values())
    if len(files) == 1:
        files = {"model.safetensors": next(iter(files.values()))}

    companions = _companions(after)
    ours = partial(_check_replaced, overwrite, companions)
    with claim(out, "merge", _paths([before, after]), ours=ours):
        _check_room(out, size)
        with written_aside(out, partial(_remove_replaced, out)) as aside:
            for name, companion in companions.items():
                shutil.copyfile(companion, aside / name)
            if isinstance(after, AdaptedWeights) and after.tokens and "config.json" in companions:
                _set_tokens(aside / "config.json", after.tokens)
            with progress_bar(size, "merge", shown=progress, unit="B") as bar:
                for file, names in files.items():
                    for written in merge.write(aside / file, names):
                        bar.update(written)
            if len(files) > 1:
                _write_index(aside, files, size)
        finished(out)
    return out


@dataclass(frozen=True)
class _Merge:
    """Both models, the pairs of their tensors by the tuned model's names, and α."""

    base: Weights
    tuned: Weights
    partner: Mapping[str, Pair]
    alpha: float
    scratch: Scratch = field(default_factory=Scratch)

    def write(self, file: Path, names: list[str]) -> Iterator[int]:
        """Write a file in slices; yield the number of bytes of each slice."""
        specs = {name: self.tuned[name] for name in names}
        header, offsets = header_for(specs)
        file.write_bytes(header)
        tasks = (
            (name, offsets[name], begin, end)
            for name, spec in specs.items()
            for begin, end in (*slices(self._shared(name)), *slices(spec.size, self._shared(name)))
        )
        yield from in_parallel(partial(self._write_slice, file), tasks)

    def _write_slice(self, file: Path, task: tuple[str, int, int, int]) -> int:
        name, offset, begin, end = task
        values = self._between(name, begin, end).view(torch.uint8)
        with open(file, "r+b") as opened:
            opened.seek(offset + begin * self.tuned[name].dtype.itemsize)
            opened.write(values.numpy().data)
        return values.numel()

    def _shared(self, name: str) -> int:
        """Return how many of a tensor's weights the base has too. They come first."""
        return self.partner[name].size if name in self.partner else 0

    def _between(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return α·θ₁ + (1−α)·θ* of a slice, exact for α = 0 and 1; the tuned values if new."""
        dtype = self.tuned[name].dtype
        if begin >= self._shared(name) or self.alpha == 1 or not dtype.is_floating_point:
            return self.tuned.read(name, begin, end, self.scratch).to(dtype)
        before = self.base.read(self.partner[name].base, begin, end, self.scratch)
        if self.alpha == 0:
            return before.to(dtype)
        after = self.tuned.read(name, begin, end, self.scratch)
        before, after = widened(before, after, self.scratch)
        between = self.scratch("between", len(after), after.dtype)
        torch.lerp(before, after, self.alpha, out=between)
        return self.scratch.cast("stored", between, dtype)


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
