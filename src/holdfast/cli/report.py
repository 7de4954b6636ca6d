"""``holdfast report``: show saved results again, without running anything."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli._guard import claim, open_results, say
from holdfast.cli._options import Parser, UsageError, add, settings_from

if TYPE_CHECKING:
    from holdfast.comparison.results import Results
    from holdfast.io.saved import Saved

EXAMPLES = """\
examples:
  holdfast report runs/compare                       a comparison, also an unfinished one
  holdfast report report/report.json --out drawn     a report of measure
  holdfast report sweep --markdown > sweep.md        a sweep of merge --sweep
  holdfast report one/results.json two/results.json --out both

Several comparisons of one base on one target become one with all runs, for plans that machines
shared. A run that occurs twice is taken from the last.
"""
FILES = ("results.json", "report.json", "sweep.json")


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "Show the results of compare, measure or merge --sweep again, and write their page and "
        "their Markdown.",
        EXAMPLES,
        usage="RESULTS [RESULTS ...] [options]",
    )
    parser.add_argument(
        "sources", metavar="RESULTS", nargs="+",
        help="results.json, report.json, sweep.json, or a directory with one of them",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    add(output, "out")
    form = output.add_mutually_exclusive_group()
    add(form, "json")
    form.add_argument("--markdown", action="store_true", help="print the result as Markdown")


def run(options: argparse.Namespace) -> None:
    """Read, print, write."""
    several = len(options.sources) > 1
    if several and options.out is None:
        raise UsageError("several comparisons become a new one: give its directory with --out DIR")
    found = {source: read(Path(source)) for source in options.sources}
    first, folder = next(iter(found.values()))
    out = folder if options.out is None else Path(options.out)
    claim(out, page=True)
    shown: Any = together({s: saved for s, (saved, _) in found.items()}) if several else first
    name = "sweep" if hasattr(shown, "points") else "report"
    out.mkdir(parents=True, exist_ok=True)
    if several:
        shown.save(out / "results.json")
    for ending in ("md", "html"):
        shown.save(out / f"{name}.{ending}")
    if options.json:
        print(shown.to_json().rstrip())
    elif options.markdown:
        print(shown.to_markdown(), end="")
    else:
        shown.to_terminal()
    print(f"{name.capitalize()}: {out / f'{name}.html'}", file=sys.stderr)


def read(source: Path) -> tuple[Saved, Path]:
    """Return the results in a file or a directory, and the directory."""
    if not source.exists():
        raise FileNotFoundError(f"no such file or directory: {source}")
    if not source.is_dir():
        return open_results(source), source.parent
    files = [source / name for name in FILES if (source / name).is_file()]
    if len(files) > 1:
        names = " and ".join(file.name for file in files)
        raise ValueError(f"{source} contains {names}: name the file to show")
    return (open_results(files[0]) if files else unfinished(source)), source


def unfinished(folder: Path) -> Results:
    """Return the finished runs of a comparison that is running, or was stopped."""
    from holdfast.comparison.results import Results, RunResult

    files = sorted(folder.glob("runs/*/result.json"))
    if not files:
        raise ValueError(f"{folder} contains neither {', '.join(FILES)} nor finished runs")
    runs = {}
    for file in files:
        try:
            run = RunResult.from_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} cannot be read: {error}") from None
        runs[run.id] = run
    plan, order = _plan_in(folder / "config.yaml")
    notes = {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("failed/*.txt")}
    say(f"{len(runs)} of {len(order) or 'more'} runs are finished", "unfinished")
    return Results(
        runs=tuple(sorted(runs.values(), key=lambda run: order.get(run.id, len(order)))),
        failed={n: t.strip().rpartition("\n")[2] for n, t in notes.items() if n not in runs},
        plan=plan,
    )


def _plan_in(config: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the plan in a config, and the order of its runs; both empty if it cannot be read."""
    from holdfast.cli import compare
    from holdfast.comparison.plan import Plan
    from holdfast.io import codec

    parser = Parser()
    compare.add_options(parser)
    try:
        plan = settings_from(Plan, parser.parse([f"--config={config}"]))
    except (OSError, TypeError, ValueError, ImportError):
        return {}, {}
    return codec.encode(plan), {spec.id: i for i, spec in enumerate(plan.runs())}


def together(found: dict[str, Saved]) -> Results:
    """Put comparisons of one base and target together."""
    from holdfast.comparison.results import Results

    every: list[Results] = []
    for source, saved in found.items():
        if not isinstance(saved, Results):
            raise ValueError(f"{source} is not a comparison: show it alone")
        every.append(saved)
    filled = [(source, saved) for source, saved in zip(found, every, strict=True) if saved.runs]
    for source, results in filled[1:]:
        if differ := _difference(filled[0][1], results):
            raise ValueError(f"{filled[0][0]} and {source} cannot be put together: {differ}")
    runs = {run.id: run for results in every for run in results.runs}
    failed = {name: line for results in every for name, line in results.failed.items()}
    plan = dict(every[0].plan)
    for name in ("recipes", "seeds"):
        lists: list[Sequence[Any]] = [results.plan.get(name) or [] for results in every]
        plan[name] = list(dict.fromkeys(item for items in lists for item in items))
    return Results(
        runs=tuple(runs.values()),
        failed={name: line for name, line in failed.items() if name not in runs},
        plan=plan,
    )


def _difference(one: Results, other: Results) -> str | None:
    """Return in which way two comparisons differ in base or target, or None.

    The path of the base and the last digits of its scores differ between machines, so the base is
    identified by its name and, roughly, its score on the target.
    """
    first, second = one.runs[0].target, other.runs[0].target
    tests = [f"{t.name}, {t.metric}, {t.n} samples" for t in (first, second)]
    if tests[0] != tests[1]:
        return f"their targets differ ({tests[0]}; {tests[1]})"
    models = [str(results.plan.get("model", "")) for results in (one, other)]
    same_name = Path(models[0]).name == Path(models[1]).name
    if not math.isclose(first.before, second.before, rel_tol=0.01 if same_name else 1e-9):
        return (
            f"their base models differ ({models[0]} has {first.before:.4g} on {first.name}, "
            f"{models[1]} has {second.before:.4g})"
        )
    return None
