"""What a source holds, in a few letters: other data under an old name is other data."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

__all__ = ["contents_of"]

_WHOLE = 1 << 28  # bytes of a file that are read through; of a larger one its size must do


def contents_of(source: str) -> str | None:
    """A digest of a file, or of a folder by its files' names and sizes; None if it is not here.

    The small files of a folder (configurations) are read; weights and images are not.
    """
    path = Path(source)
    if not path.exists() and ":" in source:  # a split of a saved dataset
        path = Path(source.rpartition(":")[0])
    if path.is_file():
        return _of_file(str(path), path.stat().st_size, path.stat().st_mtime_ns)
    if not path.is_dir():
        return None
    found = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        size = file.stat().st_size
        found.update(f"{file.relative_to(path).as_posix()}:{size}\n".encode())
        if file.suffix == ".json" and size < 1 << 20:
            found.update(file.read_bytes())
    return found.hexdigest()[:12]


@lru_cache(maxsize=256)
def _of_file(path: str, size: int, changed: int) -> str:
    if size > _WHOLE:
        return f"{size} bytes"
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
