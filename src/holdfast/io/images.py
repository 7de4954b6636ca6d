"""Images as samples: each is read and decoded when it is asked for."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from holdfast.io.labels import target_of
from holdfast.io.models import Loaded
from holdfast.io.sources import IMAGE_COLUMNS, Rows, labels_of

__all__ = ["Images", "image_column", "open_image"]


def image_column(row: Mapping[str, Any]) -> str | None:
    """The column of a row that holds an image; None if it has none."""
    return next((column for column in IMAGE_COLUMNS if column in row), None)


class Images(Dataset[dict[str, Any]]):
    """Rows of images and labels as an image classifier takes them.

    Args:
        loaded: the model, with its image processor where others have a tokenizer.
        rows: each with an ``image`` (a file, its bytes, or a PIL image) and a ``label``.
        name: of the data, for errors.
    """

    def __init__(self, loaded: Loaded, rows: Rows, name: str) -> None:
        labels = labels_of(rows, name)
        column = image_column(rows[0])
        if labels is None or column is None:
            raise ValueError(f"{name}: a row needs an image and a label, and has {_names(rows[0])}")
        if not hasattr(loaded.tokenizer, "image_mean") and not hasattr(loaded.tokenizer, "size"):
            raise ValueError(
                f"{name} holds images, and {type(loaded.model).__name__} has no image processor: "
                "put its preprocessor_config.json beside its weights"
            )
        self.rows, self.name, self.column = rows, name, column
        self.processor = loaded.tokenizer
        self.labels: Sequence[int | float] = [target_of(loaded.model, x, name) for x in labels]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = open_image(self.rows[index][self.column], f"{self.name}, row {index}")
        made = self.processor(images=image, return_tensors="pt")
        return {"pixel_values": made["pixel_values"][0], "labels": self.labels[index]}


def open_image(given: Any, name: str) -> Any:
    """An image in colours, from a file, its bytes, an array or a PIL image."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images are read by Pillow: pip install pillow") from error
    if isinstance(given, Mapping):  # as Parquet files of datasets have it
        given = given.get("bytes") or given.get("path")
    try:
        if isinstance(given, bytes):
            given = Image.open(io.BytesIO(given))
        elif isinstance(given, str | os.PathLike):
            name = str(given)
            given = Image.open(given)
        elif not isinstance(given, Image.Image):
            given = Image.fromarray(given)
        return given.convert("RGB")
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {name}") from None
    except Exception as error:  # Pillow raises what a broken file makes it raise
        raise ValueError(f"{name} cannot be read as an image: {error}") from error


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "nothing"
