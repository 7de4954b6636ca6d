"""The tables of a comparison: what is in them, and what there is room for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from holdfast.comparison.results import Measured, Results, Summary
from holdfast.report.comparison_recommend import Recommendation, kl_of, recommend
from holdfast.report.comparison_words import change_in, seconds, share, short_change
from holdfast.report.plot import cut
from holdfast.report.tables import Table
from holdfast.report.words import level, nats, percent, plain

__all__ = ["change_table", "main_table", "tests_of"]

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
        metric: of a test; where there is room, it stands in the head.
    """

    head: str
    start: str
    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()
    rank: int = 0
    metric: str = ""

    def shown(self, row: int | None) -> str:
        """A cell, the best with a star behind it; None is the pretrained model's."""
        text = self.start if row is None else self.cells[row]
        return text + ("*" if row in self.best else " ") if self.best else text

    def titled(self, *, short: bool) -> str:
        """The head, as wide as the cells below."""
        text = ", ".join(filter(None, (self.head, self.metric)))
        return (cut(self.head, _TEST) if short else text) + (" " if self.best else "")

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
                metric=f"{plain(first.metric)} (target)",
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
                rank=(0, 4, 5)[i] if i < 3 else 10 + i,
                metric=plain(one.metric),
            )
        )
    if len(columns) > 2:
        columns.append(_figures("lost", share, [s.loss for s in found]))
    columns.append(_figures("drift", percent, [s.relative_drift for s in found], rank=9))
    columns.append(_figures("KL", nats, [kl_of(s) for s in found], rank=8))
    columns.append(_figures("time", seconds, [s.seconds for s in found], start="", rank=7))
    return columns


def main_table(results: Results, width: int | None = None) -> Table:
    """A row for each recipe, the pretrained model first.

    Args:
        results: what to show.
        width: characters that it may take; None for as many as there are.
    """
    found, said = results.summaries(), recommend(results)
    columns = _fitting(columns_of(found), found, width)
    most = _NAME if width else 60
    rows = [("pretrained", *(column.shown(None) for column in columns))]
    for i, summary in enumerate(found):
        star = " ★" if summary.label == said.label else ""
        name = cut(plain(summary.label), most) + star
        rows.append((name, *(column.shown(i) for column in columns)))
    heads = (column.titled(short=width is not None) for column in columns)
    return Table("Comparison", ("recipe", *heads), tuple(rows), _note(found, said, columns))


def change_table(found: Sequence[Summary], against: Summary | None = None) -> Table:
    """Median and best over the seeds: change to the pretrained model, or to another recipe."""
    keys, seeds = tests_of(found), max(s.seeds for s in found)
    rows = []
    for summary in found:
        cells = [_two(summary.target, against.target if against else None, seeds > 1)]
        for key in keys:
            test = _test(summary, key)
            other = _test(against, key) if against else None
            if test is None or (against and other is None):
                cells.append(_NONE)
            else:
                cells.append(_two(test, other, seeds > 1))
        rows.append((plain(summary.label), *cells))
    heads = (f"{plain(name)}, {plain(metric)}" for name, metric in keys)
    whom = "the pretrained model" if against is None else plain(against.label)
    target = found[0].target
    return Table(
        f"Change from {whom}",
        ("recipe", f"{plain(target.name)}, {plain(target.metric)} (target)", *heads),
        tuple(rows),
        ("The median over the seeds, and in brackets the best. " if seeds > 1 else "")
        + "Perplexities change in per cent, shares in points.",
    )


def tests_of(found: Sequence[Summary]) -> list[tuple[str, str]]:
    """The retained tests by name and metric."""
    return list(dict.fromkeys((test.name, test.metric) for s in found for test in s.retained))


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


def _two(test: Measured, other: Measured | None, several: bool) -> str:
    """Median and best, against the pretrained model or against another's median and best."""
    starts = (test.before, test.before) if other is None else (other.after, other.best)
    median, best = (
        short_change(change_in(replace(test, before=start), after))
        for start, after in zip(starts, (test.after, test.best), strict=True)
    )
    return f"{median} ({best})" if several else median


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
