"""A forgetting report in a terminal, with rich where it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.evaluate.report import ForgettingReport
from holdfast.report.tables import Table, main_tables
from holdfast.report.verdict import verdict
from holdfast.report.words import plain

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["to_terminal"]

_STYLES = {
    "nothing": "green",
    "little": "yellow",
    "some": "yellow",
    "much": "red",
    "unknown": "blue",
}
_OUTCOMES = {"lost": "red", "gained": "green", "not finite": "bold red"}
_HIDDEN = ("outcome", "how")  # a colour says the one; the other is too long for 80 columns


def to_terminal(report: ForgettingReport, console: Console | None = None) -> None:
    """Print it on a console of rich, or as plain text where rich is not installed.

    Names are text, never markup.
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        print(to_text(report))
        return
    console = console or Console()
    said = verdict(report)
    console.print(Text(said.headline, style=f"bold {_STYLES[said.level]}"))
    for sentence in [*said.sentences, *map(plain, report.notes)]:
        console.print(Text(sentence))
    for table in main_tables(report):
        shown = RichTable(
            title=table.title,
            caption=table.note or None,
            box=box.SIMPLE_HEAD,
            title_justify="left",
            caption_justify="left",
            pad_edge=False,
        )
        columns = [i for i, head in enumerate(table.head) if head not in _HIDDEN]
        for i in columns:
            shown.add_column(table.head[i], justify="right" if i else "left", overflow="fold")
        for row in table.rows:
            style = _OUTCOMES.get(row[-1], "")
            cells = (row[i].removesuffix(" nats a token") for i in columns)
            shown.add_row(*(Text(cell) for cell in cells), style=style)
        console.print(shown)


def to_text(report: ForgettingReport) -> str:
    """The same as plain text."""
    said = verdict(report)
    parts = ["\n".join([said.headline, *said.sentences, *map(plain, report.notes)])]
    return "\n\n".join([*parts, *map(text_table, main_tables(report))])


def text_table(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (table.head, *table.rows)
    ]
    note = [table.note] if table.note else []
    return "\n".join([table.title, *(line.rstrip() for line in lines), *note])
