"""A comparison as a table: for a terminal, as plain text and as Markdown."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.comparison.results import Results
from holdfast.report.comparison_columns import main_table
from holdfast.report.comparison_recommend import recommend
from holdfast.report.markdown import escape, markdown_table
from holdfast.report.tables import Table
from holdfast.report.terminal import text_table
from holdfast.report.words import plain

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["failures", "to_markdown", "to_terminal", "to_text"]

WIDTH = 100


def to_markdown(results: Results) -> str:
    """The recommendation and the table; names cannot be anything but text."""
    said = recommend(results)
    parts = [
        f"# {escape(said.headline)}",
        "\n".join(f"- {escape(sentence)}" for sentence in said.sentences),
        markdown_table(_escaped(main_table(results))) if results.runs else "",
    ]
    if lines := "\n".join(f"- {escape(line)}" for line in failures(results)):
        parts.append(f"## Failed\n\n{lines}")
    return "\n\n".join(part for part in parts if part) + "\n"


def to_text(results: Results, width: int = WIDTH) -> str:
    """The table and the recommendation as plain text."""
    said, parts = recommend(results), []
    if results.runs:
        table = main_table(results, width)
        parts.append(text_table(replace(table, note=_wrapped(table.note, width))))
    lines = [said.headline, *said.sentences, *failures(results)]
    parts.append("\n".join(_wrapped(line, width) for line in lines))
    return "\n\n".join(parts)


def to_terminal(results: Results, console: Console | None = None) -> None:
    """Print them on a console of rich, or as plain text where rich is not installed.

    Names are text, never markup.
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        print(to_text(results))
        return
    console = console or Console()
    said = recommend(results)
    if results.runs:
        table = main_table(results, max(console.width, 60))
        shown = RichTable(
            caption=Text(table.note),
            box=box.SIMPLE_HEAD,
            caption_justify="left",
            padding=(0, 0, 0, 1),
            pad_edge=False,
            show_edge=False,
        )
        for i, head in enumerate(table.head):
            shown.add_column(Text(head), justify="right" if i else "left", no_wrap=True)
        for row in table.rows:
            chosen, start = row[0].endswith("★"), row is table.rows[0]
            style = "green" if chosen else "dim" if start else ""
            cells = (Text(cell, style="bold" if cell.endswith("*") else "") for cell in row)
            shown.add_row(*cells, style=style)
        console.print(shown, "")
    console.print(Text(said.headline, style="bold green" if said.label else "bold yellow"))
    for sentence in said.sentences:
        console.print(Text(sentence))
    for line in failures(results):
        console.print(Text(line, style="red"))


def failures(results: Results) -> list[str]:
    """Each failed run with the last line of its error."""
    return [f"{plain(name)}: {plain(error)}" for name, error in results.failed.items()]


def _wrapped(text: str, width: int) -> str:
    """Over several lines, no figure parted from its per cent sign."""
    return textwrap.fill(text.replace(" %", "\u00a0%"), width).replace("\u00a0%", " %")


def _escaped(table: Table) -> Table:
    """With a head that is text in Markdown, as the cells will be."""
    head, *rows = ([cell.strip() for cell in row] for row in (table.head, *table.rows))
    return Table(table.title, tuple(map(escape, head)), tuple(map(tuple, rows)), escape(table.note))
