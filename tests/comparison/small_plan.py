"""A plan on the embedded model that takes seconds, and the comparable part of its results."""

import gzip
import json
from pathlib import Path

from holdfast import builtin
from holdfast.comparison.plan import Measuring, Plan, Training


def make_plan(folder, *, recipes=("standard", "recadam+wise-ft"), seeds=(0, 1), updates=6):
    """Write a few rows and one short text to the folder, and return a plan on them."""
    folder = Path(folder)
    for name, source in (("train", builtin.TRAIN), ("dev", builtin.DEV)):
        with gzip.open(source, "rt", encoding="utf-8") as file:
            lines = [next(file) for _ in range(12 if name == "train" else 4)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    with gzip.open(builtin.RETAINED["prose"], "rt", encoding="utf-8") as file:
        (folder / "prose.txt").write_text(file.read(2000), encoding="utf-8")
    return Plan(
        model=str(builtin.MODEL),
        data=str(folder / "train.jsonl"),
        target=str(folder / "dev.jsonl"),
        measuring=Measuring(text=(str(folder / "prose.txt"),), context_free=2, max_length=128),
        recipes=recipes,
        seeds=seeds,
        training=Training(
            lr=1e-3, max_updates=updates, batch_size=2, max_length=64, save_seconds=0.2
        ),
    )


def settings_of(plan):
    """The plan as options of ``holdfast compare``."""
    told = {
        "model": plan.model, "data": plan.data, "target": plan.target,
        "context-free": plan.measuring.context_free, "test-max-length": plan.measuring.max_length,
        "lr": plan.training.lr, "max-updates": plan.training.max_updates,
        "batch-size": plan.training.batch_size, "max-length": plan.training.max_length,
        "save-seconds": plan.training.save_seconds,
    }  # fmt: skip
    lists = {"text": plan.measuring.text, "recipes": plan.recipes, "seeds": plan.seeds}
    some = [word for name, values in lists.items() for word in (f"--{name}", *map(str, values))]
    return [*some, *(f"--{name}={value}" for name, value in told.items())]


def what_must_agree(text):
    """A results.json without its costs, and whether a training was shared: these differ."""
    results = json.loads(text)
    for run in results["runs"]:
        del run["seconds"], run["peak_memory"], run["at_a_time"], run["shared"]
    return results
