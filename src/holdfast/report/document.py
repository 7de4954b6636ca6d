"""The one shape of everything that holdfast shows: a headline, sentences, sections.

A builder turns a result into a :class:`Document` (``forgetting``, ``sweep``, ``comparison``,
``scored``), and a renderer turns the Document into text (``html``, ``text``). All strings in a
Document are plain text: renderers escape them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Literal

from holdfast.report.words import plain

#: The meaning of a color; ``"muted"`` is for the model before fine-tuning.
Tone = Literal["", "good", "warn", "bad", "info", "muted"]


@dataclass(frozen=True)
class Answer:
    """The conclusion drawn from a result: a headline, then reasons and caveats.

    ``next`` is what to do next, a command if there is one for it.
    """

    headline: str
    sentences: tuple[str, ...] = ()
    next: str = field(default="", kw_only=True)

    @property
    def lines(self) -> list[str]:
        """The headline, the sentences, and what to do next."""
        return [self.headline, *self.sentences, *([f"Next: {self.next}"] if self.next else [])]

    def __str__(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True)
class Column:
    head: str
    note: str = ""  # the rest of the title, such as the metric; left out on narrow terminals
    rank: int = 0  # narrow terminals drop the columns with the highest ranks first, never rank 0
    prose: bool = False  # the cells hold sentences, which may wrap

    @property
    def title(self) -> str:
        return f"{self.head}, {self.note}" if self.note else self.head


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""  # a line below the rows
    tones: tuple[Tone, ...] = ()  # one per row, or none
    brief: int | None = None  # rows that Markdown and terminals show; None for all
    opened: bool = False  # whether the page shows the table unfolded
    page_only: bool = False  # whether Markdown and terminals leave the table out

    @classmethod
    def of(
        cls,
        title: str,
        items: Iterable[Any],
        cells: Mapping[Column, Callable[..., str]],
        **more: Any,
    ) -> Table:
        """One row per item, with the column's text of it."""
        rows = tuple(tuple(cell(item) for cell in cells.values()) for item in items)
        return cls(title, tuple(cells), rows, **more)

    @property
    def brief_note(self) -> str:
        """The line below the first rows, where only those are shown."""
        cut = self.brief is not None and self.brief < len(self.rows)
        return " ".join(filter(None, [self.note, f"{self.brief} of {len(self.rows)} rows." * cut]))

    @property
    def toned(self) -> list[tuple[tuple[str, ...], Tone]]:
        none: Tone = ""
        return list(zip(self.rows, self.tones or repeat(none), strict=False))


@dataclass(frozen=True)
class Figure:
    """A Plotly figure; a color may name a CSS variable of the page."""

    title: str
    plot: dict[str, Any]  # Plotly's data and layout
    alt: str = ""  # the figure in words, for screen readers
    wide: bool = False  # whether the figure takes the whole width of the page


@dataclass(frozen=True)
class Section:
    """Figures (on the page only), tables and notes under a title."""

    title: str
    about: str = ""  # how to read the section
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()  # one sentence each

    @classmethod
    def facts(cls, title: str, **tables: Mapping[str, object]) -> Section:
        """Names and values, for the page only."""
        columns = Column("name"), Column("value", prose=True)
        rows = {
            n: tuple((plain(k), plain(str(v))) for k, v in t.items()) for n, t in tables.items()
        }
        found = (Table(name, columns, some, page_only=True) for name, some in rows.items())
        return cls(title, tables=tuple(found))


@dataclass(frozen=True)
class Document:
    kind: str  # such as "forgetting report"
    answer: Answer
    badge: str  # the answer in a few words
    tone: Tone  # of the answer
    names: tuple[str, ...]  # the models or files that the result is about
    sections: tuple[Section, ...]
    download: str = "result.json"  # the name under which the page saves the JSON

    @property
    def filled(self) -> list[Section]:
        """The sections that hold something, without empty tables."""
        found = [replace(s, tables=tuple(t for t in s.tables if t.rows)) for s in self.sections]
        return [s for s in found if s.figures or s.tables or s.notes]
