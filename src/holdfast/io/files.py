"""Files: atomic writing, JSON, and locks of output folders."""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: ``write`` creates a temporary file, which is then renamed."""
    # The name is random, because several machines may share the folder.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())  # on disk before the rename
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)  # the error of a full disk does not name the file
        raise


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]


@contextlib.contextmanager
def locked(folder: Path, name: str | None = None) -> Iterator[None]:
    """Create and lock an output folder; raise ValueError, with its name, if it is in use."""
    # Its audit hook slows down all of torch's optimizers, so it is imported only where it is used.
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")  # the system releases it if this process dies
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"another holdfast process is writing to {name or folder}: choose another --out"
        ) from None
    with held:
        yield
