"""A Document as Markdown and in a terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.report.document import Document, Table
from holdfast.report.printing import printable, tell
from holdfast.report.words import cut, plain

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"": "", "good": "green", "warn": "yellow", "bad": "red", "info": "blue", "muted": "dim"}
#: Characters of a column's head on terminals that are too narrow for the whole table.
_HEAD = 10
_WIDTH_OF_FILES = 160


def to_markdown(document: Document, level: int = 1) -> str:
    """The answer, the tables and the notes; names cannot act as markup.

    ``level`` is that of the first heading.
    """
    answer, (top, below) = document.answer, ("#" * min(n, 6) for n in (level, level + 1))
    parts = [
        f"{top} {escape(answer.headline)}",
        escape(" → ".join(map(plain, document.names))),
        _bullets(answer.sentences),
        answer.next and f"Next: {_next(answer.next)}",
    ]
    for section in document.filled:
        parts += [_markdown(table, below) for table in section.tables if not table.page_only]
        if section.notes:
            parts.append(f"{below} {escape(section.title)}\n\n{_bullets(section.notes)}")
    return "\n\n".join(filter(None, parts)) + "\n"


def to_terminal(document: Document, console: Console | None = None) -> None:
    """Print on a console of rich, or as Markdown if rich is not installed."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        tell(to_markdown(document), end="")
        return
    if console is None:
        # A file or a pipe has no width: CI systems and pagers scroll.
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_FILES
        console = Console(width=width)
    console.on_broken_pipe = _closed  # type: ignore[method-assign]

    def text(words: str, style: str = "") -> Text:
        return Text(printable(words), style=style)

    answer = document.answer
    console.print(text(answer.headline, style=f"bold {_STYLES[document.tone]}"))
    for sentence in answer.sentences:
        console.print(text(sentence))
    for section in document.filled:
        for table in (table for table in section.tables if not table.page_only):
            columns, heads = _fitting(table, console.width)
            shown = RichTable(
                title=text(table.title, style="bold"),
                caption=text(_note(table, columns)),
                box=box.SIMPLE_HEAD,
                title_justify="left",
                caption_justify="left",
                padding=(0, 0, 0, 1),
                pad_edge=False,
                show_edge=False,
            )
            for i, head in zip(columns, heads, strict=True):
                left = i == 0 or table.columns[i].prose
                shown.add_column(text(head), justify="left" if left else "right", overflow="fold")
            for row, tone in table.toned[: table.brief]:
                shown.add_row(*(text(row[i]) for i in columns), style=_STYLES[tone])
            console.print("", shown)
        for note in section.notes:
            console.print(text(plain(note)))
    if answer.next:  # last, and not wrapped: it is there to be copied
        console.print("", text(f"Next: {answer.next}", style="bold"), sep="\n", soft_wrap=True)


def _closed() -> None:
    raise BrokenPipeError  # rich would exit with the code of a failure


def escape(text: str) -> str:
    r"""Text that Markdown, including GitHub's tables, shows unchanged.

    >>> print(escape("a|b <script> acc_norm `x` _y_"))
    a\|b \<script\> acc_norm \`x\` \_y\_
    """
    return re.sub(r"[\\`*\[\]<>|~#&$@]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def _next(said: str) -> str:
    """What to do next, with its command as code, so that it can be copied.

    >>> print(_next("try *more*: holdfast merge base '~/x'"))
    try \\*more\\*: `holdfast merge base '~/x'`
    """
    words, name, rest = said.partition("holdfast ")
    code = name and not {*"`<>"} & {*rest}
    return escape(words) + (f"`{name}{rest}`" if code else escape(name + rest))


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {escape(plain(sentence))}" for sentence in sentences)


def _markdown(table: Table, heading: str) -> str:
    head = [column.title for column in table.columns]
    rows = [[escape(cell.strip()) for cell in row] for row in (head, *table.rows[: table.brief])]
    widths = [max(3, *map(len, cells)) for cells in zip(*rows, strict=True)]

    def line(cells: Sequence[str], fill: str = " ") -> str:
        first = cells[0].ljust(widths[0], fill)
        rest = (c.rjust(w, fill) for c, w in zip(cells[1:], widths[1:], strict=True))
        return f"| {' | '.join([first, *rest])} |"

    text = "\n".join([line(rows[0]), line([":"] * len(widths), "-"), *map(line, rows[1:])])
    return "\n\n".join(
        filter(None, [f"{heading} {escape(table.title)}", text, escape(_note(table))])
    )


def _note(table: Table, shown: Sequence[int] | None = None) -> str:
    notes = [table.brief_note]
    left_out = [c.head for i, c in enumerate(table.columns) if shown and i not in shown]
    if left_out:
        notes.append(f"Too wide for this terminal: {', '.join(left_out)}.")
    return " ".join(filter(None, notes))


def _fitting(table: Table, width: int) -> tuple[list[int], list[str]]:
    """The columns that fit into a terminal, by rank, and their heads."""
    columns = list(range(len(table.columns)))
    heads = [column.title for column in table.columns]
    widest = [max([0, *(len(row[i]) for row in table.rows[: table.brief])]) for i in columns]

    def needed() -> int:
        return sum(2 + max(widest[i], len(heads[i])) for i in columns)

    if needed() > width:
        heads = [cut(table.columns[i].head, max(_HEAD, widest[i])) for i in columns]
    while needed() > width and any(table.columns[i].rank for i in columns):
        columns.remove(max(columns, key=lambda i: table.columns[i].rank))
    return columns, [heads[i] for i in columns]
