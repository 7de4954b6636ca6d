"""``holdfast merge``: the checkpoint between a base and a tuned one, and which one to take."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli._config import Parser
from holdfast.cli.measure import add_measuring_options, check_out, measuring_options

_EXAMPLE = """\
example, half of the way from Llama to what was tuned from it:

  holdfast merge models/Llama-3.2-1B runs/my-tune --alpha 0.5 --out models/half

example, which α to take, measured on what it was tuned for and on what it should have kept:

  holdfast merge models/Llama-3.2-1B runs/my-tune --sweep 0,0.25,0.5,0.75,1 --out sweep \\
    --target gsm8k.jsonl --data piqa.jsonl --text wiki.txt

α = 1 is the tuned model, α = 0 the base. A smaller α remembers more and has learned less; it
costs no training to try several. TUNED may be a LoRA adapter: the result is a full model.
"""


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand."""
    parser = Parser(
        "holdfast merge",
        description="Write α·TUNED + (1−α)·BASE as a new checkpoint (WiSE-FT, "
        "https://arxiv.org/abs/2109.01903), on the CPU and in little memory, whatever its size.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", metavar="BASE", help="directory or file of the pretrained model")
    parser.add_argument(
        "tuned", metavar="TUNED", help="directory or file of the tuned model, or a LoRA adapter"
    )
    parser.add_argument(
        "--alpha", type=float, help="the share of TUNED, from 0 to 1 (default: 0.5)"
    )
    parser.add_argument(
        "--sweep", metavar="A,B,C",
        help="measure each of these α, and write sweep.json, sweep.md and sweep.html into DIR",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", required=True, help="the directory to write")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in DIR")
    parser.add_argument(
        "--keep", action="store_true", help="with --sweep: leave the merged models in DIR/alpha-A"
    )
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read .bin and .pt files as well"
    )
    parser.add_argument("--json", action="store_true", help="print what came of it as JSON")
    add_measuring_options(parser.add_argument_group("what to measure, with --sweep"))
    run(parser.parse_args(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Merge at one α, or measure at several."""
    if arguments.sweep is None:
        check_no_sweep(arguments)
        merge(arguments)
    else:
        sweep(arguments)


def merge(arguments: argparse.Namespace) -> None:
    """Merge, and say what came of it."""
    from holdfast.evaluate.drift import drift
    from holdfast.io.merge import merge_on_disk

    pickles, shown = arguments.allow_pickle, sys.stderr.isatty()
    alpha = 0.5 if arguments.alpha is None else arguments.alpha
    out = merge_on_disk(
        arguments.base,
        arguments.tuned,
        arguments.out,
        alpha,
        overwrite=arguments.overwrite,
        allow_pickle=pickles,
        progress=shown,
    )
    moved = drift(arguments.base, out, allow_pickle=pickles, progress=shown)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    text = (
        f"wrote {arguments.out} ({_size(size)}), {alpha:g} of the way from "
        f"{arguments.base} to {arguments.tuned}: {100 * moved.total.relative:.2g} % from the base"
    )
    if arguments.json:
        about = {"out": str(out), "alpha": alpha, "bytes": size, "relative": moved.total.relative}
        print(json.dumps({**about, "not_finite": list(moved.not_finite)}))
        return
    if moved.not_finite:
        text += (
            f"; {len(moved.not_finite)} tensors hold NaN or infinity, {moved.not_finite[0]} first"
        )
    print(text)


def sweep(arguments: argparse.Namespace) -> None:
    """Measure at several α, and say which one to take."""
    from holdfast.evaluate.sweep import sweep

    if arguments.alpha is not None:
        raise ValueError("--alpha is for one α and --sweep for several: give one of the two")
    alphas, out = alphas_in(arguments.sweep), Path(arguments.out)
    check_out(out)
    made = not out.exists()
    try:
        found = sweep(
            arguments.base,
            arguments.tuned,
            alphas,
            out=out,
            keep=arguments.keep,
            overwrite=arguments.overwrite,
            **measuring_options(arguments),
        )
    except BaseException:
        if made:
            with contextlib.suppress(OSError):  # there is none, or something was kept in it
                out.rmdir()
        raise
    out.mkdir(parents=True, exist_ok=True)
    for ending in ("json", "md", "html"):
        found.save(out / f"sweep.{ending}")
    print(found.to_json()) if arguments.json else found.to_terminal()
    print(f"The sweep: {out / 'sweep.html'}", file=sys.stderr)


def alphas_in(text: str) -> list[float]:
    """The numbers from 0 to 1 in a list with commas.

    >>> alphas_in("0, 0.5, 1")
    [0.0, 0.5, 1.0]
    """
    try:
        alphas = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        alphas = []
    if not alphas or not all(0 <= alpha <= 1 for alpha in alphas):
        raise ValueError(f"--sweep takes numbers from 0 to 1, such as 0,0.25,0.5,1, got {text!r}")
    return alphas


def check_no_sweep(arguments: argparse.Namespace) -> None:
    """Nothing is measured without --sweep: what asks for it is refused."""
    blank = argparse.ArgumentParser()
    add_measuring_options(blank)
    defaults = {**vars(blank.parse_args([])), "keep": False}
    if given := [name for name, value in defaults.items() if getattr(arguments, name) != value]:
        option = f"--{given[0].replace('_', '-')}"
        raise ValueError(f"{option} is for a sweep: add --sweep 0,0.25,0.5,0.75,1, or leave it out")


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"
