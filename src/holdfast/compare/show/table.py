"""A comparison as a table: for a terminal, as plain text and as Markdown."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.compare.recommend import (
    Recommendation,
    change_in,
    kl_of,
    recommend,
    share,
    short_change,
)
from holdfast.compare.results import Measured, Results, Summary
from holdfast.forgetting.show._plot import cut
from holdfast.forgetting.show._tables import Table
from holdfast.forgetting.show._words import level, nats, percent, plain
from holdfast.forgetting.show.markdown import escape, markdown_table
from holdfast.forgetting.show.terminal import text_table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["change_table", "main_table", "to_markdown", "to_terminal", "to_text"]

WIDTH = 100
_NONE = "–"
_NAME, _TEST = 22, 10  # characters of a recipe's and of a test's name, where room is scarce


@dataclass(frozen=True)
class Column:
    """One figure of all recipes.

    Attributes:
        head: what it is.
        start: the pretrained model's.
        cells: a text a recipe.
        best: the rows that have the best value.
        rank: the columns with the highest ranks go first where room is scarce; those with 0 stay.
    """

    head: str
    start: str
    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()
    rank: int = 0

    def shown(self, row: int | None) -> str:
        """A cell, the best with a star behind it; None is the pretrained model's."""
        text = self.start if row is None else self.cells[row]
        return text + ("*" if row in self.best else " ") if self.best else text

    @property
    def width(self) -> int:
        """In characters, with the gap before it."""
        cells = [cut(self.head, _TEST), self.start, *self.cells]
        return 2 + max(map(len, cells)) + bool(self.best)


def columns_of(found: Sequence[Summary]) -> list[Column]:
    """Target, retained tests, their mean loss, drift, divergence and time."""
    columns = []
    if found:
        first = found[0].target
        columns.append(
            Column(
                plain(first.name),
                level(first.metric, first.before),
                tuple(
                    f"{level(s.target.metric, s.target.after)} ({_short(s.target)})" for s in found
                ),
                _best([_worse(s.target) for s in found]),
            )
        )
    for i, key in enumerate(tests_of(found)):
        tests = [_test(s, key) for s in found]
        one = next(test for test in tests if test is not None)
        columns.append(
            Column(
                plain(one.name),
                level(one.metric, one.before),
                tuple(_NONE if test is None else _short(test) for test in tests),
                _best([None if test is None else _worse(test) for test in tests]),
                rank=10 + i if i else 0,
            )
        )
    if len(columns) > 2:
        columns.append(_figures("lost", share, [s.loss for s in found]))
    columns.append(_figures("drift", percent, [s.relative_drift for s in found], rank=3))
    columns.append(_figures("KL", nats, [kl_of(s) for s in found], rank=2))
    columns.append(_figures("time", seconds, [s.seconds for s in found], start="", rank=1))
    return columns


def main_table(results: Results, width: int | None = None) -> Table:
    """A row for each recipe, the pretrained model first.

    Args:
        results: what to show.
        width: characters that it may take; None for as many as there are.
    """
    found, said = results.summaries(), recommend(results)
    columns = _fitting(columns_of(found), found, width)
    most_of_name, most_of_head = (_NAME, _TEST) if width else (60, 60)
    rows = [("pretrained", *(column.shown(None) for column in columns))]
    for i, summary in enumerate(found):
        star = " ★" if summary.label == said.label else ""
        name = cut(plain(summary.label), most_of_name) + star
        rows.append((name, *(column.shown(i) for column in columns)))
    heads = (cut(column.head, most_of_head) + (" " if column.best else "") for column in columns)
    return Table("Comparison", ("recipe", *heads), tuple(rows), _note(found, said, columns))


def change_table(found: Sequence[Summary], against: Summary | None = None) -> Table:
    """Median and best over the seeds: change to the pretrained model, or to another recipe."""
    keys = tests_of(found)
    rows = []
    for summary in found:
        cells = [_two(summary.target, against and against.target)]
        for key in keys:
            test, other = _test(summary, key), against and _test(against, key)
            cells.append(_NONE if test is None or (against and not other) else _two(test, other))
        rows.append((plain(summary.label), *cells))
    heads = (f"{plain(name)}, {plain(metric)}" for name, metric in keys)
    whom = "the pretrained model" if against is None else plain(against.label)
    target = found[0].target
    return Table(
        f"Change from {whom}",
        ("recipe", f"{plain(target.name)}, {plain(target.metric)} (target)", *heads),
        tuple(rows),
        "The median over the seeds, and in brackets the best. "
        "Perplexities change in per cent, shares in points.",
    )


def tests_of(found: Sequence[Summary]) -> list[tuple[str, str]]:
    """The retained tests by name and metric."""
    return list(dict.fromkeys((test.name, test.metric) for s in found for test in s.retained))


def seconds(value: float) -> str:
    """A time.

    >>> seconds(4.21), seconds(312.0), seconds(5000)
    ('4.2 s', '5.2 min', '1.4 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if value >= 1.5 * size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


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
        parts.append(text_table(replace(table, note=textwrap.fill(table.note, width))))
    lines = [said.headline, *said.sentences, *failures(results)]
    parts.append("\n".join(textwrap.fill(line, width) for line in lines))
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


def _fitting(columns: list[Column], found: Sequence[Summary], width: int | None) -> list[Column]:
    """The columns that there is room for, of the tests the first ones."""
    if width is None:
        return columns
    room = width - 2 - max(10, *(min(_NAME, len(plain(s.label))) for s in found))
    kept = list(columns)
    while sum(c.width for c in kept) > room and any(c.rank for c in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    return kept


def _figures(
    head: str,
    said: Callable[[float], str],
    values: Sequence[float | None],
    start: str = "0",
    rank: int = 0,
) -> Column:
    """A figure of which the least is best."""
    cells = tuple(_NONE if value is None else said(value) for value in values)
    return Column(head, start, cells, _best(values), rank)


def _best(values: Iterable[float | None]) -> frozenset[int]:
    """Where the least is; nowhere if all are alike."""
    known = {i: v for i, v in enumerate(values) if v is not None and not math.isnan(v)}
    least = min(known.values(), default=0.0)
    found = frozenset(i for i, value in known.items() if value == least)
    return found if len(found) < len(known) else frozenset()


def _worse(test: Measured) -> float:
    return test.after if test.lower_is_better else -test.after


def _test(summary: Summary, key: tuple[str, str]) -> Measured | None:
    return next((test for test in summary.retained if (test.name, test.metric) == key), None)


def _short(test: Measured) -> str:
    return short_change(change_in(test))


def _two(test: Measured, other: Measured | None) -> str:
    """Median and best, against the pretrained model or against another's median and best."""
    start, top = (test.before, test.before) if other is None else (other.after, other.best)
    median, best = (
        short_change(change_in(Measured(
            test.name, test.metric, test.lower_is_better, before, after, None, None, test.n
        )))
        for before, after in ((start, test.after), (top, test.best))
    )  # fmt: skip
    return f"{median} ({best})"


def _note(found: Sequence[Summary], said: Recommendation, columns: Sequence[Column]) -> str:
    seeds = max((s.seeds for s in found), default=1)
    words = [
        f"Medians of {seeds} seeds;" if seeds > 1 else "One seed;",
        "tests as change from the pretrained model (perplexity in %, shares in points).",
    ]
    if any(column.head == "lost" for column in columns):
        words.append("Lost: relative to before, mean of the tests; a gain is no loss.")
    hidden = len(columns_of(found)) - len(columns)
    if hidden:
        words.append(f"Columns left out: {hidden}.")
    if any(column.best for column in columns):
        words.append("* best" + (", ★ recommended." if said.label else "."))
    return " ".join(words)


def _escaped(table: Table) -> Table:
    """With a head that is text in Markdown, as the cells will be."""
    head, *rows = ([cell.strip() for cell in row] for row in (table.head, *table.rows))
    return Table(table.title, tuple(map(escape, head)), tuple(map(tuple, rows)), escape(table.note))
