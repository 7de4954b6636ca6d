"""Images as samples. An image is read and decoded on access."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from holdfast._torch.imports import require
from holdfast.io.labels import target_of
from holdfast.io.models import Loaded
from holdfast.io.rows import IMAGE_COLUMNS, Rows, labels_of

__all__ = ["Images", "image_column", "open_image"]


def image_column(row: Mapping[str, Any]) -> str | None:
    """Return the column of a row that holds an image; None if there is none."""
    return next((column for column in IMAGE_COLUMNS if column in row), None)


class Images(Dataset[dict[str, Any]]):
    """Rows with an image and a label, as inputs of an image classifier.

    Args:
        loaded: the model, with its image processor as ``tokenizer``.
        rows: each with an ``image`` (a file, its bytes, or a PIL image) and a ``label``.
        name: the data's name, for errors.
    """

    def __init__(self, loaded: Loaded, rows: Rows, name: str) -> None:
        labels = labels_of(rows, name)
        column = image_column(rows[0])
        if labels is None or column is None:
            columns = ", ".join(map(str, rows[0])) or "no columns"
            raise ValueError(f"{name}: a row needs an image and a label, but it has {columns}")
        if not hasattr(loaded.tokenizer, "image_mean") and not hasattr(loaded.tokenizer, "size"):
            raise ValueError(
                f"{name} holds images, but {type(loaded.model).__name__} has no image processor: "
                "save its preprocessor_config.json next to its weights"
            )
        self.rows, self.name, self.column = rows, name, column
        self.processor = loaded.tokenizer
        config = getattr(loaded.model, "config", None)
        self.labels: Sequence[int | float] = [target_of(config, x, name) for x in labels]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = open_image(self.rows[index][self.column], f"{self.name}, row {index}")
        made = self.processor(images=image, return_tensors="pt")
        return {"pixel_values": made["pixel_values"][0], "labels": self.labels[index]}


def open_image(given: Any, name: str) -> Any:
    """Open an RGB image from a file, its bytes, an array or a PIL image."""
    pillow = require("PIL.Image", extra="hf", what="reading images")
    if isinstance(given, Mapping):  # the form in Parquet files of datasets
        given = given.get("bytes") or given.get("path")
    try:
        if isinstance(given, bytes):
            given = pillow.open(io.BytesIO(given))
        elif isinstance(given, str | os.PathLike):
            name = str(given)
            given = pillow.open(given)
        elif not isinstance(given, pillow.Image):
            given = pillow.fromarray(given)
        return given.convert("RGB")
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {name}") from None
    except Exception as error:  # a damaged file makes Pillow raise many types
        raise ValueError(f"{name} cannot be read as an image: {error}") from error
