"""A forgetting report as Markdown."""

from __future__ import annotations

import re

from holdfast.evaluate.report import ForgettingReport
from holdfast.report.tables import Table, main_tables
from holdfast.report.verdict import verdict
from holdfast.report.words import plain

__all__ = ["to_markdown"]


def to_markdown(report: ForgettingReport) -> str:
    """The verdict, the tables and the notes; names cannot be anything but text."""
    said = verdict(report)
    parts = [
        f"# {escape(said.headline)}",
        f"{escape(plain(report.base))} → {escape(plain(report.tuned))}",
        "\n".join(f"- {escape(sentence)}" for sentence in said.sentences),
        *(markdown_table(table) for table in main_tables(report)),
    ]
    if report.notes:
        notes = "\n".join(f"- {escape(plain(note))}" for note in report.notes)
        parts.append(f"## Not measured\n\n{notes}")
    return "\n\n".join(part for part in parts if part) + "\n"


def escape(text: str) -> str:
    r"""Text that Markdown, GitHub's tables included, shows as it is.

    >>> print(escape("a|b <script> acc_norm `x` _y_"))
    a\|b \<script\> acc_norm \`x\` \_y\_
    """
    return re.sub(r"[\\`*\[\]<>|~#&$@]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)


def markdown_table(table: Table) -> str:
    rule = [":--", *["--:"] * (len(table.head) - 1)]
    lines = [list(table.head), rule, *([escape(cell) for cell in row] for row in table.rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {table.title}\n\n{text}" + (f"\n\n{table.note}" if table.note else "")
