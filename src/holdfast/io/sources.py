"""Where rows come from: files, datasets saved on disk, folders of images, datasets of the hub.

open_rows("train.jsonl.gz")
open_rows("saved:train")                   # datasets.save_to_disk, one of its splits
open_rows("flowers/train")                 # a folder for each class, with its images
open_rows("openai/gsm8k:main:train")       # the hub's name, a configuration, a split
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from holdfast._torch.names import shorten
from holdfast.io.hub import check_hub
from holdfast.io.labels import as_number
from holdfast.io.rows import is_rows, is_text, read_rows, read_text

__all__ = ["IMAGE_COLUMNS", "LABEL_COLUMNS", "Rows", "Table", "labels_of", "open_rows"]

Rows = Sequence[Mapping[str, Any]]
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels")
_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm")
_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class Table(Sequence[Mapping[str, Any]]):
    """The rows of a ``datasets.Dataset``: one is read, and its image decoded, when it is asked for.

    Attributes:
        names: what the classes of its labels are called, by their numbers; None where it does not
            say. If any of them is a number itself, they stand in the rows, so that none is mistaken
            for another.
        classes: whether its labels are classes, even if they look like numbers to predict.
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
    def __getitem__(self, index: slice) -> Table: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Table:
        if isinstance(index, slice):
            return Table(self.dataset.select(range(*index.indices(len(self)))))
        row: dict[str, Any] = self.dataset[index]
        if self.column is not None:
            row[self.column] = self._named(row[self.column])
        return row

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self[i] for i in range(len(self)))

    def labels(self) -> list[Any]:
        """Those of all rows; no image is decoded for them."""
        if self.column is None:
            return [None] * len(self)
        return [self._named(label) for label in self.dataset[self.column]]

    def _named(self, label: Any) -> Any:
        if self._spelled is None or not isinstance(label, int):
            return label
        return self._spelled[label] if label >= 0 else None  # datasets' -1 is no label


def labels_of(rows: Rows, name: str) -> list[Any] | None:
    """The labels of rows; None if they have none. An error names the first row that lacks its."""
    if isinstance(rows, Table):
        labels = rows.labels()
    else:
        labels = [next((r[c] for c in LABEL_COLUMNS if r.get(c) is not None), None) for r in rows]
    lacking = [i for i, label in enumerate(labels) if label is None or label == ""]
    if len(lacking) == len(labels):
        return None
    if lacking:
        raise ValueError(
            f"{name}: {len(lacking)} rows have no label, the first is row {lacking[0]}"
        )
    return labels


def open_rows(data: str | os.PathLike[str]) -> Rows:
    """The rows that a name stands for; running text is one row.

    Args:
        data: a file (JSON lines, JSON, CSV, TSV, Parquet, text), a directory that
            ``datasets.save_to_disk`` wrote (``dir:split``), a folder of images in a folder for each
            class, or a dataset of the Hugging Face hub (``name``, ``name:split`` or
            ``name:configuration:split``). What is here wins.
    """
    name, path = str(data), Path(data)
    if path.is_dir():
        return _directory(path, None)
    if path.exists():
        return [{"text": read_text(path)}] if is_text(path) else read_rows(path)
    folder, _, split = name.rpartition(":")
    if folder and Path(folder).is_dir():
        return _directory(Path(folder), split)
    plain, *more = name.split(":")
    of_file = is_rows(path) or (path.suffix != "" and is_text(path))
    if of_file or not _HUB.fullmatch(plain) or len(more) > 2:
        raise FileNotFoundError(f"no such file: {name}")
    return _hub(name, plain, *more)


def _directory(path: Path, split: str | None) -> Rows:
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        try:
            found = _datasets(str(path)).load_from_disk(str(path))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path} cannot be read as a saved dataset: {error}") from error
        return _table(found, split, str(path))
    if split is not None:
        path = path / split
        if not path.is_dir():
            raise FileNotFoundError(f"no such directory: {path}")
    return _image_folder(path)


def _image_folder(path: Path) -> Rows:
    rows = []
    for folder in sorted(p for p in _shown(path) if p.is_dir()):
        files = sorted(p for p in _shown(folder) if p.suffix.lower() in _IMAGES)
        rows += [{"image": str(file), "label": folder.name} for file in files]
    if not rows:
        deeper = {str(p.parent.parent) for p in path.glob("*/*/*") if p.suffix in _IMAGES}
        hint = f"; do you mean {' or '.join(sorted(deeper))}?" if deeper else ""
        raise ValueError(
            f"{path} is neither a dataset saved by datasets.save_to_disk nor a folder with a "
            f"folder of images for each class{hint}"
        )
    return rows


def _shown(path: Path) -> Iterator[Path]:
    """What is in a folder, without the hidden (``.ipynb_checkpoints``, ``._1.png``)."""
    return (inside for inside in path.iterdir() if not inside.name.startswith("."))


def _hub(name: str, dataset: str, *more: str) -> Rows:
    configuration, split = more if len(more) == 2 else (None, *more, None)[:2]
    check_hub(dataset, "dataset")
    try:
        found = _datasets(name).load_dataset(dataset, configuration, split=split)
    except Exception as error:  # of many kinds: no network, no such name, no such split
        reason = str(error).strip().split("\n")[0][:300]
        raise ValueError(
            f"{name}: there is no such file or directory here, and the hub gave no such dataset: "
            f"{reason}"
        ) from error
    return _table(found, None, name)


def _table(found: Any, split: str | None, name: str) -> Table:
    if not hasattr(found, "column_names") or isinstance(found.column_names, dict):
        if split is None and len(found) == 1:
            split = next(iter(found))
        if split not in found:
            what = f"has no split {split!r}" if split else "has several splits"
            raise ValueError(f"{name} {what}: say which, as in {name}:{next(iter(found))}; it has "
                             f"{shorten(list(found))}")  # fmt: skip
        found = found[split]
    elif split is not None:
        raise ValueError(f"{name} has no splits: leave out :{split}")
    if not len(found):
        raise ValueError(f"{name} has no rows")
    return Table(found)


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f'{name} needs datasets: pip install "holdfast[hf]"') from error
    return datasets
