"""``holdfast score``: what the pretrained model finds easy, and the weights that follow."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from holdfast.cli._config import make_parser, parsed

EXAMPLES = """
  holdfast score --model DIR --data train.jsonl
  holdfast score --model DIR --data train.jsonl --out scores
  holdfast score --model DIR --data train.jsonl --weighted weighted.jsonl --normalize

The loss of every sample under the model as it is, f, and FLOW's weight of it, exp(−f/τ): samples
that the model finds hard would move it far, and weigh little. Give the pretrained model, not a
tuned one. --out has the losses and weights for a program, --weighted the rows with one more column
for any trainer that weighs samples; `holdfast finetune --recipe flow` does all this by itself.
"""


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand."""
    parser = make_parser("score", "Score a dataset, and weigh its samples by FLOW.", EXAMPLES)
    add = parser.add_argument
    add("--model", type=str, required=True, help="a directory or hub name: the pretrained model")
    add("--data", type=str, required=True, help="the file to score: JSON lines, CSV, Parquet, text")
    add(
        "--tau", type=float | Literal["median"], default="median",
        help="the temperature: median of the losses, or a number; a larger one weighs more alike",
    )  # fmt: skip
    add(
        "--level", type=Literal["sequence", "token"], default="sequence",
        help="weigh whole samples, or each target token by its own loss",
    )  # fmt: skip
    add("--normalize", action="store_true", help="scale the weights to a mean of 1")
    add("--max_length", type=int, default=512, help="tokens of a sample at most, as in training")
    add("--batch_size", type=int, default=16, help="samples at a time")
    add("--out", type=str, help="the directory for scores.safetensors, scores.json, weights.jsonl")
    add("--weighted", type=str, help="the file for the rows with a weight: JSON lines")
    add("--json", action="store_true", help="print the summary as JSON")
    run(parsed(parser, arguments))


def run(chosen: Any) -> None:
    """Score, weigh, write, print."""
    import torch

    from holdfast import Flow, score
    from holdfast._torch.checks import whole
    from holdfast.cli._scored import Scored
    from holdfast.io.models import Loader
    from holdfast.io.training_data import TrainingData
    from holdfast.report.text import to_terminal

    flow = Flow(tau=chosen.tau, level=chosen.level, normalize=chosen.normalize)
    whole("max_length", chosen.max_length, 2), whole("batch_size", chosen.batch_size, 1)
    check_places(chosen)
    loader = Loader(max_length=chosen.max_length, dtype=torch.float32)  # as finetune does
    task = TrainingData.open(chosen.model, chosen.data, loader)
    if task.head is not None:
        raise ValueError(
            f"{chosen.model} has no head for the labels of {chosen.data}, and losses under a new "
            "one mean nothing: fit it first, holdfast finetune --recipe linear-probe"
        )
    model, _ = task.load()
    samples, rows = task.samples(model), task.rows
    owners = owners_of(task, model, samples)
    if chosen.weighted:
        check_rows(rows, owners, chosen)
    tokens = chosen.level == "token"
    scores = score(
        model, samples, tokens=tokens, batch_size=chosen.batch_size, progress=sys.stderr.isatty()
    )
    weights: Any = flow.weigh(scores)
    found = Scored(
        model=chosen.model, data=chosen.data, rows=len(rows), tau=tau_of(flow, scores),
        losses=scores.losses.tolist(), targets=scores.counts.tolist(),
        weights=[w.tolist() for w in (scores.split(weights) if tokens else weights)],
        owners=owners, texts=texts_of(task, samples),
    )  # fmt: skip
    if chosen.out:
        scores.save(chosen.out)
        write_lines(Path(chosen.out) / "weights.jsonl", [asdict(s) for s in found.samples()])
    if chosen.weighted:
        by_row = dict(zip(owners or (), found.weights, strict=True))
        weighted = [{**row, "weight": by_row.get(i, 0.0)} for i, row in enumerate(rows)]
        write_lines(Path(chosen.weighted), weighted)
    if chosen.json:
        print(json.dumps(found.summary(), indent=1, ensure_ascii=False))
    else:
        to_terminal(found.document())
    for place in filter(None, (chosen.out, chosen.weighted)):
        print(f"Written: {place}", file=sys.stderr)


def check_places(chosen: Any) -> None:
    """Before the work: what is asked for can be written, and harms nothing."""
    from holdfast.io.files import check_folder

    if chosen.out:
        check_folder(Path(chosen.out))
    if not chosen.weighted:
        return
    file = Path(chosen.weighted)
    if chosen.level == "token":
        raise ValueError("--weighted has one weight a row: leave --level token, or take --out")
    if file.suffix != ".jsonl":
        raise ValueError(f"--weighted writes JSON lines: the name must end in .jsonl, got {file}")
    if file.is_dir():
        raise ValueError(f"--weighted must be a file, and {file} is a directory")
    if file.exists() and Path(chosen.data).exists() and file.samefile(chosen.data):
        raise ValueError(f"--weighted would write over the data, {file}: give another name")
    check_folder(file.absolute().parent, "--weighted")


def owners_of(task: Any, model: Any, samples: Sequence[Any]) -> list[int] | None:
    """The row that each sample is of: not all give one, and some give many; None if unknown."""
    from holdfast.io.encoding import training_samples

    loaded = task.loader.ready(model, task.tokenizer)
    if loaded.kind != "causal_lm":
        return list(range(len(task.rows)))
    owners, again = [], []
    for i, row in enumerate(task.rows):
        try:
            own = list(training_samples(loaded, [row], task.data))
        except ValueError:  # all rows together were fine: this one has nothing to learn
            continue
        owners += [i] * len(own)
        again += own
    return owners if again == list(samples) else None


def check_rows(
    rows: Sequence[Mapping[str, Any]], owners: Sequence[int] | None, chosen: Any
) -> None:
    """That a weight a row can be told and written, before the work."""
    if owners is None:
        raise ValueError("which row a sample is of cannot be told: take --out, not --weighted")
    twice = next((i for i, j in itertools.pairwise(owners) if i == j), None)
    if twice is not None:
        raise ValueError(
            f"--weighted has one weight a row, and row {twice + 1} of {chosen.data} is cut into "
            f"{owners.count(twice)} samples of at most {chosen.max_length} tokens: take --out, or "
            "a larger --max_length"
        )
    if "weight" in rows[0]:
        raise ValueError(f"{chosen.data} has a column 'weight' already: rename it")
    for i, row in enumerate(rows):
        try:
            json.dumps(row)
        except TypeError as error:
            raise ValueError(f"row {i + 1} of {chosen.data} cannot be JSON: {error}") from None


def tau_of(flow: Any, scores: Any) -> float:
    """The temperature in figures."""
    if not isinstance(flow.tau, str):
        return float(flow.tau)
    losses: list[float] = scores.losses[scores.counts > 0].tolist()
    if flow.level == "token":
        losses = [loss for some in scores.token_losses for loss in some.tolist()]
    return statistics.median(losses)


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """JSON lines, all or none."""
    from holdfast.io.files import write_whole

    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8", newline="\n"))


def texts_of(task: Any, samples: Sequence[Any]) -> list[str]:
    """How each sample begins, for people; of an image its file."""
    if not hasattr(task.tokenizer, "decode"):
        return [str(row.get("image", "")) for row in task.rows]
    begun = (list(sample["input_ids"])[:60] for sample in samples)
    return [" ".join(task.tokenizer.decode(b, skip_special_tokens=True).split()) for b in begun]
