"""Numbered blocks of tensors: made once, cached on disk, resumable, the same on all ranks.

<folder>/about.json                    what the blocks depend on
<folder>/block-….safetensors           one block
"""

import hashlib
import json
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed

from holdfast._torch.layout import gathered, rank_and_world
from holdfast._torch.progress import progress_bar
from holdfast.io.files import first_line, write_whole
from holdfast.scoring.cache import cache_folder
from holdfast.scoring.draw import OnTokens

Block = dict[str, Tensor]
Value = TypeVar("Value")


class BlockStore:
    """The directory of all blocks that depend on the same things, ``about``."""

    def __init__(
        self, cache: bool | str | os.PathLike[str], kind: str, about: dict[str, Any]
    ) -> None:
        self.about = json.dumps(about, sort_keys=True)
        key = hashlib.sha256(self.about.encode()).hexdigest()[:32]
        self.folder = None if cache is False else cache_folder(cache) / kind / key

    @property
    def path(self) -> Path | None:
        """The directory, if it exists."""
        return self.folder if self.folder is not None and self.folder.is_dir() else None

    def read(self, numbers: Iterable[int]) -> dict[int, Block]:
        """Return the blocks that are there and complete."""
        found: dict[int, Block] = {}
        if self.folder is None:
            return found
        for number in numbers:
            try:
                with safe_open(self._file(self.folder, number), "pt") as file:
                    block = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    if (file.metadata() or {}).get("checksum") != _checksum(block):
                        raise ValueError("its checksum differs")
                found[number] = block
            except FileNotFoundError:
                continue
            except (OSError, SafetensorError, ValueError) as error:
                warnings.warn(
                    f"{self._file(self.folder, number)} is damaged and is made again: "
                    f"{first_line(error)}",
                    stacklevel=4,
                )
        return found

    def write(self, blocks: dict[int, Block]) -> None:
        """Write blocks. After the first error, such as a full disk, nothing more is written."""
        if self.folder is None:
            return
        folder = self.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / "about.json", lambda path: path.write_text(self.about))
            for number, block in blocks.items():
                note = {"checksum": _checksum(block)}
                write_whole(
                    self._file(folder, number),
                    lambda path, block=block, note=note: save_file(block, path, note),  # type: ignore[misc]
                )
        except (OSError, SafetensorError) as error:
            warnings.warn(
                f"the drawn texts are used but not cached in {folder}: {first_line(error)}",
                stacklevel=4,
            )
            self.folder = None

    @staticmethod
    def _file(folder: Path, number: int) -> Path:
        return folder / f"block-{number:06d}.safetensors"


def _checksum(block: Block) -> str:
    value = 0
    for name in sorted(block):
        value = zlib.crc32(block[name].contiguous().numpy().data, value)
    return f"{value:08x}"


@dataclass
class BlockMaker:
    """Makes the blocks that are not cached. On several ranks, each rank makes a share.

    Attributes:
        make: returns the blocks of some numbers.
        store: the cache.
        at_a_time: the number of blocks per call of ``make``.
        tokens: the number of tokens per block, for the progress bar.
        together: whether all ranks must make all blocks, because the model is sharded.
    """

    make: Callable[[list[int], OnTokens], dict[int, Block]]
    store: BlockStore
    at_a_time: int
    tokens: int
    together: bool
    _fresh: dict[int, Block] = field(default_factory=dict)

    def __call__(
        self,
        wanted: int,
        *,
        progress: bool,
        fewer: Callable[[float], int | None] | None = None,
    ) -> list[Block]:
        """Return the first ``wanted`` blocks, or fewer.

        ``fewer`` is called after the first batch with the expected seconds of all batches, and may
        return a smaller number of blocks.
        """
        rank, world = rank_and_world()
        # Rank 0 reads for all, because the ranks may not share a disk.
        known = _from_rank_0(self.store.read(range(wanted)) if rank == 0 else {})
        missing = [number for number in range(wanted) if number not in known]
        mine = missing if self.together else missing[rank::world]
        shown = progress and rank == 0 and bool(mine)
        bar = progress_bar(len(mine) * self.tokens, "drawing texts", shown=shown, unit="token")
        with bar:
            if fewer is not None and missing:
                began = time.monotonic()
                first, mine = mine[: self.at_a_time], mine[self.at_a_time :]
                error = self._attempt(first, bar.update)
                per_block = (time.monotonic() - began) / max(1, len(first))
                _agree(error)
                expected = max(gathered(per_block * (len(first) + len(mine))))
                wanted = _from_rank_0(min(wanted, fewer(expected) or wanted))
                mine = [number for number in mine if number < wanted]
            error = self._attempt(mine, bar.update)
        _agree(error)
        for theirs in [self._fresh] if self.together else gathered(self._fresh):
            known.update(theirs)
        if rank == 0 and world > 1:
            self.store.write({n: known[n] for n in missing if n in known and n not in self._fresh})
        return [known[number] for number in range(wanted)]

    def _attempt(self, numbers: list[int], on_tokens: OnTokens) -> Exception | None:
        """Make and write blocks; return an error instead of raising it, because ranks must meet."""
        try:
            for start in range(0, len(numbers), self.at_a_time):
                made = self.make(numbers[start : start + self.at_a_time], on_tokens)
                if not self.together or rank_and_world()[0] == 0:
                    self.store.write(made)
                self._fresh.update(made)
        except Exception as error:
            return error
        return None


def _agree(error: Exception | None) -> None:
    """Raise the first error of all ranks on all ranks."""
    if error is not None and rank_and_world()[1] == 1:
        raise error
    for theirs in gathered(error):
        if theirs is not None:
            raise theirs


def _from_rank_0(value: Value) -> Value:
    box = [value]
    if rank_and_world()[1] > 1:
        distributed.broadcast_object_list(box, src=0)
    return box[0]
