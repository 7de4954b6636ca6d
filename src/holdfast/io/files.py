"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make the file beside its place, then move it there."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # machines share folders
    try:
        write(beside)
        with open(beside, "rb") as written:
            os.fsync(written.fileno())  # on disk before its name says so
        os.replace(beside, path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)  # a full disk does not say what there is no room for
        raise


def check_folder(folder: Path, option: str = "--out") -> None:
    """Before long work, not after it: a directory can be made there, and written to."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{option} must be a directory, and {folder} is a file")
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder} cannot be written: no permission in {above}")


@contextlib.contextmanager
def locked(folder: Path, name: str | None = None) -> Iterator[None]:
    """Lock an output folder; raise ValueError if another process on this machine uses it.

    Args:
        folder: created if it does not exist.
        name: name of the output in the error, if it is not the folder itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")  # the system releases it if this process dies
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"another holdfast process is writing to {name or folder}: choose another --out"
        ) from None
    try:
        yield
    finally:
        lock.release()
