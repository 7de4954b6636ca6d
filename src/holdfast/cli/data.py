"""Show what a model would learn from data: samples as it reads them, their lengths, unused columns.

examples:
  holdfast data train.jsonl --model DIR
  holdfast data shards/*.parquet --model DIR --max-length 1024
  holdfast data boolq.jsonl --model BERT --columns text1=question text2=passage label=answer
  holdfast data my/dataset:train --model DIR --json

Three samples are printed with the chat template and the special tokens of the model. The trained
part is highlighted: the assistant's turns, the completion, the text or the label. FILE and
--columns are those of `holdfast finetune --data`, which this command does not run; no weights are
loaded. Rows are read as conversations (messages, conversations), prompt and completion (also
instruction and output, question and answer), text, or text or image and label. --columns
NAME=COLUMN gives other columns one of these names.
"""

import argparse

from holdfast.cli._options import WHOLE, Parser, add, add_settings
from holdfast.evaluate.preview import preview
from holdfast.hosts.job import Training
from holdfast.io.codec import to_json
from holdfast.io.models import Loader
from holdfast.report.printing import tell


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, "FILE… --model MODEL [options]", needed=("model",))
    parser.add_argument("data", nargs="+", metavar="FILE", help="data, as for finetune --data")
    add(parser, "model", "columns", "head", "trust_remote_code")
    add_settings(parser, Training, only=("max_length",))
    parser.add_argument("--samples", type=WHOLE, default=3, metavar="N", help="samples to print")
    add(parser, "json")


def run(options: argparse.Namespace) -> None:
    loader = Loader(max_length=options.max_length, trust_remote_code=options.trust_remote_code)
    found = preview(
        options.model, options.data, columns=options.columns, head=options.head,
        samples=options.samples, loader=loader,
    )  # fmt: skip
    if options.json:
        tell(to_json(found))
    else:
        found.to_terminal()
