"""``holdfast measure``: what a fine-tune cost."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.cli._config import Parser
from holdfast.io.files import check_folder

EXAMPLES = """
examples:
  holdfast measure BASE TUNED                        drift and data-free divergence: no data needed
  holdfast measure BASE TUNED --text wiki.txt        perplexity on a text, before and after
  holdfast measure BASE TUNED --data piqa.jsonl --target gsm8k.jsonl --out report
  holdfast measure BASE TUNED --target flowers/test  images, in a folder for each class
  holdfast measure BASE TUNED --similarity stsb.jsonl --target cola.jsonl       of an encoder
  holdfast measure BASE ADAPTER --tasks piqa,arc_easy --limit 500

BASE and TUNED are directories (or hub names) of transformers models; TUNED may be a LoRA adapter,
either a GGUF file. The columns of --data and --target (JSON lines, CSV, Parquet) tell their kind:
question + choices + label (multiple choice), prompt + completion, text or image + label, or text.
Instead of a file: a directory of datasets.save_to_disk (DIR:SPLIT), a folder of images in a folder
for each class, or a dataset of the hub (NAME:SPLIT or NAME:CONFIGURATION:SPLIT).
"""


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand."""
    parser = Parser(
        "holdfast measure",
        description="Compare a tuned model with the one it was tuned from: how far its weights and "
        "its predictions moved, and what it scores before and after.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", metavar="BASE", help="the pretrained model")
    parser.add_argument("tuned", metavar="TUNED", help="the fine-tuned model or LoRA adapter")
    add_measuring_options(parser)
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read .bin files too, as plain tensors"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write report.json, report.md and report.html there"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    run(parser.parse_args(arguments))


def add_measuring_options(parser: Any) -> None:
    """Add what to test and how to run the models, to a parser or a group of one."""
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="FILE", help="texts to take the perplexity of"
    )
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="FILE", help="rows to be tested on: retained tasks"
    )
    parser.add_argument(
        "--target", nargs="+", default=[], metavar="FILE",
        help="what it was tuned for: tested, and the divergence is taken on its inputs",
    )  # fmt: skip
    parser.add_argument(
        "--similarity", nargs="+", default=[], metavar="FILE",
        help="two texts and a number a row: does an encoder find alike what people do?",
    )  # fmt: skip
    parser.add_argument(
        "--tasks", type=names, default=[], metavar="A,B", help="lm-evaluation-harness tasks"
    )
    parser.add_argument(
        "--include-path", metavar="DIR", help="where YAML files of further harness tasks lie"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="rows of each file and task at most")
    parser.add_argument(
        "--context-free", type=int, default=64, metavar="N",
        help="texts that the base writes for the data-free divergence; 0 for none (default 64)",
    )  # fmt: skip
    parser.add_argument("--max-length", type=int, default=1024, metavar="N", help="tokens at most")
    parser.add_argument("--device", help="such as cuda:1; default: an accelerator if there is one")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"],
        help="default: float32 on the CPU, the checkpoint's elsewhere",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the texts that the base writes")
    parser.add_argument("--no-drift", action="store_true", help="do not compare the weights")


def measuring_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same for :func:`holdfast.measure`, and whether to show how far it is."""
    from holdfast.evaluate.kl import ContextFreeKL
    from holdfast.io.models import Loader

    texts = arguments.context_free
    free = ContextFreeKL(texts, seed=arguments.seed) if texts > 0 else texts
    return {
        "text": arguments.text,
        "data": arguments.data,
        "target": arguments.target,
        "similarity": arguments.similarity,
        "tasks": arguments.tasks,
        "include_path": arguments.include_path,
        "drift": not arguments.no_drift,
        "context_free": free,
        "limit": arguments.limit,
        "loader": Loader(
            device=arguments.device,
            dtype=None if arguments.dtype is None else getattr(torch, arguments.dtype),
            max_length=arguments.max_length,
            allow_pickle=arguments.allow_pickle,
        ),
        "progress": sys.stderr.isatty(),
    }


def names(text: str) -> list[str]:
    """A list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def check_out(folder: Path) -> None:
    """Before the work, not after it: the place is good, and what draws the page is there."""
    check_folder(folder)
    if importlib.util.find_spec("plotly") is None:
        raise ImportError('the page is drawn by plotly: pip install "holdfast[eval]"')


def run(arguments: argparse.Namespace) -> None:
    """Measure, print, write."""
    from holdfast.evaluate.measure import measure

    if arguments.out is not None:
        check_out(arguments.out)
    report = measure(arguments.base, arguments.tuned, **measuring_options(arguments))
    if arguments.json:
        print(report.to_json())
    else:
        report.to_terminal()
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for ending in ("json", "md", "html"):
            report.save(arguments.out / f"report.{ending}")
        print(f"The report: {arguments.out / 'report.html'}", file=sys.stderr)
