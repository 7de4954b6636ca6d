"""Files of rows and of text: JSON lines, JSON, CSV, TSV, Parquet and plain text, gzipped or not."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["is_rows", "is_text", "read_rows", "read_text"]

_TEXT = (".txt", ".md", ".text", "")
_ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


def is_text(path: Path) -> bool:
    """Whether a file is running text, by its name."""
    return _kind(path) in _TEXT


def is_rows(path: Path) -> bool:
    """Whether a file holds rows, by its name."""
    return _kind(path) in _ROWS


def read_text(path: Path) -> str:
    """A text file. An error names the file."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {path}") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from error
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, by the names of their columns. An error names the file and the line."""
    kind = _kind(path)
    if kind not in _ROWS:
        raise ValueError(f"{path} is none of the kinds that hold rows: {', '.join(_ROWS)}")
    if kind == ".parquet":
        rows = _parquet(path)
    elif kind in (".csv", ".tsv"):
        rows = _csv(path, "\t" if kind == ".tsv" else ",")
    elif kind == ".json":
        rows = _json(path, read_text(path))
    else:
        rows = [_json(path, line, n + 1) for n, line in _lines(path)]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} holds no rows")
    return rows


def _csv(path: Path, delimiter: str) -> list[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    try:
        return list(csv.DictReader(io.StringIO(read_text(path), newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}") from error


def _kind(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _lines(path: Path) -> list[tuple[int, str]]:
    # Not splitlines(): a JSON string may hold U+2028, which is a line's end to Python alone.
    return [(n, line) for n, line in enumerate(read_text(path).split("\n")) if line.strip()]


def _json(path: Path, text: str, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        where = "" if line is None else f", line {line}"
        raise ValueError(f"{path}{where} is not JSON: {error}") from error


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f'{path} needs pyarrow: pip install "holdfast[hf]"') from error
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error
    return rows
