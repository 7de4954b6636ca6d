"""``holdfast merge``: the checkpoint between a base and a tuned one."""

from __future__ import annotations

import argparse
import sys
from typing import Any

_EXAMPLE = """\
example, half of the way from Llama to what was tuned from it:

  holdfast merge models/Llama-3.2-1B runs/my-tune --alpha 0.5 --out models/half

α = 1 is the tuned model, α = 0 the base. A smaller α remembers more and has learned less; it
costs no training to try several. TUNED may be a LoRA adapter: the result is a full model.
"""


def add_to(subcommands: Any) -> None:
    """Add the subcommand to a parser."""
    parser = subcommands.add_parser(
        "merge",
        help="write the checkpoint between a base and a tuned model (WiSE-FT)",
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
        "--alpha", type=float, default=0.5, help="the share of TUNED, from 0 to 1 (default: 0.5)"
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="the directory to write")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in DIR")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read .bin and .pt files as well"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Merge, and say what came of it."""
    from holdfast.forgetting.drift import drift
    from holdfast.merging.on_disk import merge_on_disk

    pickles, shown = arguments.allow_pickle, sys.stderr.isatty()
    out = merge_on_disk(
        arguments.base,
        arguments.tuned,
        arguments.out,
        arguments.alpha,
        overwrite=arguments.overwrite,
        allow_pickle=pickles,
        progress=shown,
    )
    moved = drift(arguments.base, out, allow_pickle=pickles, progress=shown)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    text = (
        f"wrote {arguments.out} ({size / 1e9:.2f} GB), {arguments.alpha:g} of the way from "
        f"{arguments.base} to {arguments.tuned}: {100 * moved.total.relative:.2g} % from the base"
    )
    if moved.not_finite:
        text += (
            f"; {len(moved.not_finite)} tensors hold NaN or infinity, {moved.not_finite[0]} first"
        )
    print(text)
