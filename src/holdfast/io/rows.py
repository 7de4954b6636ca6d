"""Rows of data from files, saved datasets, image folders and the Hugging Face hub.

open_rows("train.jsonl.gz")
open_rows(["a.jsonl", "more/*.parquet"])   # several files, as one
open_rows("saved:train")                   # a split of a dataset that save_to_disk wrote
open_rows("flowers/train")                 # one folder of images per class
open_rows("openai/gsm8k:main:train")       # a hub dataset: name, configuration, split
"""

import csv
import glob
import gzip
import io
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from holdfast._torch.imports import require
from holdfast._torch.names import shorten
from holdfast.builtin import located
from holdfast.io.files import first_line
from holdfast.io.hub import check_hub, is_hub_name

Rows = Sequence[Mapping[str, Any]]
#: The name of rows, or several names whose rows follow each other.
Sources = str | os.PathLike[str] | Sequence[str]
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels")
#: Pairs of columns that hold the two texts of one sample.
PAIRS = (
    ("text1", "text2"), ("sentence1", "sentence2"), ("premise", "hypothesis"),
    ("question1", "question2"), ("question", "sentence"),
)  # fmt: skip
_TEXT_SUFFIXES = (".txt", ".md", ".text", "")
_TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
_ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", *_TABLE_SUFFIXES)
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # a surrogate as JSON spells it


class DatasetRows(Sequence[Mapping[str, Any]]):
    """The rows of a ``datasets.Dataset``. A row is read, and its image decoded, on access.

    ``names`` are the class names by index, if the dataset has names. If any name is itself a
    number, the rows hold the names instead of the indices, so that a name cannot be mistaken for
    an index. ``classes`` tells that labels are classes, even if they look like numbers.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.column = next((c for c in LABEL_COLUMNS if c in dataset.column_names), None)
        feature = dataset.features[self.column] if self.column else None
        self.names: list[str] | None = getattr(feature, "names", None)
        self.classes = self.names is not None
        self._spelled: list[str] | None = None
        if self.names and any(as_number(name) is not None for name in self.names):
            self.names, self._spelled = None, self.names

    def __len__(self) -> int:
        return len(self.dataset)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Rows:
        if isinstance(index, slice):
            return DatasetRows(self.dataset.select(range(*index.indices(len(self)))))
        row: dict[str, Any] = self.dataset[index]
        if self.column is not None:
            row[self.column] = self._named(row[self.column])
        return row

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for row in self.dataset:  # reads many rows at a time
            if self.column is not None:
                row[self.column] = self._named(row[self.column])
            yield row

    def labels(self) -> list[Any]:
        """Return the labels of all rows without decoding any image."""
        if self.column is None:
            return [None] * len(self)
        return [self._named(label) for label in self.dataset[self.column]]

    def _named(self, label: Any) -> Any:
        if self._spelled is None or not isinstance(label, int):
            return label
        return self._spelled[label] if label >= 0 else None  # datasets uses -1 for "no label"


def columns_of(rows: Rows) -> list[str]:
    """Return the names of all columns."""
    if isinstance(rows, DatasetRows):
        return list(rows.dataset.column_names)
    return list(dict.fromkeys(str(column) for row in rows for column in row))


def text_columns(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the text columns of a row: a pair, one column, or none."""
    for pair in PAIRS:
        if all(isinstance(row.get(column), str) for column in pair):
            return pair
    return next(((c,) for c in ("text", "sentence") if isinstance(row.get(c), str)), ())


def image_column(row: Mapping[str, Any]) -> str | None:
    return next((column for column in IMAGE_COLUMNS if column in row), None)


def label_of(row: Mapping[str, Any]) -> Any:
    return next((row[c] for c in LABEL_COLUMNS if row.get(c) is not None), None)


def as_number(label: Any) -> float | None:
    """Return a label as a finite number, also if it is text as in a CSV file; else None.

    >>> as_number("4.75"), as_number(3), as_number("red"), as_number("nan"), as_number(10**400)
    (4.75, 3.0, None, None, None)
    """
    try:
        number = float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def labels_of(rows: Rows, name: str) -> list[Any] | None:
    """Return the labels of rows; None if no row has one, an error if only some have."""
    labels = rows.labels() if isinstance(rows, DatasetRows) else [label_of(row) for row in rows]
    missing = [i for i, label in enumerate(labels) if label is None or label == ""]
    if len(missing) == len(labels):
        return None
    if missing:
        raise ValueError(
            f"{name}: {len(missing)} rows have no label; the first is row {missing[0]}"
        )
    return labels


def open_rows(data: Sources, most: int | None = None) -> Rows:
    """Open the rows that a name, or several names, stand for. A text file is one row.

    Args:
        data: a file (JSON lines, JSON, CSV, TSV, Parquet, Arrow or text), a pattern of files
            (``data/*.jsonl``), a directory that ``datasets.save_to_disk`` wrote or that holds the
            files of a dataset (``dir:split``), a folder with one folder of images per class, or a
            dataset on the Hugging Face hub (``name``, ``name:split`` or
            ``name:configuration:split``). Local files take precedence over the hub.
        most: JSON lines are read up to this number of rows per file.
    """
    opened = {name: _open(name, most) for name in names_of(data)}
    first, *others = opened.values()
    if not others:
        return first
    if not all(isinstance(rows, DatasetRows) for rows in opened.values()):
        return [row for rows in opened.values() for row in rows]
    datasets = require("datasets", extra="hf", what=name_of(data))
    try:
        tables = [rows.dataset for rows in opened.values() if isinstance(rows, DatasetRows)]
        return DatasetRows(datasets.concatenate_datasets(tables))
    except ValueError as error:
        raise ValueError(
            f"{shorten(list(opened), most=2)} have columns of different types: {first_line(error)}"
        ) from error


def hold_out(rows: Rows, share: float) -> tuple[Rows, Rows]:
    """Split rows into those to train on, and a share of them at equal distances.

    >>> hold_out([{"n": n} for n in range(5)], 0.5)
    ([{'n': 0}, {'n': 2}, {'n': 4}], [{'n': 1}, {'n': 3}])
    """
    numbers = range(len(rows))
    held = [n for n in numbers if math.floor((n + 1) * share) > math.floor(n * share)]
    if not held:
        raise ValueError(f"a share of {share:g} of {len(rows)} rows is not a row: hold out more")
    left = sorted({*numbers} - {*held})
    if isinstance(rows, DatasetRows):
        one, other = (DatasetRows(rows.dataset.select(some)) for some in (left, held))
        return one, other
    return [rows[n] for n in left], [rows[n] for n in held]


def names_of(data: Sources, kind: Literal["data", "text"] = "data") -> list[str]:
    """Return the names that data stand for, those of :func:`matched` and of ``builtin``."""
    return [path for name in matched(data) for path in located(name, kind)]


def matched(data: Sources) -> list[str]:
    """Return the names of data: a pattern is replaced by the files that match it."""
    given = [data] if isinstance(data, str | os.PathLike) else data
    if not (names := list(map(str, given))):
        raise ValueError("the data must be at least one file")
    found: list[str] = []
    for name in names:
        if os.path.exists(name) or not glob.has_magic(name):
            found.append(name)
            continue
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise FileNotFoundError(f"no file matches {name}")
        found += matches
    return found


def share_a_file(one: Sources, other: Sources) -> bool:
    """Whether two data have a file in common; symbolic links are followed.

    >>> share_a_file(["a.jsonl", "b.jsonl"], "./b.jsonl")
    True
    """
    first, second = ({os.path.realpath(name) for name in names_of(data)} for data in (one, other))
    return not first.isdisjoint(second)


def name_of(data: Sources) -> str:
    """Return one name of data, for errors.

    >>> name_of(["a.jsonl", "b.jsonl", "c.jsonl"])
    'a.jsonl … and 2 more'
    """
    return str(data) if isinstance(data, str | os.PathLike) else shorten(list(data), most=1)


def _open(name: str, most: int | None) -> Rows:
    path = Path(name)
    if path.is_dir():
        return _open_directory(path, None)
    if path.exists():
        if _suffix(path) in _TABLE_SUFFIXES:
            return _open_table(path)
        return [{"text": read_text(path)}] if is_text(path) else read_rows(path, most)
    folder, _, split = name.rpartition(":")
    if folder and Path(folder).is_dir():
        return _open_directory(Path(folder), split)
    plain, *more = name.split(":")
    is_file_name = _suffix(path) in _ROW_SUFFIXES or (path.suffix != "" and is_text(path))
    if is_file_name or not is_hub_name(plain) or len(more) > 2:
        raise FileNotFoundError(f"no such file: {name}")
    configuration, part = more if len(more) == 2 else (None, *more, None)[:2]
    check_hub(plain, "dataset")
    return _load(name, plain, configuration, split=part)


def is_text(path: Path) -> bool:
    return _suffix(path) in _TEXT_SUFFIXES


def is_rows(path: Path) -> bool:
    return _suffix(path) in _ROW_SUFFIXES


def read_text(path: Path) -> str:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {path}") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from error
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text


def read_rows(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Read the rows of a text-based file, of JSON lines at most so many.

    An error names the file and the line.
    """
    suffix = _suffix(path)
    if suffix not in _ROW_SUFFIXES:
        raise ValueError(
            f"{path}: unsupported file type {path.suffix}; supported types: "
            f"{', '.join((*_ROW_SUFFIXES, *filter(None, _TEXT_SUFFIXES)))}"
        )
    text = read_text(path)
    rows: list[dict[str, Any]] = []
    where, form = str(path), "JSON" if "json" in suffix else suffix[1:].upper()
    try:
        if suffix in (".csv", ".tsv"):
            csv.field_size_limit(sys.maxsize)
            delimiter = "\t" if suffix == ".tsv" else ","
            rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
        elif suffix == ".json":
            rows = json.loads(text)
        else:
            # Not splitlines(): a JSON string may hold U+2028, which only Python ends a line at.
            for number, line in enumerate(text.split("\n"), start=1):
                if len(rows) == most:
                    break
                where = f"{path}, line {number}"
                if line.strip():
                    rows.append(json.loads(line))
    except (csv.Error, OSError, RecursionError, ValueError) as error:
        raise ValueError(f"{where} is not {form}: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} must contain a non-empty list of rows (in JSON files: objects)")
    if _HALF.search(text):
        for number, row in enumerate(rows):
            check_unicode(row, f"{path}: row {number}")
    return rows


def check_unicode(value: Any, what: str) -> None:
    """Raise ValueError if texts hold half of a surrogate pair, which JSON can spell.

    >>> check_unicode(["a", "\\ud800"], "row 1")
    Traceback (most recent call last):
    ...
    ValueError: row 1 holds '\\ud800', half of a surrogate pair, which is not a character
    """
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            check_unicode(part, what)
    elif isinstance(value, str) and (half := re.search("[\ud800-\udfff]", value)):
        raise ValueError(
            f"{what} holds {half[0]!r}, half of a surrogate pair, which is not a character"
        )


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _open_table(path: Path) -> DatasetRows:
    """Open a Parquet or Arrow file; the names of its classes, if datasets wrote it, are kept."""
    datasets = require("datasets", extra="hf", what=str(path))
    arrow = require("pyarrow", extra="hf", what=str(path))
    try:
        if _suffix(path) == ".parquet":
            table = require("pyarrow.parquet", extra="hf", what=str(path)).read_table(path)
        else:
            with arrow.memory_map(str(path)) as file:
                try:  # as datasets writes it
                    table = arrow.ipc.open_stream(file).read_all()
                except arrow.ArrowInvalid:
                    table = arrow.ipc.open_file(file).read_all()
        found = datasets.Dataset(table)
    except (arrow.ArrowException, OSError, ValueError) as error:
        form = _suffix(path)[1:].capitalize()
        raise ValueError(f"{path} is not {form}: {first_line(error)}") from error
    return _select_split(found, None, str(path))


def _open_directory(path: Path, split: str | None) -> Rows:
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        datasets = require("datasets", extra="hf", what=str(path))
        try:
            found = datasets.load_from_disk(str(path))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path} cannot be read as a saved dataset: {error}") from error
        return _select_split(found, split, str(path))
    inner = path / (split or "")
    if not any(_images_in(inner)) and any(_holds_rows(file) for file in path.rglob("[!.]*")):
        return _load(str(path), str(path), split=split)
    if not inner.is_dir():
        raise FileNotFoundError(f"no such directory: {inner}")
    return _open_image_folder(inner)


def _holds_rows(path: Path) -> bool:
    return is_rows(path) and _suffix(path) != ".json"  # which also holds settings


def _images_in(path: Path) -> Iterator[Path]:
    visible = path.glob("[!.]*/[!.]*")  # not .ipynb_checkpoints/1.png, nor cat/._1.png
    return (file for file in visible if file.suffix.lower() in _IMAGE_SUFFIXES)


def _open_image_folder(path: Path) -> Rows:
    files = sorted(_images_in(path))
    if not files:
        deeper = {str(p.parent.parent) for p in path.glob("*/*/*") if p.suffix in _IMAGE_SUFFIXES}
        hint = f"; do you mean {' or '.join(sorted(deeper))}?" if deeper else ""
        raise ValueError(
            f"{path} is neither a dataset saved by datasets.save_to_disk, nor a directory with "
            f"files of rows, nor a folder with one folder of images per class{hint}"
        )
    return [{"image": str(file), "label": file.parent.name} for file in files]


def _load(name: str, *dataset: str | None, split: str | None) -> Rows:
    """Load a dataset of the hub, or the files of one in a directory."""
    datasets = require("datasets", extra="hf", what=name)
    try:
        found = datasets.load_dataset(*dataset, split=split)
    except Exception as error:  # datasets raises many types: no network, no such name or split
        local = Path(name).is_dir()
        problem = "cannot be read as a dataset" if local else (
            "is neither a local file or directory nor a dataset on the hub"
        )  # fmt: skip
        raise ValueError(f"{name} {problem}: {first_line(error)}") from error
    return _select_split(found, None, name)


def _select_split(found: Any, split: str | None, name: str) -> DatasetRows:
    if isinstance(found, dict):
        if split is None and len(found) == 1:
            split = next(iter(found))
        if split not in found:
            problem = f"has no split {split!r}" if split else "has several splits"
            raise ValueError(
                f"{name} {problem}: choose one of {shorten(list(found))}, for example "
                f"{name}:{next(iter(found))}"
            )
        found = found[split]
    elif split is not None:
        raise ValueError(f"{name} has no splits: remove :{split}")
    if not len(found):
        raise ValueError(f"{name} has no rows")
    return DatasetRows(found)
