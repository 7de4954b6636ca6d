"""Compute the loss of every sample under the pretrained model, and its FLOW weight.

examples:
  holdfast score --model DIR --data train.jsonl --out scores
  holdfast score --model DIR --data train.jsonl --weighted weighted.jsonl --normalize

The weight of a sample with loss f is exp(−f/τ), so that samples that are hard for the model count
less. Give the pretrained model, not a tuned one; a new head for labels is fitted first. --out
writes losses and weights, --weighted the rows with a column 'weight' for any trainer. `holdfast
finetune --recipe flow` scores by itself.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from holdfast import registry
from holdfast.cli._options import Parser, UsageError, add, add_settings, settings_from
from holdfast.hosts.job import Training
from holdfast.io.codec import to_json
from holdfast.io.encoding import TrainingData, training_samples
from holdfast.io.models import Loader
from holdfast.io.outputs import claim, claim_file
from holdfast.io.rows import Rows, names_of, open_rows
from holdfast.io.storage import Place
from holdfast.recipe import preset_that
from holdfast.report.printing import tell, tell_line
from holdfast.report.scored import Sample, Scored
from holdfast.report.text import to_terminal
from holdfast.run import Run
from holdfast.scoring.scorer import score

FILES = ("scores.safetensors", "scores.json", "weights.jsonl")


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, "--model MODEL --data DATA [options]", needed=("model", "data"))
    add(parser, "config", "print_config")
    add(
        parser.add_argument_group("model and data"),
        *("model", "data", "columns", "head", "trust_remote_code"),
    )
    scoring = parser.add_argument_group("scoring")
    add_settings(scoring, weighting())
    add_settings(scoring, Training, only=("max_length", "batch_size"), batch_size=None)
    add(scoring, "device")
    output = parser.add_argument_group("output")
    add(output, "out")
    weighted = "write the rows with a column 'weight' there"
    output.add_argument("--weighted", metavar="FILE.jsonl", help=weighted)
    add(output, "json")


def weighting() -> type[Any]:
    """Return the method that weights samples by their losses."""
    return next(e.cls for e in registry.methods() if getattr(e.cls, "weighs_samples", False))


def run(options: argparse.Namespace) -> None:
    method = settings_from(weighting(), options)
    training = settings_from(Training, options, batch_size=options.batch_size or 16)
    check_weighted(options)
    with claim(options.out, "score", inputs_of(options), files=FILES):
        score_rows(method, training, options)


def score_rows(method: Any, training: Training, options: argparse.Namespace) -> None:
    trust, length = options.trust_remote_code, training.max_length
    loader = Loader(  # as finetune does
        options.device, torch.float32, max_length=length, trust_remote_code=trust
    )
    task = TrainingData.open(
        options.model, options.data, loader, head=options.head, columns=options.columns
    )
    skeleton = loader.skeleton(options.model, task.head)
    owners, samples = training_samples(loader.ready(skeleton, task.tokenizer), task.rows, task.data)
    rows = open_rows(options.data) if options.columns else task.rows  # with their own names
    if options.weighted is not None:
        check_rows(rows, owners, task.data, options)
    tokens = options.level == "token"
    model, new = task.load()
    if task.head is not None:  # its losses would mean nothing
        tell_line(f"new head ({task.head}), fitted first: {', '.join(new)}", file=sys.stderr)
        fitted = Run(preset_that("fits_head"), model, samples, lr=0.0, new=new)
        model = fitted.model
    scores = score(model, samples, tokens=tokens, batch_size=options.batch_size)
    weights: Any = method.weigh(scores)
    weights = [w.tolist() for w in (scores.split(weights) if tokens else weights)]
    figures = zip(owners, scores.losses.tolist(), weights, scores.counts.tolist(), strict=True)
    found = [
        Sample(i, row, loss if count else None, weight, count)
        for i, (row, loss, weight, count) in enumerate(figures)
    ]
    tau, texts = method.temperature(scores), texts_of(task, samples)
    scored = Scored(options.model, task.data, len(rows), tau, found, texts)
    if options.out is not None:
        scores.save(options.out)
        write_lines(Path(options.out) / "weights.jsonl", map(asdict, found))
    if options.weighted is not None:
        by_row = dict(zip(owners, weights, strict=True))
        weighted = ({**row, "weight": by_row.get(i, 0.0)} for i, row in enumerate(rows))
        write_lines(Path(options.weighted), weighted)
    if options.json:
        tell(to_json(scored.summary()))
    else:
        to_terminal(scored.document())
    for place in filter(None, (options.out, options.weighted)):
        tell_line(f"Written: {place}", file=sys.stderr)


def inputs_of(options: argparse.Namespace) -> list[str]:
    return [options.model, *names_of(options.data), *filter(None, [options.config])]


def check_weighted(options: argparse.Namespace) -> None:
    """Check before the work that the weighted rows can be written, and that they are no input."""
    if options.weighted is None:
        return
    if options.level == "token":
        raise UsageError("--weighted writes one weight per row: use --level sequence, or --out")
    if options.weighted and not options.weighted.endswith(".jsonl"):
        raise UsageError(f"--weighted must end in .jsonl, got {options.weighted}")
    claim_file(options.weighted, inputs_of(options), ours=is_weighted, option="--weighted")


def is_weighted(file: Path) -> bool:
    """Whether the rows of a file have a weight."""
    with open(file, "rb") as rows:
        first = rows.readline(1 << 20)
    try:
        return not first or "weight" in json.loads(first)
    except (ValueError, TypeError, RecursionError):
        return False


def check_rows(rows: Rows, owners: Sequence[int], name: str, options: argparse.Namespace) -> None:
    """Check before the work that every row can be written with one weight."""
    twice = next((i for i, j in itertools.pairwise(owners) if i == j), None)
    if twice is not None:
        raise ValueError(
            f"--weighted writes one weight per row, but row {twice + 1} of {name} is cut "
            f"into {owners.count(twice)} samples of at most {options.max_length} tokens: use --out,"
            " or a larger --max-length"
        )
    if "weight" in rows[0]:
        raise ValueError(f"{name} already has a column 'weight': rename it")
    for i, row in enumerate(rows):
        try:
            json.dumps(row)
        except TypeError as error:
            raise ValueError(f"row {i + 1} of {name} cannot be JSON: {error}") from None


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    Place.at(path).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def texts_of(task: TrainingData, samples: Sequence[Any]) -> list[str]:
    """Return the beginning of each sample, or the file of an image."""
    if not hasattr(task.tokenizer, "decode"):
        return [str(row.get("image", "")) for row in task.rows]
    begun = (list(sample["input_ids"])[:60] for sample in samples)
    return [" ".join(task.tokenizer.decode(b, skip_special_tokens=True).split()) for b in begun]
