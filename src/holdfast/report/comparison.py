"""The Document of a comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from holdfast.report.document import Column, Document, Figure, Section, Table
from holdfast.report.frontier import MOST, Axis, Point, frontier, out_of_view
from holdfast.report.plot import ACCENT, GAINED, LOST, Line, Span, lines
from holdfast.report.recommend import STANDARD, kl_of, recommend, standard_of
from holdfast.report.words import (
    NONE,
    change_in,
    gibibytes,
    kind_of,
    level,
    listed,
    nats,
    percent,
    plain,
    seconds,
)

if TYPE_CHECKING:
    from holdfast.comparison.results import Measured, Results, RunResult, Summary

_CURVES = {"loss": "Loss on the training data", "distance": "Distance ‖θ − θ*‖ of the weights"}

Test = tuple[str, str]


def document(results: Results) -> Document:
    """Recommended recipe, frontier, tests, table and training curves."""
    found, answer = results.summaries(), recommend(results)
    versions = results.runs[0].versions if results.runs else {}
    names = [_short(str(results.plan[key])) for key in ("model", "data") if key in results.plan]
    failures = (f"{plain(name)}: {plain(error)}" for name, error in results.failed.items())
    plan = Table.facts("Plan", _flat(results.plan)), Table.facts("Versions", versions)
    return Document(
        kind="comparison",
        answer=answer,
        badge=plain(answer.label) if answer.label else "No recommendation",
        tone="good" if answer.label else "info",
        names=tuple(names),
        sections=(
            *(_shown(found, answer.label) if found else ()),
            Section("Failed runs", notes=tuple(failures)),
            Section("How it was run", tables=tuple(table for table in plan if table.rows)),
        ),
        download="results.json",
        version=versions.get("holdfast", ""),
    )


def _shown(found: Sequence[Summary], chosen: str | None) -> list[Section]:
    points = [_point(summary, chosen) for summary in found]
    target = _axis(found, lambda run: run.target)
    keys = _tests(found)
    worst = {
        key: max(-test.relative for s in found if (test := _test(s, key)) is not None)
        for key in keys
    }
    drawn = sorted(keys, key=worst.__getitem__, reverse=True)[:MOST]
    tests = [_axis(found, partial(_test, key=key)) for key in keys if key in drawn]
    title = "Mean change on the retained tests, relative to before"
    seeds = [[100 * run.kept for run in summary.runs] for summary in found]
    kept = Axis(title, _medians(seeds), start=0.0, lower_is_better=False, suffix=" %")
    single = "The same for each retained test."
    if len(keys) > MOST:
        single += f" These are the {MOST} of {len(keys)} that lose most; the tables have all."
    standard = standard_of(found)
    tables = [_main_table(found, chosen), _change_table(found)]
    if standard is not None and len(found) > 1:
        tables.append(_change_table(found, standard))
    return [
        Section(
            "What is learned and what is kept",
            _about(found, chosen, out_of_view(points, target, kept)),
            (frontier(points, target, kept, wide=True),) if keys else (),
        ),
        Section(
            "Test by test",
            single,
            tuple(frontier(points, target, y) for y in tests) if len(keys) > 1 else (),
        ),
        Section("All figures", tables=tuple(tables)),
        Section(
            "During training",
            "The first seed of each recipe. The loss is the one that the recipe minimizes. Merging "
            "happens after the last update.",
            tuple(_curves(found, chosen)),
        ),
    ]


def _about(found: Sequence[Summary], chosen: str | None, unseen: Sequence[str]) -> str:
    about = (
        "Right is better on the target, up is better on what should be kept. The line joins the "
        "recipes that no other beats on both. The dotted line is the pretrained model."
    )
    if any(s.seeds > 1 for s in found):
        about += " Points are medians over seeds, whiskers their range."
    if chosen is not None:
        about += " Green is recommended."
    if any(s.recipe == STANDARD for s in found):
        about += " Red is standard fine-tuning."
    if unseen:
        about += f" Not drawn, because not finite or far worse than the rest: {listed(unseen)}."
    return about


def _point(summary: Summary, chosen: str | None) -> Point:
    hover = []
    for test in (summary.target, *summary.retained[:MOST]):
        value, change = level(test.metric, test.after), change_in(test).figure
        hover.append(f"{plain(test.name)}: {value} ({change})")
    if summary.retained:
        hover.append(f"lost on average: {percent(summary.loss)}")
    return Point(summary.label, _color(summary, chosen), tuple(hover))


def _color(summary: Summary, chosen: str | None) -> str:
    if summary.label == chosen:
        return GAINED
    return LOST if summary.recipe == STANDARD else ACCENT


def _axis(found: Sequence[Summary], pick: Callable[[RunResult], Measured | None]) -> Axis:
    """A test of all recipes: medians with the range of the seeds."""
    rows = [[test for run in s.runs if (test := pick(run)) is not None] for s in found]
    one = next(test for row in rows for test in row)
    scale = 100 if kind_of(one.metric) == "share" else 1
    seeds = [[scale * test.after for test in row] for row in rows]
    title = f"{plain(one.name)}, {plain(one.metric)}"
    suffix = " %" if scale == 100 else ""
    return Axis(title, _medians(seeds), scale * one.before, one.lower_is_better, suffix)


def _medians(seeds: Sequence[Sequence[float]]) -> list[Span]:
    rows = (row or [math.nan] for row in seeds)
    return [Span(statistics.median(row), min(row), max(row)) for row in rows]


def _curves(found: Sequence[Summary], chosen: str | None) -> list[Figure]:
    """Loss and distance over the updates: the first seed of each recipe."""
    curves: dict[str, list[Line]] = {name: [] for name in _CURVES}
    for summary in found:
        for curve in summary.runs[0].curves:
            if curve.name in curves and curve.steps:
                line = Line(summary.label, curve.steps, curve.values, _color(summary, chosen))
                curves[curve.name].append(line)
    return [lines(_CURVES[name], some, "update") for name, some in curves.items() if some]


def _main_table(found: Sequence[Summary], chosen: str | None) -> Table:
    """One row per recipe, the pretrained model first."""
    first, keys = found[0].target, _tests(found)
    targets = [s.target for s in found]
    columns = [
        _starred(
            Column(plain(first.name), f"{plain(first.metric)} (target)"),
            level(first.metric, first.before),
            [f"{level(t.metric, t.after)} ({change_in(t).figure})" for t in targets],
            [_worse(t) for t in targets],
        )
    ]
    for i, key in enumerate(keys):
        tests = [_test(s, key) for s in found]
        one = next(test for test in tests if test)
        head = Column(plain(one.name), plain(one.metric), rank=(0, 4, 5)[i] if i < 3 else 10 + i)
        cells = [change_in(test).figure if test else NONE for test in tests]
        values = [_worse(test) if test else None for test in tests]
        columns.append(_starred(head, level(one.metric, one.before), cells, values))
    costs: list[tuple[Column, str, Callable[[float], str], list[float | None]]] = [
        (Column("lost"), "0", percent, [s.loss for s in found]),
        (Column("drift", rank=9), "0", percent, [s.relative_drift for s in found]),
        (Column("KL", rank=8), "0", nats, [kl_of(s) for s in found]),
        (Column("time", rank=7), "", seconds, [s.seconds for s in found]),
        (Column("memory", rank=10), "", gibibytes, [float(s.peak_memory) for s in found]),
    ]
    for head, start, say, values in costs if len(keys) > 1 else costs[1:]:
        cells = [NONE if value is None else say(value) for value in values]
        columns.append(_starred(head, start, cells, values))
    stars = [" ★" if s.label == chosen else "" for s in found]
    names = ["pretrained", *(plain(s.label) + star for s, star in zip(found, stars, strict=True))]
    seeds = max(s.seeds for s in found)
    note = (
        f"{f'Medians of {seeds} seeds' if seeds > 1 else 'One seed'}. Tests as change from the "
        "pretrained model (perplexity in %, shares in points). Lost: mean relative loss over the "
        f"tests. Time: training and testing. * best{', ★ recommended' if chosen else ''}."
    )
    return Table(
        "Comparison",
        (Column("recipe"), *(head for head, _ in columns)),
        tuple(zip(names, *(cells for _, cells in columns), strict=True)),
        note,
        tones=("muted", *("good" if star else "" for star in stars)),
        opened=True,
    )


def _starred(
    head: Column, start: str, cells: Sequence[str], values: Sequence[float | None]
) -> tuple[Column, list[str]]:
    """A column with a star behind the best cells, those with the least value."""
    known = {i: v for i, v in enumerate(values) if v is not None and not math.isnan(v)}
    best = {i for i, value in known.items() if value == min(known.values())}
    if len(best) == len(known):
        return head, [start, *cells]
    stars = ["*" if i in best else " " for i in range(len(cells))]
    return head, [f"{start} ", *(cell + star for cell, star in zip(cells, stars, strict=True))]


def _change_table(found: Sequence[Summary], against: Summary | None = None) -> Table:
    """Median and best over the seeds: change from the pretrained model, or from a recipe."""
    keys, several = _tests(found), max(s.seeds for s in found) > 1

    def tests(summary: Summary) -> list[Measured | None]:
        return [summary.target, *(_test(summary, key) for key in keys)]

    def cell(test: Measured | None, other: Measured | None) -> str:
        if test is None or (against and other is None):
            return NONE
        median, best = (other.after, other.best) if other else (test.before, test.before)
        text = change_in(test, median).figure
        return f"{text} ({change_in(test, best, test.best).figure})" if several else text

    others = tests(against) if against else [None] * (1 + len(keys))
    target = found[0].target
    heads = [Column(plain(target.name), f"{plain(target.metric)} (target)")]
    heads += [Column(plain(name), plain(metric)) for name, metric in keys]
    note = "The median over the seeds, and in brackets the best. " if several else ""
    return Table(
        f"Change from {plain(against.label) if against else 'the pretrained model'}",
        (Column("recipe"), *heads),
        tuple((plain(s.label), *map(cell, tests(s), others)) for s in found),
        note + "Perplexities change in percent, shares in points.",
        page_only=True,
    )


def _tests(found: Sequence[Summary]) -> list[Test]:
    """The retained tests by name and metric."""
    return list(dict.fromkeys((test.name, test.metric) for s in found for test in s.retained))


def _test(of: Summary | RunResult, key: Test) -> Measured | None:
    return next((test for test in of.retained if (test.name, test.metric) == key), None)


def _worse(test: Measured) -> float:
    return test.after if test.lower_is_better else -test.after


def _flat(plan: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The names and values of a plan; nested names are joined by dots, empty ones left out."""
    found: dict[str, str] = {}
    for name, value in plan.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        elif value not in (None, [], ()):
            items = value if isinstance(value, list | tuple) else [value]
            found[prefix + name] = ", ".join(_short(str(item)) for item in items)
    return found


def _short(name: str) -> str:
    """A file by its name, a hub's name unchanged."""
    return PurePath(name).name or name if name.startswith(("/", "~", ".")) else name
