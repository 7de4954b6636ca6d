"""Claim where a command writes: it never writes over its inputs or over files of others.

A claimed directory contains the file ``.holdfast``. Its text names the command, and a lock on it
lasts as long as the process. So a directory with this file is ours, everything temporary in it was
left by a process that died, and two processes never write to the same directory.
"""

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.io.files import naming_errors, open_here, synced, temporary
from holdfast.io.storage import Place
from holdfast.io.untrusted import parse_yaml

MARKER = ".holdfast"
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp|\.tmp\w{6}")  # safetensors names its own

#: Files that show which command wrote a directory before there were markers, and keys in them.
_EARLIER: tuple[tuple[str, str, frozenset[str]], ...] = (
    ("tune", "config.yaml", frozenset({"recipe", "data", "trials"})),
    ("finetune", "config.yaml", frozenset({"recipe", "data", "lr"})),
    ("compare", "config.yaml", frozenset({"recipes", "data", "lr"})),
    ("compare", "results.json", frozenset({"runs", "schema_version"})),
    ("compare", "runs/*/result.json", frozenset({"id", "recipe", "target"})),
    ("measure", "report.json", frozenset({"tuned", "schema_version"})),
    ("merge --sweep", "sweep.json", frozenset({"points", "schema_version"})),
    ("score", "scores.json", frozenset({"task", "tokens"})),
    ("report", "report.html", frozenset({"schema_version"})),
    ("report", "sweep.html", frozenset({"schema_version"})),
)


@contextlib.contextmanager
def claim(
    out: str | os.PathLike[str] | Place | None,
    command: str,
    inputs: Iterable[str] = (),
    *,
    files: Collection[str] | None = None,
    ours: Callable[[Path], bool] | None = None,
    also: Collection[str] = (),
    option: str = "--out",
) -> Iterator[bool]:
    """Claim an output directory (None: nothing): check it, create it and lock it.

    Yields whether the command has already claimed it and has not finished. If nothing is written,
    the directory is left as it was.

    Args:
        inputs: what the command reads. Names that are neither files nor directories are ignored.
        files: names of all files that the command writes. If None, it may write any file, so that
            the directory must not contain an input.
        ours: whether the command may write to a directory that is neither empty nor claimed. By
            default, it may if an earlier version of the same command wrote it.
        also: other commands to whose directories it may add its files.
        option: the option that names the directory, for errors.
    """
    if out is None:
        yield False
        return
    place = out if isinstance(out, Place) else Place.at(output_name(out, option))
    folder = Path(place.name) if place.is_local else place.folder
    check_writable(folder, option)
    check_inputs(folder, inputs, files, option)
    before, was_there = place.names(), folder.exists()
    maker = maker_of(place)
    if MARKER not in before:
        may = ours(folder) if ours and folder.is_dir() else maker in (command, *also)
        if not may and any(not _TEMPORARY.fullmatch(name) for name in before):
            raise ValueError(
                f"{option} {place.name} is not empty, and holdfast {command} did not write what it "
                "contains: give another directory"
            )
    elif maker not in ("", command, *also):
        raise ValueError(
            f"{option} {place.name} contains results of holdfast {maker}: give another directory"
        )
    folder.mkdir(parents=True, exist_ok=True)
    known = set(os.listdir(folder))
    try:
        with _locked(folder / MARKER, command, place.name):
            if not place.is_local and MARKER not in before:
                (place / MARKER).write_text(f"{command}\n")
            _remove_temporaries(folder)
            yield MARKER in before
    finally:
        with contextlib.suppress(OSError):
            if MARKER not in known and set(os.listdir(folder)) - {MARKER} <= known:
                (folder / MARKER).unlink(missing_ok=True)
            if not was_there:
                folder.rmdir()  # if it is empty


def claim_file(
    file: str | os.PathLike[str],
    inputs: Iterable[str] = (),
    *,
    ours: Callable[[Path], bool],
    option: str = "--out",
) -> Path:
    """Check that a file can be written: it is no input, and if it exists it is ours."""
    path = Path(output_name(file, option))
    if path.is_dir():
        raise ValueError(f"{option} must be a file, but {path} is a directory")
    check_writable(path.absolute().parent, option)
    check_inputs(path.absolute().parent, inputs, [path.name], option)
    if path.exists() and not ours(path):
        raise ValueError(
            f"{option} {path} exists, and holdfast did not write it: give another name"
        )
    _remove_temporaries(path.parent, of=path.name)
    return path


def output_name(out: str | os.PathLike[str], option: str = "--out") -> str:
    """Return the name of an output if files can be written under it."""
    name = os.fspath(out)
    if not name.strip():
        raise ValueError(f"{option} must name a place to write to, but it is empty")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{option} must be valid UTF-8, got {name!r}: give another name") from None
    if "\0" in name:
        raise ValueError(f"{option} must not contain a null character, got {name!r}")
    return name


def check_writable(folder: Path, option: str = "--out") -> None:
    """Raise ValueError if the directory cannot be created or written."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{option} must be a directory, but {folder} is a file")
    if folder.is_symlink() and not folder.exists():
        raise ValueError(f"{option} {folder} is a symbolic link to a directory that does not exist")
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder} cannot be written: no permission in {above}")


def check_inputs(
    folder: Path, inputs: Iterable[str], files: Collection[str] | None, option: str = "--out"
) -> None:
    """Raise ValueError if writing to the directory, or to some files of it, would hit an input."""
    real = folder.resolve()
    written = None if files is None else {real / name for name in files}
    links = _links(folder, files)
    for given in inputs:
        source = local_path(given)
        if source is None:
            continue
        for at in {source.resolve(), source.absolute().parent.resolve() / source.name}:
            if source.is_dir() and (at == real or at in real.parents):
                raise ValueError(f"{option} {folder} must be outside the input {given}")
            hit = real in at.parents if written is None else at in written
            if hit or any(at in path.parents for path in written or ()):
                raise ValueError(
                    f"{option} {folder} would overwrite the input {given}: give another directory"
                )
        for file in _files_of(source) if links else ():
            if (known := _identity(file)) in links:
                raise ValueError(
                    f"{option} {folder} contains the input {file}, as a link: remove {links[known]}"
                )


def maker_of(place: Place) -> str | None:
    """The command that wrote a directory; empty if it was stopped at once, None if not known."""
    names = place.names()
    if MARKER in names:
        text = (place / MARKER).read_text() if _is_plain(place / MARKER) else ""
        return text.strip()[:40] if text.endswith("\n") else ""
    for command, pattern, keys in _EARLIER:
        if pattern.partition("/")[0] not in names:
            continue
        if any(keys <= _keys_of(file) for file in _below(place, pattern.split("/"))):
            return command
    return None


@contextlib.contextmanager
def written_aside(folder: Path, on_ready: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """A directory for the files of a model, which are moved into the claimed folder at the end.

    ``on_ready`` is called when all are on disk. The configuration is moved last: without it, nobody
    takes the folder for a model.
    """
    aside = temporary(folder / "model")
    try:
        with naming_errors(folder):
            aside.mkdir()
            yield aside
            for file in sorted(aside.rglob("*")):
                if file.is_file():
                    synced(file)
            on_ready()
            for file in sorted(aside.iterdir(), key=lambda file: file.name.endswith("config.json")):
                os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_changed(file: Place, text: str) -> None:
    """Write a YAML file, unless it has the same values: it may be an input, with comments."""
    with contextlib.suppress(OSError, ValueError):
        if parse_yaml(file.read_text(), file.name) == parse_yaml(text, file.name):
            return
    file.write_text(text)


def finished(folder: Path) -> None:
    """Give up a claim whose result is complete: the folder is a model like any other."""
    (folder / MARKER).unlink(missing_ok=True)


def local_path(source: str | os.PathLike[str]) -> Path | None:
    """The file or directory of an input; None if it is not on this machine.

    A split of a saved dataset is given as ``DIR:SPLIT``.
    """
    name = os.fspath(source)
    for known in (name, name.rpartition(":")[0]):
        with contextlib.suppress(OSError, ValueError):  # too long, or with a null character
            if known and Path(known).exists():
                return Path(known)
    return None


def refuse_link(file: Path) -> None:
    """Raise ValueError if a file that we write to is a symbolic link."""
    if file.is_symlink():
        raise ValueError(
            f"{file} is a symbolic link, and holdfast would write to its target: remove it"
        )


@contextlib.contextmanager
def _locked(file: Path, text: str, name: str) -> Iterator[None]:
    """Create a file, or open it, and lock it. The system releases the lock if this process dies."""
    refuse_link(file)
    held = open_here(file, os.O_RDWR)
    try:
        try:
            _lock(held)
        except BlockingIOError:
            raise ValueError(
                f"another holdfast process is writing to {name}: choose another --out"
            ) from None
        if not os.read(held, 1 << 10).endswith(b"\n"):  # it is new, or was cut short
            with naming_errors(file):
                os.ftruncate(held, 0)
                os.pwrite(held, f"{text}\n".encode(), 0)
        yield
    finally:
        os.close(held)


def _lock(file: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file, 1 << 20, os.SEEK_SET)  # the text stays readable
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError from error
        os.lseek(file, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_temporaries(folder: Path, of: str | None = None) -> None:
    """Remove what dead processes left: everything temporary, or that of one file."""
    for path in sorted(folder.glob("**/.*tmp*" if of is None else ".*.tmp")):
        found = _TEMPORARY.fullmatch(path.name)
        if found and of in (None, found[1]):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _links(folder: Path, files: Collection[str] | None) -> dict[tuple[int, int], Path]:
    """Files of a directory that may be the same as files elsewhere."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        wanted = files is None or path.name in files
        with contextlib.suppress(OSError):  # a broken link
            if wanted and path.is_file() and (path.is_symlink() or path.stat().st_nlink > 1):
                found[_identity(path)] = path
    return found


def _identity(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_dev, about.st_ino


def _files_of(source: Path) -> Sequence[Path]:
    return [p for p in source.rglob("*") if p.is_file()] if source.is_dir() else [source]


def _is_plain(file: Place) -> bool:
    return not (file.is_local and Path(file.path).is_symlink())


def _below(place: Place, pattern: Sequence[str]) -> Iterator[Place]:
    """The files under a place, by the parts of their path, of which * is any name."""
    if not pattern:
        yield place
        return
    first, *rest = pattern
    for name in place.names() if first == "*" else [first]:
        yield from _below(place / name, rest)


def _keys_of(file: Place) -> set[str]:
    """The keys of a JSON or YAML file, or of the JSON in a page; none if it is not one."""
    value: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        text = file.read_text()
        if file.name.endswith(".html"):
            return {"schema_version"} if '"schema_version"' in text else set()
        is_json = file.name.endswith(".json")
        value = json.loads(text) if is_json else parse_yaml(text, file.name)
    return set(value) if isinstance(value, dict) else set()
