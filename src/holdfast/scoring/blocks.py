"""Numbered blocks of tensors: made once, cached on disk, resumable, the same on all ranks.

<folder>/about.json                    what the blocks depend on
<folder>/block-….safetensors           one block
<folder>/<key>/…                       other blocks, which depend on these
"""

import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed

from holdfast._torch.layout import gathered, rank_and_world
from holdfast._torch.progress import progress_bar
from holdfast.io.files import first_line, write_whole
from holdfast.scoring.cache import cache_folder

Block = dict[str, Tensor]
Value = TypeVar("Value")


class BlockStore:
    """The directory of all blocks that depend on the same things, ``about``.

    If block i also depends on a block of other data, ``data[i]`` is the checksum of that block.
    """

    def __init__(
        self, folder: Path | None, about: dict[str, Any], data: Sequence[int] = ()
    ) -> None:
        self.data = data
        self.about = json.dumps(about, sort_keys=True)
        key = hashlib.sha256(self.about.encode()).hexdigest()[:32]
        self.folder = None if folder is None else folder / key

    @classmethod
    def of(
        cls, cache: bool | str | os.PathLike[str], kind: str, about: dict[str, Any]
    ) -> "BlockStore":
        """The directory in the cache, or none if the cache is off."""
        return cls(None if cache is False else cache_folder(cache) / kind, about)

    @property
    def path(self) -> Path | None:
        """The directory, if it exists."""
        return self.folder if self.folder is not None and self.folder.is_dir() else None

    def read(self, numbers: Iterable[int], *, warn: bool = True) -> dict[int, Block]:
        """Return the blocks that are there and complete."""
        found: dict[int, Block] = {}
        if self.folder is None:
            return found
        for number in numbers:
            try:
                with safe_open(self._file(self.folder, number), "pt") as file:
                    block = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    if (file.metadata() or {}).get("checksum") != self._checksum(number, block):
                        raise ValueError("its checksum differs")
                found[number] = block
            except FileNotFoundError:
                continue
            except (OSError, SafetensorError, ValueError) as error:
                if warn:
                    other = ", or belongs to other data," if self.data else ""
                    warnings.warn(
                        f"{self._file(self.folder, number)} is damaged{other} and is made again: "
                        f"{first_line(error)}",
                        stacklevel=4,
                    )
        return found

    def write(self, blocks: dict[int, Block]) -> dict[int, Block]:
        """Write blocks, and return them; but those that another process has written meanwhile win.

        After the first error, such as a full disk, nothing more is written.
        """
        theirs = self.read(blocks, warn=False)
        if self.folder is None:
            return blocks
        folder = self.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / "about.json", lambda path: path.write_text(self.about))
            for number, block in blocks.items():
                if number in theirs:
                    continue
                note = {"checksum": self._checksum(number, block)}
                write_whole(
                    self._file(folder, number),
                    lambda path, block=block, note=note: save_file(block, path, note),  # type: ignore[misc]
                )
        except (OSError, SafetensorError) as error:
            warnings.warn(
                f"the results are used but not cached in {folder}: {first_line(error)}",
                stacklevel=4,
            )
            self.folder = None
        return blocks | theirs

    def _checksum(self, number: int, block: Block) -> str:
        return f"{checksum(block, self.data[number] if self.data else 0):08x}"

    @staticmethod
    def _file(folder: Path, number: int) -> Path:
        return folder / f"block-{number:06d}.safetensors"


def checksum(block: Block, value: int = 0) -> int:
    """The checksum of a block, which continues that of other data."""
    for name in sorted(block):
        value = zlib.crc32(block[name].contiguous().numpy().data, value)
    return value


class Make(Protocol):
    """Makes the blocks of some numbers, and reports how many tokens are done."""

    def __call__(self, numbers: list[int], on_tokens: Callable[[int], object]) -> list[Block]: ...


def all_blocks(
    make: Make,
    wanted: int,
    store: BlockStore,
    *,
    at_a_time: Callable[[], int],
    together: bool,
    tokens: int,
    shown: str,
) -> list[Block]:
    """Return the first ``wanted`` blocks. Each rank makes a share of those that are not cached.

    Args:
        make: makes some blocks.
        wanted: the number of blocks.
        store: the cache.
        at_a_time: the number of blocks to make per call, which may change.
        together: whether all ranks must make all blocks, because the model is sharded.
        tokens: the number of tokens per block, for the progress bar.
        shown: what the progress bar shows; nothing if empty.
    """
    rank, world = rank_and_world()
    # Rank 0 reads for all, because the ranks may not share a disk.
    known = _from_rank_0(store.read(range(wanted)) if rank == 0 else {})
    missing = [number for number in range(wanted) if number not in known]
    mine = missing if together else missing[rank::world]
    made: dict[int, Block] = {}
    bar = progress_bar(len(mine) * tokens, shown, shown=bool(shown and mine), unit="token")
    error: Exception | None = None
    try:
        with bar:
            while left := [number for number in mine if number not in made]:
                some = left[: at_a_time()]
                new = dict(zip(some, make(some, bar.update), strict=True))
                if not together:
                    new = store.write(new)
                elif rank == 0:  # all ranks have made the same blocks
                    store.write(new)
                made |= new
    except Exception as raised:
        if world == 1:
            raise
        error = raised  # the other ranks wait in the gather below
    for theirs in gathered(error or ({} if together else made)):
        if isinstance(theirs, Exception):
            raise theirs
        known |= theirs
    if rank == 0:
        store.write({n: known[n] for n in missing if n in known and n not in made})
    known |= made
    return [known[number] for number in range(wanted)]


def _from_rank_0(value: Value) -> Value:
    box = [value]
    if rank_and_world()[1] > 1:
        distributed.broadcast_object_list(box, src=0)
    return box[0]
