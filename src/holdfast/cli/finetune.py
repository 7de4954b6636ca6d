"""``holdfast finetune``: train a model by a recipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.cli._config import make_parser, parsed

EXAMPLES = """
  holdfast finetune --model DIR --data train.jsonl --recipe recadam+flow --out tuned
  holdfast finetune --model DIR --data train.jsonl --recipe my-recipe.yaml --training.lr 1e-4
  holdfast finetune --config tuned/config.yaml           # once more, or on where it was stopped

Rows are conversations (messages), prompt and completion, text, or text and label: JSON lines, CSV,
Parquet. The result is a transformers model (of LoRA: its adapter): `holdfast measure` says what it
cost, `holdfast compare` which recipe to take.
"""


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand."""
    from holdfast.compare.plan import Training

    parser = make_parser("finetune", "Fine-tune a model by a recipe.", EXAMPLES)
    parser.add_argument("--model", type=str, required=True, help="a directory or hub name")
    parser.add_argument("--data", type=str, required=True, help="the file to learn from")
    parser.add_argument(
        "--recipe", type=str, default="standard", help="names joined by +, or a YAML file"
    )
    parser.add_argument("--out", type=str, required=True, help="the directory to write")
    parser.add_argument("--new", type=str, default="", help="a part without pretrained weights")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_class_arguments(Training, "training")
    chosen = parsed(parser, arguments)
    run(chosen, parser.instantiate(chosen).training, parser.dump(chosen))


def run(chosen: Any, training: Any, config: str) -> None:
    """Train, and save the model."""
    from holdfast._files import write_whole
    from holdfast.compare.plan import read_recipe
    from holdfast.compare.task import load_rows, samples_of
    from holdfast.compare.train import train
    from holdfast.forgetting.models import Loader

    out = Path(chosen.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a directory, and {out} is a file")
    if (out / "config.json").exists() or (out / "adapter_config.json").exists():
        raise ValueError(f"{out} holds a model already: give another --out")
    name, recipe = read_recipe(chosen.recipe)
    rows = load_rows(chosen.data)
    loader = Loader(max_length=training.max_length)
    model = loader.load(chosen.model)
    tokenizer = loader.tokenizer_of(chosen.model)
    samples = samples_of(loader.ready(model, tokenizer), rows, chosen.data)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "config.yaml", lambda path: path.write_text(config))
    print(f"{recipe.describe()}\n{len(samples)} samples", file=sys.stderr)
    begin = time.monotonic()

    def tell(_: str, done: int, total: int) -> None:
        left = (time.monotonic() - begin) / max(1, done) * (total - done)
        print(f"\r{done}/{total} updates, about {left:.0f} s left   ", end="", file=sys.stderr)

    new = [part for part in chosen.new.split(",") if part]
    tuned, history = train(
        model, recipe, samples, training, out, new=new, seed=chosen.seed, progress=tell
    )
    saved: Any = tuned
    saved.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    (out / "run.pt").unlink(missing_ok=True)
    last = [row["loss"] for row in history if "loss" in row]
    print(file=sys.stderr)
    print(f"{name}: loss {last[0]:.3f} → {last[-1]:.3f}; the model is in {out}")
