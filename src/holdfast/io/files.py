"""Files: atomic writing, and JSON."""

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


def temporary(path: Path) -> Path:
    """A new name beside a path. It is random, because several machines may share the folder."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: ``write`` creates a temporary file, which is then renamed."""
    beside = temporary(path)
    try:
        with naming_errors(path):
            write(beside)
            synced(beside)
            os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8."""
    write_whole(path, lambda file: file.write_text(text, encoding="utf-8", newline="\n"))


def open_here(path: str | Path, flags: int) -> int:
    """Open a file, or create it, but do not follow a symbolic link."""
    return os.open(path, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)


def remove_cut_line(path: Path) -> None:
    """Remove the end of a line that a kill or a full disk cut short: the next would be lost too."""
    with open(path, "r+b", opener=open_here) as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def synced(file: Path) -> None:
    """Wait until a file is on disk."""
    with open(file, "rb") as written:
        os.fsync(written.fileno())


@contextlib.contextmanager
def naming_errors(path: Path) -> Iterator[None]:
    """Raise an OSError that names the file where writing it fails."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)  # the error of a full disk does not name the file
        raise
    except (RuntimeError, SafetensorError) as error:
        if not re.search("os error|PytorchStreamWriter|unexpected pos", str(error)):
            raise
        said = re.search(r"os error (\d+)", str(error))
        number = int(said[1]) if said else errno.EIO
        # torch reports a position in the file, not the reason.
        reason = os.strerror(number) if said else "cannot be written: is the disk full?"
        raise OSError(number, reason, os.fspath(path)) from error


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]
