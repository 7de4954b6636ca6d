"""Show the results of compare, tune, measure or merge --sweep again; write page and Markdown.

examples:
  holdfast report runs/compare                       a comparison, also an unfinished one
  holdfast report report/report.json --out drawn     a report of measure
  holdfast report sweep --markdown > sweep.md        a sweep of merge --sweep
  holdfast report one/results.json two/results.json --out both
  holdfast report report --model-card README.md      a section of a model card

Several comparisons of one base on one target become one with all runs, for plans that machines
shared. A run that occurs twice is taken from the last.
"""

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.cli import compare
from holdfast.cli._card import check_card, update_card
from holdfast.cli._guard import check_page, say, show
from holdfast.cli._options import Parser, UsageError, add, settings_from
from holdfast.comparison.plan import Plan
from holdfast.comparison.results import Results, finished_in, together
from holdfast.comparison.tuning import Tuned
from holdfast.evaluate.report import ForgettingReport
from holdfast.evaluate.sweep import Sweep
from holdfast.io.files import read_json
from holdfast.io.outputs import claim, claim_file, maker_of, output_name
from holdfast.io.storage import Place
from holdfast.report import LEARN_AT_LEAST
from holdfast.report.shown import Shown

#: Commands whose results are shown.
WRITERS = ("compare", "tune", "measure", "merge --sweep")
FILES = ("results.json", "report.json", "sweep.json")
SEARCH = "tune.json"


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, "RESULTS [RESULTS ...] [options]")
    sources = f"{', '.join(FILES)}, or a directory with one of them"
    parser.add_argument("sources", metavar="RESULTS", nargs="+", help=sources)
    output = parser.add_argument_group("output")
    add(output, "out", "model_card")
    form = output.add_mutually_exclusive_group()
    add(form, "json")
    form.add_argument("--markdown", action="store_true", help="print the result as Markdown")


def run(options: argparse.Namespace) -> None:
    several = len(options.sources) > 1
    if several and options.out is None:
        raise UsageError("several comparisons become a new one: give its directory with --out DIR")
    found = {source: read(Path(source), as_search=not several) for source in options.sources}
    first, folder = next(iter(found.values()))
    check_page()
    shown: Any = first
    if several:
        shown = together({source: saved for source, (saved, _) in found.items()})
    name = "sweep" if hasattr(shown, "points") else "report"
    files = [*["results.json"] * several, f"{name}.md", f"{name}.html"]
    inputs = [str(file) for source in options.sources for file in files_of(Path(source))]
    check_card(options, inputs)
    if options.out is None:  # beside the results, whose directory need not be ours
        for file in files:
            claim_file(folder / file, inputs, ours=lambda file: may_be_replaced(file, shown))
        show(shown, options, Place.at(folder), *files)
    else:
        with claim(output_name(options.out), "report", inputs, files=files, also=WRITERS):
            show(shown, options, Place.at(Path(options.out)), *files)
    update_card(options, shown)


def may_be_replaced(file: Path, shown: Shown) -> bool:
    """Whether a command of holdfast wrote the directory of a file, or the file would not change."""
    if maker_of(Place.at(file.parent)) is not None:
        return True
    text = shown.to_html() if file.suffix == ".html" else shown.to_markdown()
    return file.read_bytes() == text.encode()


def files_of(source: Path) -> list[Path]:
    return [source / name for name in FILES] if source.is_dir() else [source]


def read(source: Path, *, as_search: bool = True) -> tuple[Shown, Path]:
    """Return the results in a file or a directory, and the directory.

    The directory of a search has the search, and the runs of its frontier as a comparison.
    """
    if not source.exists():
        raise FileNotFoundError(f"no such file or directory: {source}")
    if not source.is_dir():
        return open_results(source), source.parent
    if as_search and (source / SEARCH).is_file():
        return open_results(source / SEARCH), source
    files = [source / name for name in FILES if (source / name).is_file()]
    if len(files) > 1:
        names = " and ".join(file.name for file in files)
        raise ValueError(f"{source} contains {names}: name the file to show")
    return (open_results(files[0]) if files else unfinished(source)), source


def open_results(file: Path) -> Shown:
    value = read_json(file)
    # A sweep also has a tuned model, so its own key comes first.
    kinds: dict[str, type[Shown]] = {
        "points": Sweep, "runs": Results, "frontier": Tuned, "tuned": ForgettingReport
    }  # fmt: skip
    keys = value if isinstance(value, dict) else {}
    kind = next((kind for key, kind in kinds.items() if key in keys), None)
    if kind is None:
        raise ValueError(
            f"{file} was not written by holdfast: expected results.json of compare, report.json "
            "of measure or sweep.json of merge --sweep"
        )
    return kind.load(file)


def unfinished(folder: Path) -> Results:
    """Return the finished runs of a comparison that is running, or was stopped."""
    parser, plan, share = Parser(), None, LEARN_AT_LEAST
    compare.add_options(parser)
    with contextlib.suppress(OSError, TypeError, ValueError, ImportError):  # then without its plan
        options = parser.parse([f"--config={folder / 'config.yaml'}"])
        share = options.learn_at_least
        plan = settings_from(Plan, options)
    results = finished_in(folder, plan)
    if results is None:
        raise ValueError(f"{folder} contains neither {', '.join(FILES)} nor finished runs")
    total = "more" if plan is None else len(plan.runs)
    say(f"{len(results.runs)} of {total} runs are finished", "unfinished")
    return replace(results, learn_at_least=share)
