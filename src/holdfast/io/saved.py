"""What has a form as JSON, as Markdown and as a page, and goes to a file in each."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TypeVar

from holdfast.io.files import write_whole

Self = TypeVar("Self", bound="Saved")


class Saved(ABC):
    """Something that can be saved and, from its JSON, loaded."""

    @abstractmethod
    def to_json(self) -> str:
        """As JSON."""

    @classmethod
    @abstractmethod
    def from_json(cls: type[Self], text: str) -> Self:
        """From its JSON."""

    @abstractmethod
    def to_markdown(self) -> str:
        """As Markdown."""

    @abstractmethod
    def to_html(self) -> str:
        """As a page."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it: a page if the name ends in .html, .md for Markdown, else JSON.

        The file is there whole or not at all.
        """
        path = Path(path)
        forms = {".html": self.to_html, ".htm": self.to_html, ".md": self.to_markdown}
        text = forms.get(path.suffix.lower(), self.to_json)()
        write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8", newline="\n"))

    @classmethod
    def load(cls: type[Self], path: str | os.PathLike[str]) -> Self:
        """Read the JSON that :meth:`save` wrote; ValueError names the file if it cannot."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # bad UTF-8 is one too
            raise ValueError(f"{path}: {error}") from None
