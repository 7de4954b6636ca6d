"""Where results lie: a folder of this machine, or wherever fsspec can write (``s3://…``)."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.comparison.result import RunResult
from holdfast.io.files import write_whole

__all__ = ["Place", "read_result"]


@dataclass(frozen=True)
class Place:
    """A file or a folder, here or elsewhere.

    Attributes:
        name: as its user knows it.
        path: within its filesystem.
        files: a filesystem of fsspec; None is this machine's.

    Example:
        >>> results = Place.at("memory://tests/one") / "results.json"
        >>> results.write_text("{}")
        >>> results.name, results.read_text()
        ('memory://tests/one/results.json', '{}')
    """

    name: str
    path: str
    files: Any = None

    @classmethod
    def at(cls, where: str | os.PathLike[str]) -> Place:
        """From a path or an address: ``runs/one``, ``file:///data/one``, ``s3://bucket/one``."""
        name = os.fspath(where)
        if "://" not in name:
            return cls(name, os.path.abspath(name))
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        files, path = url_to_fs(name.rstrip("/"))
        if isinstance(files, LocalFileSystem):
            return cls(path, path)
        return cls(name.rstrip("/"), path, files)

    def __truediv__(self, name: str) -> Place:
        return Place(f"{self.name}/{name}", f"{self.path}/{name}", self.files)

    @property
    def folder(self) -> Path:
        """The folder of this machine for what is under way: itself, or one in the cache.

        It is the same each time, so that what was stopped here goes on here.
        """
        if self.files is None:
            return Path(self.path)
        cache = os.environ.get("HOLDFAST_CACHE") or Path.home() / ".cache" / "holdfast"
        return Path(cache, "compare", hashlib.sha256(self.name.encode()).hexdigest()[:16])

    def read_text(self) -> str:
        """What the file holds; FileNotFoundError if there is none."""
        if self.files is None:
            return Path(self.path).read_text(encoding="utf-8")
        try:
            held: bytes = self.files.cat_file(self.path)
        except FileNotFoundError:
            raise
        except Exception as error:  # each filesystem has its own
            raise OSError(f"cannot read {self.name}: {error}") from error
        return held.decode("utf-8")

    def write_text(self, text: str) -> None:
        """Write the file whole: here it is moved to its place, elsewhere it is one put."""
        if self.files is None:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            write_whole(
                Path(self.path), lambda file: file.write_text(text, encoding="utf-8", newline="\n")
            )
            return
        try:
            self.files.makedirs(self.path.rpartition("/")[0], exist_ok=True)
            self.files.pipe_file(self.path, text.encode("utf-8"))
        except Exception as error:
            raise OSError(f"cannot write {self.name}: {error}") from error

    def remove(self) -> None:
        """Remove the file, if it is there."""
        if self.files is None:
            Path(self.path).unlink(missing_ok=True)
            return
        try:
            self.files.rm_file(self.path)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise OSError(f"cannot remove {self.name}: {error}") from error


def read_result(file: Place) -> RunResult | None:
    """The result of a run that is finished; one that cannot be understood is as good as none."""
    try:
        return RunResult.from_json(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
