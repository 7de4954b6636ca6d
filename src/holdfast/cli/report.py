"""``holdfast report``: draw again what was measured, without running anything."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli._config import Parser

if TYPE_CHECKING:
    from holdfast.io.saved import Saved

EXAMPLES = """
examples:
  holdfast report runs/compare                       a comparison, also one that is still at work
  holdfast report report/report.json --out drawn     what measure wrote
  holdfast report sweep --markdown > sweep.md        what merge --sweep wrote
  holdfast report one/results.json two/results.json --out both

Of several comparisons of one base on one target it makes one, with the runs of all: for plans that
were shared between machines. A run that is in several is taken from the last.
"""
#: What the subcommands write, and what tells them apart: a key of the JSON.
FILES = {"results.json": "runs", "report.json": "tuned", "sweep.json": "points"}


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand."""
    parser = Parser(
        "holdfast report",
        description="Show again what compare, measure or merge --sweep has written, and draw its "
        "page anew: report.html and report.md (of a sweep sweep.html and sweep.md).",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sources", metavar="FILE|DIR", nargs="+", type=Path,
        help="results.json, report.json, sweep.json, or the directory of one",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: beside what is read)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print it as JSON")
    form.add_argument("--markdown", action="store_true", help="print it as Markdown")
    run(parser.parse_args(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Read, print, write."""
    from holdfast.cli.measure import check_out
    from holdfast.evaluate.sweep import Sweep

    several = len(arguments.sources) > 1
    if several and arguments.out is None:
        raise ValueError("of several comparisons one is made: say where it goes, --out DIR")
    found = [read(source) for source in arguments.sources]
    out = arguments.out or found[0].folder
    check_out(out)
    shown = together(found) if several else found[0].what
    name = "sweep" if isinstance(shown, Sweep) else "report"
    out.mkdir(parents=True, exist_ok=True)
    if several:
        shown.save(out / "results.json")
    for ending in ("md", "html"):
        shown.save(out / f"{name}.{ending}")
    if arguments.json:
        print(shown.to_json().rstrip())
    elif arguments.markdown:
        print(shown.to_markdown(), end="")
    else:
        show: Any = shown
        show.to_terminal()
    print(f"The {name}: {out / f'{name}.html'}", file=sys.stderr)


@dataclass(frozen=True)
class Found:
    """What lies in a place: a comparison, a forgetting report or a sweep."""

    place: Path
    folder: Path
    what: Saved


def read(source: Path) -> Found:
    """What a file or a directory holds, by what is in it."""
    if source.is_dir():
        files = [source / name for name in FILES if (source / name).is_file()]
        if len(files) > 1:
            names = " and ".join(file.name for file in files)
            raise ValueError(f"{source} holds {names}: name the one to show")
        if not files:
            return Found(source, source, so_far(source))
        source = files[0]
    elif not source.exists():
        raise FileNotFoundError(f"no such file or directory: {source}")
    return Found(source, source.parent, _load(source))


def _load(file: Path) -> Saved:
    from holdfast.comparison.results import Results
    from holdfast.evaluate.report import ForgettingReport
    from holdfast.evaluate.sweep import Sweep

    kinds: dict[str, type[Saved]] = {"runs": Results, "tuned": ForgettingReport, "points": Sweep}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    keys = value if isinstance(value, dict) else {}
    # A sweep names its tuned model too: what only it has is looked for first.
    kind = next((kinds[key] for key in ("points", "runs", "tuned") if key in keys), None)
    if kind is None:
        raise ValueError(
            f"{file} is none of the files that holdfast writes: results.json of compare, "
            "report.json of measure, sweep.json of merge --sweep"
        )
    return kind.load(file)


def so_far(folder: Path) -> Saved:
    """The runs of a comparison that is at work, or was stopped: those that are done."""
    from holdfast.comparison.results import Results, RunResult

    files = sorted(folder.glob("runs/*/result.json"))
    if not files:
        raise ValueError(f"{folder} holds none of {', '.join(FILES)}, and no finished runs")
    runs = {}
    for file in files:
        try:
            run = RunResult.from_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} cannot be read: {error}") from None
        runs[run.id] = run
    plan, order = _plan_in(folder / "config.yaml")
    notes = {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("failed/*.txt")}
    print(
        f"Not finished: {len(runs)} of {len(order) or 'more'} runs are done so far.",
        file=sys.stderr,
    )
    return Results(
        runs=tuple(sorted(runs.values(), key=lambda run: order.get(run.id, len(order)))),
        failed={n: t.strip().rpartition("\n")[2] for n, t in notes.items() if n not in runs},
        plan=plan,
    )


def _plan_in(file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The plan that is in a config, and its runs' places in it; nothing where it cannot be told."""
    from holdfast.comparison.plan import Plan
    from holdfast.io import codec as _codec

    try:
        import yaml
    except ImportError:
        return {}, {}
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
        values = {name: given[name] for name in Plan.__dataclass_fields__ if name in given}
        plan = _codec.decode(Plan, values, "the plan")
        return _codec.encode(plan), {spec.id: i for i, spec in enumerate(plan.runs())}
    except (OSError, TypeError, ValueError, yaml.YAMLError):
        return {}, {}


def together(found: Sequence[Found]) -> Any:
    """One comparison of several; ValueError if they are not of one kind, base and target."""
    from holdfast.comparison.results import Results

    if odd := [one.place for one in found if not isinstance(one.what, Results)]:
        raise ValueError(f"only comparisons are put together, and {odd[0]} is none: give it alone")
    some: list[Any] = [one.what for one in found]
    filled = [(one.place, one.what) for one in found if isinstance(one.what, Results)]
    filled = [(place, results) for place, results in filled if results.runs]
    for place, results in filled[1:]:
        if told := _differ(filled[0][1], results):
            raise ValueError(f"{filled[0][0]} and {place} cannot be put together: {told}")
    runs = {run.id: run for results in some for run in results.runs}
    failed = {name: line for results in some for name, line in results.failed.items()}
    plan = dict(some[0].plan)
    for name in ("recipes", "seeds"):
        lists = [results.plan.get(name) or [] for results in some]
        plan[name] = list(dict.fromkeys(item for items in lists for item in items))
    return Results(
        runs=tuple(runs.values()),
        failed={name: line for name, line in failed.items() if name not in runs},
        plan=plan,
    )


def _differ(one: Any, other: Any) -> str | None:
    """In what two comparisons differ that must be the same; None if they do not.

    The same base lies in other places on other machines, and its figures differ a little between
    them: it is known by its name and by how it does on the target, near enough.
    """
    import math

    first, second = one.runs[0].target, other.runs[0].target
    tests = [f"{t.name}, {t.metric}, {t.n} samples" for t in (first, second)]
    if tests[0] != tests[1]:
        return f"their targets differ ({tests[0]}; {tests[1]})"
    models = [str(results.plan.get("model", "")) for results in (one, other)]
    alike = Path(models[0]).name == Path(models[1]).name
    if not math.isclose(first.before, second.before, rel_tol=0.01 if alike else 1e-9):
        return (
            f"their base models differ ({models[0]} has {first.before:.4g} on {first.name}, "
            f"{models[1]} {second.before:.4g})"
        )
    return None
