"""The base class of results: saved as JSON, loaded, and shown in every form."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from holdfast._torch.imports import require
from holdfast.io.codec import decode, to_json
from holdfast.io.files import write_whole
from holdfast.report.card import save_section
from holdfast.report.document import Document
from holdfast.report.html import to_fragment, to_html
from holdfast.report.text import to_markdown, to_terminal
from holdfast.report.words import plain

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.evaluate.report import ForgettingReport

#: Keys that a benchmark adds to a result: how it was obtained.
_RECORD = ("device", "versions", "protocol", "date")

Self = TypeVar("Self", bound="Shown")


class Shown(ABC):
    """A dataclass that can be saved, loaded and shown in every form.

    Its field ``schema_version`` defaults to the newest version that it reads. The version grows
    when a field is renamed, removed or changes its meaning.
    """

    what: ClassVar[str] = "report"  # its name in errors

    @abstractmethod
    def document(self) -> Document:
        """The result in the form that all renderers show."""

    def __repr__(self) -> str:
        shown = self.document()
        names = " → ".join(map(plain, shown.names))
        return f"<{type(self).__name__} {names}: {shown.answer.headline}>"

    def _repr_html_(self) -> str:
        """The answer and the main tables, as notebooks show them."""
        return to_fragment(self.document())

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """The figures as flat rows, which :meth:`to_pandas` shows."""

    def to_pandas(self) -> Any:
        """Return the figures as a pandas DataFrame."""
        return require("pandas", extra="hf", what="to_pandas()").DataFrame(self.rows())

    def to_markdown(self) -> str:
        """The answer and the main tables as Markdown, for a pull request or a model card."""
        return to_markdown(self.document())

    def to_html(self) -> str:
        """One self-contained page with the answer, plots, tables and the JSON of the result."""
        return to_html(self.document(), self.to_json())

    def to_terminal(self, console: Console | None = None) -> None:
        """Print the answer and the main tables, with colors if rich is installed."""
        to_terminal(self.document(), console)

    def to_json(self) -> str:
        """Return the JSON text. NaN and infinity are ``"NaN"``, ``"Infinity"``, ``"-Infinity"``."""
        return to_json(self) + "\n"

    @classmethod
    def from_json(cls: type[Self], text: str) -> Self:
        """Read the text that :meth:`to_json` wrote; a ValueError names the place of a mistake."""
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"this is not the JSON of a {cls.what}: {error}") from None
        version = value.get("schema_version") if isinstance(value, dict) else None
        if type(version) is not int or version < 1:
            raise ValueError(f"this is not a {cls.what}: it has no schema_version")
        fields: dict[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        if version > (newest := fields["schema_version"].default):
            raise ValueError(
                f"this {cls.what} has schema_version {version}, but this version of holdfast reads "
                f"at most {newest}: update holdfast"
            )
        value = {k: v for k, v in value.items() if k in fields or k not in _RECORD}
        if version < newest:
            value = cls.upgraded(value)
        return decode(cls, value, f"the {cls.what}")

    @classmethod
    def upgraded(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Turn the JSON value of an earlier version into one of the newest."""
        return value

    def measured(self) -> ForgettingReport | None:
        """The report whose scores belong into the metadata of a model card, if there is one."""
        return None

    def save(self, path: str | os.PathLike[str], *, section: str | None = None) -> None:
        """Write a page if the name ends in ``.html``, Markdown for ``.md``, JSON for ``.json``.

        The file is written completely or not at all.

        Args:
            section: update a section of this name in a model card, ``README.md``, and its metadata:
                the scores of a report as ``model-index``, and ``base_model``. The rest of the card
                stays as it is. The section is appended if there is none; a missing card is created.
        """
        path = Path(path)
        if section is not None:
            save_section(path, section, self.document(), self.measured())
            return
        forms = {
            ".html": self.to_html, ".htm": self.to_html, ".md": self.to_markdown,
            ".json": self.to_json, "": self.to_json,
        }  # fmt: skip
        if (suffix := path.suffix.lower()) not in forms:
            raise ValueError(f"a {self.what} is saved as .html, .md or .json, got {path}")
        text = forms[suffix]()
        write_whole(path, lambda file: file.write_text(text, encoding="utf-8", newline="\n"))

    @classmethod
    def load(cls: type[Self], path: str | os.PathLike[str]) -> Self:
        """Read the JSON that :meth:`save` wrote; a ValueError names the file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # invalid UTF-8 is one too
            raise ValueError(f"{path}: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is not valid JSON: write "{name}"')
