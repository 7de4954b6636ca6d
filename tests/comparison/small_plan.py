"""A plan on the embedded model that takes seconds, and what its results have in common."""

import gzip
import json
from pathlib import Path

from holdfast.comparison.default import paths
from holdfast.comparison.plan import Measuring, Plan, Training


def make_plan(folder, *, recipes=("standard", "recadam+wise-ft"), seeds=(0, 1), updates=6):
    """Of a few rows and one short text, which are written to the folder."""
    folder = Path(folder)
    here = paths()
    for name, source in (("train", here.train), ("dev", here.dev)):
        with gzip.open(source, "rt", encoding="utf-8") as file:
            lines = [next(file) for _ in range(12 if name == "train" else 4)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    with gzip.open(here.retained["prose"], "rt", encoding="utf-8") as file:
        (folder / "prose.txt").write_text(file.read(2000), encoding="utf-8")
    return Plan(
        model=str(here.model),
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
    """The plan as settings of ``holdfast compare``."""
    told = {
        "model": plan.model, "data": plan.data, "target": plan.target,
        "measuring.text": json.dumps(plan.measuring.text),
        "measuring.context_free": plan.measuring.context_free,
        "measuring.max_length": plan.measuring.max_length,
        "recipes": json.dumps(plan.recipes), "seeds": json.dumps(plan.seeds),
        "training.lr": plan.training.lr, "training.max_updates": plan.training.max_updates,
        "training.batch_size": plan.training.batch_size,
        "training.max_length": plan.training.max_length,
        "training.save_seconds": plan.training.save_seconds,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in told.items()]


def what_must_agree(text):
    """A results.json without what no two runs share: how long it took, and in how much memory."""
    results = json.loads(text)
    for run in results["runs"]:
        del run["seconds"], run["peak_memory"]
    return results
