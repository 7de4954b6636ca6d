"""The Document of a comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from holdfast.report import words
from holdfast.report.document import Column, Document, Figure, Section, Table
from holdfast.report.frontier import MOST, Axis, Mark, frontier, out_of_view
from holdfast.report.plot import ACCENT, GAINED, LOST, lines
from holdfast.report.recommend import (
    SCALE,
    STANDARD,
    Recommendation,
    kl_of,
    lost,
    recommend,
    standard_of,
)
from holdfast.report.words import NONE, Span, change_in, percent, plain, score_text

if TYPE_CHECKING:
    from holdfast.comparison.results import Measured, Results, RunResult, Summary

    #: The measured tests by name and metric; the target is under None.
    Tests = dict[tuple[str, str] | None, Measured]

_CURVES = {"loss": "Loss on the training data", "distance": "Distance ‖θ − θ*‖ of the weights"}


def document(results: Results, answer: Recommendation | None = None) -> Document:
    """``answer`` replaces the recommendation that the results give by themselves."""
    found, answer = results.summaries(), answer or recommend(results)
    versions = results.runs[0].versions if results.runs else {}
    names = [_short(str(results.plan[key])) for key in ("model", "data") if key in results.plan]
    failures = (f"{plain(name)}: {plain(error)}" for name, error in results.failed.items())
    return Document(
        kind="comparison",
        answer=answer,
        badge=plain(answer.label) if answer.label else "No recommendation",
        tone="good" if answer.label else "info",
        names=tuple(names),
        sections=(
            *(_shown(found, answer.label, results.plan.get("rates") or {}) if found else ()),
            Section("Failed runs", notes=tuple(failures)),
            Section.facts(
                "How it was run",
                Plan=_flat(results.plan),
                Recipes={s.label: _settings(s.resolved) for s in found if s.resolved},
                Versions=versions,
            ),
        ),
        download="results.json",
    )


def _shown(
    found: Sequence[Summary], chosen: str | None, rates: Mapping[str, float]
) -> list[Section]:
    colors = {s.label: LOST for s in found if s.recipe == STANDARD}
    if chosen is not None:
        colors[chosen] = GAINED
    marks = [_mark(summary, colors.get(summary.label, ACCENT)) for summary in found]
    rows = [_tests(summary) for summary in found]
    target, *tests = dict.fromkeys(key for row in rows for key in row)
    x = _axis(found, target)
    seeds = [[run.loss for run in summary.runs] for summary in found]
    title = "Lost on the retained tests (1 is where a loss stops being little)"
    losses = Axis(title, _medians(seeds), start=0.0, lower_is_better=True)
    worst = {key: max(change_in(row[key]).loss for row in rows if key in row) for key in tests}
    drawn = sorted(tests, key=worst.__getitem__, reverse=True)[:MOST]
    ys = [_axis(found, key) for key in tests if key in drawn]
    single = "The same for each retained test."
    if len(tests) > MOST:
        single += f" These are the {MOST} of {len(tests)} that lose most; the tables have all."
    tables = [_main_table(found, chosen, rates), _change_table(found)]
    standard = standard_of(found)
    if standard is not None and len(found) > 1:
        tables.append(_change_table(found, standard))
    return [
        Section(
            "What is learned and what is kept",
            _about(found, chosen, out_of_view(marks, x, losses)),
            (frontier(marks, x, losses, wide=True),) if tests else (),
        ),
        Section(
            "Test by test",
            single,
            tuple(frontier(marks, x, y) for y in ys) if len(tests) > 1 else (),
        ),
        Section("All figures", tables=tuple(tables)),
        Section(
            "During training",
            "The first seed of each recipe. The loss is the one that the recipe minimizes. Merging "
            "happens after the last update.",
            tuple(_curves(found, colors)),
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
        about += (
            f" Not drawn, because not finite or far worse than the rest: {words.listed(unseen)}."
        )
    return about


def _mark(summary: Summary, color: str) -> Mark:
    details = []
    for test in (summary.target, *summary.retained[:MOST]):
        value, change = score_text(test.metric, test.after), change_in(test).figure
        details.append(f"{plain(test.name)}: {value} ({change})")
    if summary.retained:
        details.append(f"lost: {lost(summary.loss)}")
    return Mark(summary.label, color, tuple(details))


def _axis(found: Sequence[Summary], key: tuple[str, str] | None) -> Axis:
    rows = [[tests[key] for run in s.runs if key in (tests := _tests(run))] for s in found]
    one = next(test for row in rows for test in row)
    spans = _medians([[test.after for test in row] for row in rows])
    return Axis.of_test(one.name, one.metric, spans, one.before, one.lower_is_better)


def _medians(seeds: Sequence[Sequence[float]]) -> list[Span]:
    rows = (row or [math.nan] for row in seeds)
    return [Span(statistics.median(row), min(row), max(row)) for row in rows]


def _curves(found: Sequence[Summary], colors: Mapping[str, str]) -> Iterable[Figure]:
    for name, title in _CURVES.items():
        curves = {s.label: c for s in found for c in s.runs[0].curves if c.name == name and c.steps}
        if curves:
            yield lines(title, curves, "update", colors)


def _main_table(found: Sequence[Summary], chosen: str | None, rates: Mapping[str, float]) -> Table:
    """One row per recipe, the pretrained model first."""
    rows = [_tests(summary) for summary in found]
    columns = []
    for i, key in enumerate(dict.fromkeys(key for row in rows for key in row)):
        tests = [row.get(key) for row in rows]
        one = next(test for test in tests if test)
        cells = [change_in(test).figure if test else NONE for test in tests]
        if key is None:
            levels = [score_text(test.metric, test.after) for test in tests if test]
            cells = [f"{level} ({cell})" for level, cell in zip(levels, cells, strict=True)]
        sign = 1 if one.lower_is_better else -1
        values = [sign * test.after if test else None for test in tests]
        head = _head(one, key, rank=(0, 0, 4, 5)[i] if i < 4 else 9 + i)
        columns.append(_starred(head, score_text(one.metric, one.before), cells, values))
    signals = [next(iter(s.kl), "") in s.trained_on for s in found]
    shared = {run.at_a_time or 1 for s in found for run in s.runs}
    costs: list[tuple[Column, str, Callable[[float], str], list[float | None]]] = [
        (Column("lost"), "0", lost, [s.loss for s in found]),
        (Column("drift", rank=9), "0", percent, [s.relative_drift for s in found]),
        (Column("KL", rank=8), "0", words.nats, [kl_of(s) for s in found]),
        (Column("time", rank=7), "", words.seconds, [s.seconds for s in found]),
        (Column("memory", rank=10), "", words.gibibytes, [float(s.peak_memory) for s in found]),
    ]
    for head, start, text, values in costs if len(columns) > 2 else costs[1:]:
        cells = [NONE if value is None else text(value) for value in values]
        if head.head == "KL" and any(signals):
            # No star for a training signal: it is no evidence.
            cells = [c + "†" * s for c, s in zip(cells, signals, strict=True)]
            values = [None if s else v for v, s in zip(values, signals, strict=True)]
        if head.head == "time" and len(shared) > 1:
            values = [None for _ in values]  # runs that shared a device took longer
        columns.append(_starred(head, start, cells, values))
    names = [plain(s.label) + (" ★" if s.label == chosen else "") for s in found]
    seeds = max(s.seeds for s in found)
    note = (
        f"{f'Medians of {seeds} seeds' if seeds > 1 else 'One seed'}. Tests as change from the "
        f"pretrained model (perplexity in %, shares in points). {SCALE} "
        f"Time: training and testing{_beside(max(shared))}. "
        f"* best{', ★ recommended' if chosen else ''}."
    )
    note += _shared(found) + _resolutions(found) + _rates(rates)
    if any(signals):
        note += " † The KL was a training signal of this recipe: it is no evidence of retention."
    return Table(
        "Comparison",
        (Column("recipe"), *(head for head, _ in columns)),
        tuple(zip(["pretrained", *names], *(cells for _, cells in columns), strict=True)),
        note,
        tones=("muted", *("good" if s.label == chosen else "" for s in found)),
        opened=True,
    )


def _beside(at_a_time: int) -> str:
    """The end of the sentence about the time of runs that shared a GPU or CPU.

    >>> _beside(4)
    ', beside up to 3 other runs on the same device, which takes longer than alone'
    """
    others = f"{at_a_time - 1} other run{'s' * (at_a_time > 2)}"
    said = f", beside up to {others} on the same device, which takes longer than alone"
    return said if at_a_time > 1 else ""


def _starred(
    head: Column, start: str, cells: Sequence[str], values: Sequence[float | None]
) -> tuple[Column, list[str]]:
    """A column with a star behind the best cells, those with the least value."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if len({*known}) < 2:
        return head, [start, *cells]
    stars = ["*" if value == min(known) else " " for value in values]
    return head, [f"{start} ", *(cell + star for cell, star in zip(cells, stars, strict=True))]


def _change_table(found: Sequence[Summary], against: Summary | None = None) -> Table:
    """Median and best over the seeds: change from the pretrained model, or from a recipe."""
    rows = [_tests(summary) for summary in found]
    heads = {key: _head(test, key) for row in rows for key, test in row.items()}
    several = max(s.seeds for s in found) > 1
    others = _tests(against) if against else {}

    def cell(test: Measured | None, other: Measured | None) -> str:
        if test is None or (against and other is None):
            return NONE
        median, best = (other.after, other.best) if other else (test.before, test.before)
        text = change_in(test, median).figure
        return f"{text} ({change_in(test, best, test.best).figure})" if several else text

    note = "The median over the seeds, and in brackets the best. " if several else ""
    return Table(
        f"Change from {plain(against.label) if against else 'the pretrained model'}",
        (Column("recipe"), *heads.values()),
        tuple(
            (plain(s.label), *(cell(row.get(key), others.get(key)) for key in heads))
            for s, row in zip(found, rows, strict=True)
        ),
        note + "Perplexities change in percent, shares in points.",
        page_only=True,
    )


def _tests(of: Summary | RunResult) -> Tests:
    return {None: of.target, **{(test.name, test.metric): test for test in of.retained}}


def _head(test: Measured, key: tuple[str, str] | None, rank: int = 0) -> Column:
    return Column(plain(test.name), plain(test.metric) + " (target)" * (key is None), rank)


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


def _chosen(summary: Summary) -> str:
    """The names of methods that were chosen for the model; empty if there are none."""
    before, after = summary.runs[0].settings, summary.resolved
    methods = {stage: method for stage, method in after.items() if stage in before}
    return words.listed(
        [m["name"] for s, m in methods.items() if "name" in m and m["name"] != before[s]["name"]]
    )


def _shared(found: Sequence[Summary]) -> str:
    """A sentence about the trainings that several recipes have shared."""
    groups = {frozenset(run.shared) for s in found for run in s.runs}
    order = [s.label for s in found]
    named = [[plain(label) for label in order if label in group] for group in groups]
    said = sorted(words.listed(names) for names in named if len(names) > 1)
    if not said:
        return ""
    return f" Shared one training per seed, which counts in the time of each: {'; '.join(said)}."


def _resolutions(found: Sequence[Summary]) -> str:
    """One sentence per choice of methods, with the recipes that it was made for."""
    recipes: dict[str, list[str]] = {}
    for summary in found:
        if methods := _chosen(summary):
            recipes.setdefault(methods, []).append(plain(summary.label))
    return "".join(
        f" {words.listed(names)} {'was' if len(names) == 1 else 'were'} resolved to {methods}."
        for methods, names in recipes.items()
    )


def _rates(rates: Mapping[str, float]) -> str:
    """A sentence about default learning rates.

    >>> _rates({"standard": 5e-4, "flow": 5e-4, "lora": 3e-3})
    ' Default learning rates for this model: 0.0005 (standard and flow) and 0.003 (lora).'
    """
    recipes: dict[float, list[str]] = {}
    for name, rate in rates.items():
        recipes.setdefault(rate, []).append(plain(name))
    said = [f"{rate:g} ({words.listed(names)})" for rate, names in recipes.items()]
    return f" Default learning rates for this model: {words.listed(said)}." if said else ""


def _settings(resolved: Mapping[str, Any]) -> str:
    """All settings of a recipe on one line.

    >>> update = {"name": "adamw", "lr": 5e-4, "weight_decay": None}
    >>> _settings({"update": update, "penalties": [], "recall": {"name": "auto", "strength": 1.0}})
    'adamw (lr 0.0005), auto (strength 1.0)'
    """
    said = []
    for given in resolved.values():
        for method in given if isinstance(given, list) else [given]:
            settings = {k: v for k, v in method.items() if k != "name" and v is not None}
            shown = ", ".join(f"{name} {value}" for name, value in settings.items())
            said.append(f"{method['name']}{f' ({shown})' if shown else ''}")
    return ", ".join(said)


def _short(name: str) -> str:
    """A file by its name, a hub's name unchanged."""
    return PurePath(name).name or name if name.startswith(("/", "~", ".")) else name
