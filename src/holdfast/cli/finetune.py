"""``holdfast finetune``: train a model by a recipe."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.cli._config import make_parser, parsed
from holdfast.cli._progress import Progress

EXAMPLES = """
  holdfast finetune --model DIR --data train.jsonl --recipe recadam+flow --out tuned
  holdfast finetune --model DIR --data train.jsonl --recipe my-recipe.yaml --training.lr 1e-4
  holdfast finetune --model MiniLM --data cola.jsonl --recipe lp-ft+flow --out tuned
  holdfast finetune --model ViT --data flowers/train --recipe recadam --out tuned
  holdfast finetune --config tuned/config.yaml           # goes on where it was stopped

Data is a file of rows (JSON lines, JSON, CSV, TSV, Parquet) or text, a directory written by
datasets.save_to_disk (DIR:SPLIT), a folder of images in a folder for each class, or a dataset of
the hub (NAME, NAME:SPLIT or NAME:CONFIGURATION:SPLIT). Rows are conversations (messages), prompt
and completion, text, or text or image and label. Labels that the model has no head for give it a
new one: classes, or for decimal numbers a regression. The result is a transformers model (of LoRA:
its adapter): `holdfast measure` says what it cost, `holdfast compare` which recipe to take.
"""

#: What only a stopped run needs; the first says that it was not finished.
LEFT = ("run.pt", "history.jsonl", "seconds")


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand."""
    from holdfast.hosts.job import Training

    parser = make_parser("finetune", "Fine-tune a model by a recipe.", EXAMPLES)
    parser.add_argument("--model", type=str, required=True, help="a directory or hub name")
    parser.add_argument("--data", type=str, required=True, help="what to learn from")
    parser.add_argument(
        "--recipe", type=str, default="standard", help="names joined by +, or a YAML file"
    )
    parser.add_argument("--out", type=str, required=True, help="the directory to write")
    parser.add_argument(
        "--head", type=str, default="auto",
        help="a new one: classification or regression; none: as the model is; auto: where it has "
        "none for the labels (a causal language model learns the texts)",
    )  # fmt: skip
    parser.add_argument(
        "--new", type=str, default="", help="parts without pretrained weights: classifier,pooler"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--json", action="store_true", help="print what came of it as JSON")
    parser.add_class_arguments(Training, "training")
    chosen = parsed(parser, arguments)
    run(chosen, parser.instantiate(chosen).training, parser.dump(chosen))


def run(chosen: Any, training: Any, config: str) -> None:
    """Train, and save the model."""
    from holdfast.io.files import check_folder, locked

    out = Path(chosen.out)
    check_folder(out)
    new_folder = not out.exists()
    with locked(out):
        try:
            _run(out, chosen, training, config)
        except BaseException:
            (out / ".lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                if new_folder:
                    out.rmdir()  # if nothing has come of it
            raise
        (out / ".lock").unlink(missing_ok=True)


def _run(out: Path, chosen: Any, training: Any, config: str) -> None:
    from holdfast.evaluate.watch import watch_distance
    from holdfast.hosts.job import train
    from holdfast.io.files import write_whole
    from holdfast.io.models import Loader
    from holdfast.io.training_data import TrainingData
    from holdfast.recipe import read_recipe

    check_unfinished(out, config)
    name, recipe = read_recipe(chosen.recipe)
    given = [part for part in chosen.new.split(",") if part]
    loader = Loader(max_length=training.max_length)
    task = TrainingData.open(chosen.model, chosen.data, loader, head=chosen.head, new=given)
    model, new = task.load()
    recipe.check_head(new)
    samples = task.samples(model)
    out.mkdir(parents=True, exist_ok=True)
    if (out / "config.yaml").exists() and not (out / LEFT[0]).exists():
        for left in LEFT:  # of a run that was stopped before it had anything to go on from
            (out / left).unlink(missing_ok=True)
    write_whole(out / "config.yaml", lambda path: path.write_text(config))
    print(recipe.describe(), file=sys.stderr)
    told = f", and a new head ({task.head}): {', '.join(new)}" if task.head else ""
    print(f"{len(samples)} samples{told}", file=sys.stderr)
    if recipe.update.lr is not None and recipe.update.lr != training.lr:
        print(f"the recipe's own learning rate is used: {recipe.update.lr:g}", file=sys.stderr)
    with Progress(1, "training") as progress:
        tuned, history = train(
            model, recipe, samples, training, out, new=new, seed=chosen.seed, watch=watch_distance,
            progress=lambda doing, done, total: progress.update(name, done, total, doing),
        )  # fmt: skip
    save(tuned, task, out)
    write_whole(out / "training.json", lambda path: path.write_text(json.dumps(history, indent=1)))
    for left in reversed(LEFT):
        (out / left).unlink(missing_ok=True)
    losses = [row["loss"] for row in history if "loss" in row]
    if chosen.json:
        about = {"recipe": name, "out": str(out), "updates": history[-1]["update"]}
        print(json.dumps({**about, "loss": {"first": losses[0], "last": losses[-1]}}))
    else:
        print(
            f"{name}: loss {losses[0]:.3f} (first updates) → {losses[-1]:.3f} (last); the model is "
            f"in {out}: `holdfast measure {chosen.model} {out}` says what it cost"
        )


def check_unfinished(out: Path, config: str) -> None:
    """Refuse a place that holds a model, or an unfinished run with other settings."""
    import yaml

    try:
        before = yaml.safe_load((out / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        before = None
    ours = isinstance(before, dict) and {"recipe", "training"} <= before.keys()
    if not ours or (out / "training.json").exists():  # which is written last
        if (out / "config.json").exists() or (out / "adapter_config.json").exists():
            raise ValueError(f"{out} holds a model already: give another --out")
        return
    if not (out / LEFT[0]).exists():
        return  # there is nothing to go on from
    saved, now = _flat(before), _flat(yaml.safe_load(config))
    for name in sorted((saved.keys() | now.keys()) - {"out", "config", "json"}):
        if saved.get(name) != now.get(name):
            raise ValueError(
                f"{out} holds an unfinished run with {name} {saved.get(name)}, not "
                f"{now.get(name)}: go on with `holdfast finetune --config {out}/config.yaml`, or "
                "give another --out"
            )


def save(tuned: Any, task: Any, out: Path) -> None:
    """The model, or its adapter, and what reads its inputs."""
    tuned.save_pretrained(out)
    if task.head is not None and hasattr(tuned, "get_base_model"):
        # An adapter's files say nothing of the head that its base lacks.
        base = tuned.get_base_model()
        base.config.architectures = [type(base).__name__]
        base.config.save_pretrained(out)
    if task.tokenizer is not None:
        task.tokenizer.save_pretrained(out)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names.

    >>> _flat({"model": "m", "training": {"lr": 0.1}})
    {'model': 'm', 'training.lr': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
