"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make the file beside its place, then move it there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(beside)
        with open(beside, "rb") as written:
            os.fsync(written.fileno())  # on disk before its name says so
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
