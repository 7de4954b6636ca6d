"""Where results are stored: a folder of this machine, or any address of fsspec (``s3://…``)."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from holdfast.io.files import write_text


@dataclass(frozen=True)
class Place:
    """A file or a folder, on this machine or elsewhere.

    >>> results = Place.at("memory://tests/one") / "results.json"
    >>> results.write_text("{}")
    >>> results.name, results.read_text()
    ('memory://tests/one/results.json', '{}')
    """

    name: str  # the path or address that the user gave
    path: str  # within the filesystem
    files: Any  # the filesystem of fsspec

    @classmethod
    def at(cls, where: str | os.PathLike[str]) -> Place:
        name = os.fspath(where)
        if "://" not in name:
            return cls(name, os.path.abspath(name), LocalFileSystem())
        files, path = url_to_fs(name.rstrip("/"))
        return cls(path if isinstance(files, LocalFileSystem) else name.rstrip("/"), path, files)

    def __truediv__(self, name: str) -> Place:
        return Place(f"{self.name}/{name}", f"{self.path}/{name}", self.files)

    @property
    def is_local(self) -> bool:
        return isinstance(self.files, LocalFileSystem)

    @property
    def folder(self) -> Path:
        """The local folder for unfinished runs: the place itself, or a folder in the cache.

        An address always has the same folder, so that a stopped run can be resumed.
        """
        if self.is_local:
            return Path(self.path)
        cache = os.environ.get("HOLDFAST_CACHE") or Path.home() / ".cache" / "holdfast"
        return Path(cache, "compare", hashlib.sha256(self.name.encode()).hexdigest()[:16])

    def read_text(self) -> str:
        with self._naming_errors("read"):
            content: bytes = self.files.cat_file(self.path)
        return content.decode("utf-8")

    def write_text(self, text: str) -> None:
        """Write the whole file atomically: by a rename on this machine, by one put elsewhere."""
        if self.is_local:
            file = Path(self.path)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, text)
            return
        with self._naming_errors("write"):
            self.files.makedirs(self.path.rpartition("/")[0], exist_ok=True)
            self.files.pipe_file(self.path, text.encode("utf-8"))

    def names(self) -> list[str]:
        """The names in a folder; none if it does not exist."""
        if self.is_local:
            return sorted(os.listdir(self.path)) if os.path.isdir(self.path) else []
        with contextlib.suppress(FileNotFoundError), self._naming_errors("list"):
            self.files.invalidate_cache()
            found = self.files.ls(self.path, detail=False)
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)
        return []

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._naming_errors("remove"):
            self.files.rm_file(self.path)

    @contextlib.contextmanager
    def _naming_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # filesystems raise their own types, which may not name the file
            if self.is_local or isinstance(error, FileNotFoundError):
                raise
            raise OSError(f"cannot {action} {self.name}: {error}") from error
