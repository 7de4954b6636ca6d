"""Check that a fine-tuned model forgot no more than it may: exit code 0 if so, else 1.

examples:
  holdfast check BASE TUNED --skills --max-skill-rise 30%
  holdfast check BASE TUNED --text wiki.txt --max-perplexity-rise 3% --max-kl 0.15
  holdfast check BASE TUNED --retained piqa.jsonl --max-drop 1% --target dev.jsonl --min-target 0.5
  holdfast check --report report/report.json --max-drift 3%     limits for what measure has measured

--out writes junit.xml for CI systems, summary.md for pull requests, and the report as a page. A
figure is compared with its limit as it is; the verdict says where the limit lies within the 95 %
interval. --skills tests arithmetic, code, languages and the form of chats on texts that the base
itself writes, without any data.
"""

import argparse
from pathlib import Path

from holdfast.cli._guard import Failed, check_page, show
from holdfast.cli._options import Parser, UsageError, add, attribute_texts
from holdfast.cli.measure import add_models, add_tests, inputs_of, measure_arguments
from holdfast.evaluate.gate import Limits, check
from holdfast.evaluate.measure import measure
from holdfast.evaluate.report import ForgettingReport
from holdfast.io.outputs import claim, output_name
from holdfast.io.storage import Place

FILES = ("gate.json", "summary.md", "report.html")
#: Limits in the unit of their figure; the others are relative to it, or shares.
ABSOLUTE = ("max_kl", "min_target", "max_target_loss")


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, "BASE TUNED --max-… LIMIT [options]")
    add_models(parser, nargs="?")
    limits = parser.add_argument_group("limits")
    for name, text in attribute_texts(Limits).items():
        kind = number if name in ABSOLUTE else share
        limits.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=text)
    add_tests(parser)
    parser.add_argument("--report", metavar="FILE", help="the JSON of a report of measure")
    add(parser.add_argument_group("output"), "out", "json")


def number(word: str) -> float:
    """Read a number or a percentage.

    >>> number("2%"), number("0.05")
    (0.02, 0.05)
    """
    try:
        return float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number or a percentage, got {word!r}"
        ) from None


def share(word: str) -> float:
    """Read a percentage, or a number below 1.

    >>> share("2%"), share("300%"), share("0.02")
    (0.02, 3.0, 0.02)
    """
    found = number(word)
    if found >= 1 and not word.endswith("%"):
        raise argparse.ArgumentTypeError(
            f"must be a percentage or a number below 1, got {word!r}: write {word}%"
        )
    return found


def check_tests(options: argparse.Namespace) -> None:
    """Raise before the work if a limit would have nothing to limit."""
    retained = (options.text, options.retained, options.similarity, options.tasks)
    for name in ("max_perplexity_rise", "max_drop"):
        if getattr(options, name) is not None and not any(retained):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} needs a test: --text, --retained or --tasks")
    if (options.max_skill_rise is not None) != options.skills:
        raise UsageError("--skills and --max-skill-rise need each other: give both or none")
    for name in ("min_target", "max_target_loss"):
        if getattr(options, name) is not None and not options.target:
            raise UsageError(f"--{name.replace('_', '-')} needs a --target")
    if options.max_drift is not None and not options.drift:
        raise UsageError("--max-drift needs the drift: leave out --no-drift")


def run(options: argparse.Namespace) -> None:
    limits = Limits(**{name: getattr(options, name) for name in vars(Limits())})
    out = None if options.out is None else Place.at(Path(output_name(options.out)))
    if out is not None:
        check_page()
    if (options.report is None) == (options.tuned is None):
        raise UsageError("give BASE and TUNED, or the --report of an earlier measurement")
    if not limits.given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in vars(limits))
        raise UsageError(f"give at least one limit: {names}")
    if options.report is None:
        check_tests(options)
        if options.max_kl is None:
            options.context_free = 0  # which takes most of the time
    inputs = inputs_of(options) if options.report is None else [options.report]
    with claim(out, "check", inputs, files=(*FILES, "junit.xml", "report.json")):
        if options.report is not None:
            report = ForgettingReport.load(options.report)
        else:
            report = measure(options.base, options.tuned, **measure_arguments(options))
        gate = check(report, limits)
        if out is not None:
            (out / "junit.xml").write_text(gate.to_junit())
            (out / "report.json").write_text(report.to_json())  # for other limits
        show(gate, options, out, *FILES)
        if not gate.passed:
            raise Failed(gate.document().answer.headline)
