"""Show texts sampled from a language model, as self-replay rehearses them.

examples:
  holdfast draw --model DIR
  holdfast draw --model DIR --texts 200 --out drawn

The texts are the first ones of `holdfast finetune --recipe self-replay` with the default length.
With --seed, other texts are drawn. They may contain text that the model has memorized: the output
says where they are stored, and deleting that directory removes them. --out writes them to
texts.jsonl.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from holdfast._torch.checks import whole_number
from holdfast.cli._options import WHOLE, Parser, add
from holdfast.io.models import Loader
from holdfast.io.outputs import claim
from holdfast.io.storage import Place
from holdfast.report.printing import tell, tell_line
from holdfast.report.words import plain
from holdfast.scoring.pool import draw_pool
from holdfast.scoring.starts import default_starts, describe_starts, text_tokenizer


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, "--model MODEL [options]", needed=("model",))
    add(parser, "config", "print_config")
    drawing = parser.add_argument_group("model and texts")
    add(drawing, "model", "trust_remote_code")
    drawing.add_argument("--texts", type=WHOLE, default=8, metavar="N", help="number of texts")
    add(drawing, "seed", "device")
    add(parser.add_argument_group("output"), "out", "json")


def run(options: argparse.Namespace) -> None:
    whole_number("--texts", options.texts, 1)
    with claim(options.out, "draw", [options.model], files=["texts.jsonl"]):
        draw(options)


def draw(options: argparse.Namespace) -> None:
    trust = options.trust_remote_code
    loader = Loader(options.device, torch.float32, trust_remote_code=trust)  # as finetune does
    with loader.open(options.model) as loaded:
        tokenizer = text_tokenizer(loaded.tokenizer)
        starts = default_starts(loaded.model, tokenizer)
        pool = draw_pool(loaded.model, options.texts, starts=starts, top=None, seed=options.seed)
    texts = [tokens if tokenizer is None else tokenizer.decode(tokens) for tokens in pool.texts()]
    if options.json:
        tell(json.dumps({"texts": texts, "stored": pool.path and str(pool.path)}, indent=1))
    else:
        for number, text in enumerate(texts, 1):
            tell(f"{number:>3}  {plain(str(text))}")
    tell_line(describe_starts(starts, tokenizer), file=sys.stderr)
    if options.out is not None:
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        Place.at(Path(options.out) / "texts.jsonl").write_text("".join(lines))
        tell_line(f"Written: {options.out}", file=sys.stderr)
    if pool.path is not None:
        tell_line(
            f"The texts are stored in {pool.path}; they may contain memorized text. Delete the "
            f"directory to remove them, or {pool.path.parent} to remove the texts of all models",
            file=sys.stderr,
        )
