"""The one shape of everything that holdfast shows: a headline, sentences, sections.

A builder turns a result into a :class:`Document` (``forgetting``, ``sweep``, ``comparison``,
``scored``), and a renderer turns the Document into text (``html``, ``text``). All strings in a
Document are plain text: renderers escape them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal

from holdfast.report.words import plain

__all__ = ["Answer", "Column", "Document", "Figure", "Section", "Table", "Tone"]

#: The meaning of a colour. ``muted`` is for the model before fine-tuning.
Tone = Literal["", "good", "warn", "bad", "info", "muted"]


@dataclass(frozen=True)
class Answer:
    """The conclusion drawn from a result.

    Attributes:
        headline: one sentence.
        sentences: the reasons and the caveats, the most important first.
    """

    headline: str
    sentences: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.sentences])


@dataclass(frozen=True)
class Column:
    """The head of a table's column.

    Attributes:
        head: the title.
        note: the rest of the title, such as the metric; left out on narrow terminals.
        rank: narrow terminals leave out the columns with the highest ranks first, never rank 0.
        prose: whether the cells hold sentences, which may wrap.
    """

    head: str
    note: str = ""
    rank: int = 0
    prose: bool = False

    @property
    def title(self) -> str:
        """Head and note."""
        return f"{self.head}, {self.note}" if self.note else self.head


@dataclass(frozen=True)
class Table:
    """Rows of text under a title.

    Attributes:
        title: the title.
        columns: the heads.
        rows: one text per column.
        note: a line below the rows.
        tones: the meaning of each row's colour; empty if no row has one.
        brief: the number of rows that Markdown and terminals show; None for all.
        opened: whether the page shows the table unfolded.
        page_only: whether Markdown and terminals leave the table out.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    tones: tuple[Tone, ...] = ()
    brief: int | None = None
    opened: bool = False
    page_only: bool = False

    @classmethod
    def facts(cls, title: str, values: Mapping[str, object]) -> Table:
        """Names and values, for the page only."""
        rows = tuple((plain(name), plain(str(value))) for name, value in values.items())
        return cls(title, (Column("name"), Column("value", prose=True)), rows, page_only=True)

    @property
    def toned(self) -> list[tuple[tuple[str, ...], Tone]]:
        """The rows, each with its tone."""
        none: Tone = ""
        return list(zip(self.rows, self.tones or repeat(none), strict=False))


@dataclass(frozen=True)
class Figure:
    """A Plotly figure.

    Attributes:
        title: the heading above the figure.
        plot: Plotly's ``data`` and ``layout``. A color may name a CSS variable of the page.
        narrow: the version for phones; None if ``plot`` fits them too.
        alt: the figure in words, for screen readers.
        wide: whether the figure takes the whole width of the page.
    """

    title: str
    plot: dict[str, Any]
    narrow: dict[str, Any] | None = None
    alt: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """Figures, tables and notes under a title.

    Attributes:
        title: the title.
        about: how to read the section.
        figures: shown on the page only.
        tables: the tables.
        notes: one sentence each.
    """

    title: str
    about: str = ""
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Document:
    """Everything to show about one result.

    Attributes:
        kind: the kind of result, such as ``"forgetting report"``.
        answer: the conclusion, on top.
        badge: the conclusion in a few words.
        tone: of the conclusion.
        names: the models or files that the result is about.
        sections: in order; empty ones are left out.
        download: the name under which the page saves the result's JSON.
        version: of the holdfast that measured.
    """

    kind: str
    answer: Answer
    badge: str
    tone: Tone
    names: tuple[str, ...]
    sections: tuple[Section, ...]
    download: str = "result.json"
    version: str = ""

    @property
    def filled(self) -> list[Section]:
        """The sections that hold something."""
        return [s for s in self.sections if s.figures or s.tables or s.notes]
