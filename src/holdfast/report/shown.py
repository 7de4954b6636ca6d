"""The base class of results that can be shown."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from holdfast.io.saved import Saved
from holdfast.report.document import Document
from holdfast.report.html import to_html
from holdfast.report.text import to_markdown, to_terminal

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Shown"]


class Shown(Saved):
    """A result that can be saved, loaded and shown in every form."""

    @abstractmethod
    def document(self) -> Document:
        """The result in the form that all renderers show."""

    def to_markdown(self) -> str:
        """The answer and the main tables as Markdown, for a pull request or a model card."""
        return to_markdown(self.document())

    def to_html(self) -> str:
        """One self-contained page with the answer, plots, tables and the JSON of the result."""
        return to_html(self.document(), self.to_json())

    def to_terminal(self, console: Console | None = None) -> None:
        """Print the answer and the main tables, with colors if rich is installed."""
        to_terminal(self.document(), console)
