"""Write α·TUNED + (1−α)·BASE as a new checkpoint (WiSE-FT, https://arxiv.org/abs/2109.01903).

Merging runs on the CPU in little memory. With --sweep, several α are measured and one recommended.

examples:
  holdfast merge models/Llama-3.2-1B runs/my-tune --alpha 0.5 --out models/half
  holdfast merge models/Llama-3.2-1B runs/my-tune --sweep 0 0.25 0.5 0.75 1 --out sweep \\
      --target gsm8k.jsonl --retained piqa.jsonl --text wiki.txt

α = 1 is the tuned model and α = 0 is the base. A smaller α forgets less and has learned less.
TUNED may be a LoRA adapter: the result is a full model.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from holdfast.cli._guard import check_page, show
from holdfast.cli._options import NUMBER, Parser, UsageError, add
from holdfast.cli.measure import add_models, add_tests, inputs_of, measure_arguments
from holdfast.evaluate.drift import drift
from holdfast.evaluate.sweep import sweep
from holdfast.io.codec import encode
from holdfast.io.merge import merge_on_disk
from holdfast.io.outputs import claim, output_name
from holdfast.io.storage import Place
from holdfast.report.printing import tell, tell_line
from holdfast.report.verdict import INTERPOLATED, on_tokens


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, "BASE TUNED --out DIR [options]", needed=("out",))
    add_models(parser)
    merging = parser.add_argument_group("merging")
    merging.add_argument("--alpha", type=NUMBER, help="share of TUNED, from 0 to 1 (default: 0.5)")
    merging.add_argument(
        "--sweep", type=NUMBER, nargs="+", metavar="ALPHA", help="measure merged models at these α"
    )
    merging.add_argument("--keep", action="store_true", help="with --sweep: keep the merged models")
    output = parser.add_argument_group("output")
    add(output, "out", "json")
    output.add_argument("--overwrite", action="store_true", help="replace existing models in --out")
    add_tests(parser, "tests, with --sweep")


def run(options: argparse.Namespace) -> None:
    if options.sweep is not None:
        if options.alpha is not None:
            raise UsageError("--alpha merges at one α and --sweep at several: give one of the two")
        measure_merged(options)
        return
    blank = Parser()
    add_tests(blank)
    for name, default in {**vars(blank.parse([])), "keep": False}.items():
        if getattr(options, name) != default:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} needs a sweep: add --sweep 0 0.25 0.5 0.75 1")
    merge(options)


def merge(options: argparse.Namespace) -> None:
    """Write one merged checkpoint, and print its size and its distance from the base."""
    shared = {"allow_pickle": options.allow_pickle, "progress": True}
    alpha = 0.5 if options.alpha is None else options.alpha
    out = merge_on_disk(
        options.base,
        options.tuned,
        output_name(options.out),
        alpha,
        overwrite=options.overwrite,
        **shared,
    )
    moved = drift(options.base, out, **shared)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    if options.json:
        about: dict[str, Any] = {
            "out": str(out), "alpha": alpha, "bytes": size, "relative": moved.total.relative,
            "not_finite": moved.not_finite, "vocabulary": moved.vocabulary,
        }  # fmt: skip
        tell(json.dumps(encode(about), allow_nan=False))
        return
    shown = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
    tell_line(
        f"wrote {options.out} ({shown}), α = {alpha:g} between {options.base} and {options.tuned}: "
        f"{100 * moved.total.relative:.2g} % from the base"
    )
    if moved.vocabulary is not None:
        tell_line(f"{on_tokens(moved.vocabulary)} {INTERPOLATED}")
    if bad := moved.not_finite:
        tell_line(f"{len(bad)} tensors contain NaN or infinity, the first is {bad[0]}")


def measure_merged(options: argparse.Namespace) -> None:
    if not all(0 <= alpha <= 1 for alpha in options.sweep):
        given = " ".join(f"{alpha:g}" for alpha in options.sweep)
        raise UsageError(f"--sweep must be numbers from 0 to 1, got {given}")
    check_page()
    out = Path(output_name(options.out))
    places = {"out": out, "keep": options.keep, "overwrite": options.overwrite}
    with claim(out, "merge --sweep", inputs_of(options)):
        arguments = {**places, **measure_arguments(options)}
        found = sweep(options.base, options.tuned, options.sweep, **arguments)
        show(found, options, Place.at(out), "sweep.json", "sweep.md", "sweep.html")
