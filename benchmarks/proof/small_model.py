"""Self-replay on a base that writes poor texts: the small model that comes with holdfast.

It has 2 million parameters, was pretrained on prose, verse and code, and learns GSM8K in one epoch.
One setting of self-replay is changed at a time; plain fine-tuning runs at multiples of the learning
rate that ``holdfast`` has. Texts at another temperature, of fewer numbers or of an untrained model
are drawn first and passed as a file; "texts" is the control, drawn as by default. About 50 minutes
on two cores; a stopped command goes on where it was.

    cd benchmarks/proof
    python small_model.py --out RUNS --json results/small_model.json
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _common import write_results
from _texts import write_texts
from comparisons import slim
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast import AdamWUpdate, Measuring, Plan, Recipe, SelfReplay, Training, compare
from holdfast.builtin import DEV, MODEL, RETAINED, TRAIN
from holdfast.methods.auto import default_lr
from holdfast.stages import TrainingSize

TEXTS = 512
RATES = (0.25, 0.5, 1.0, 2.0, 4.0)
#: Files of texts: the temperature, their number, and whether the model that writes is untrained.
DRAWN = {
    "texts": (1.0, TEXTS, False), "texts-cool": (0.7, TEXTS, False),
    "texts-hot": (1.3, TEXTS, False), "texts-64": (1.0, 64, False),
    "texts-untrained": (1.0, TEXTS, True),
}  # fmt: skip
CHANGED: dict[str, dict[str, Any]] = {
    "default": {},
    **{f"strength-{x:g}": {"strength": x} for x in (0.1, 0.3, 3.0, 10.0)},
    **{f"share-{x:g}": {"share": x} for x in (0.25, 1.0, 2.0)},
    **{f"length-{x}": {"length": x} for x in (32, 256)},
    **{f"top-{x or 'all'}": {"top": x} for x in (8, None)},
}


def recipes(folder: Path) -> dict[str, Recipe]:
    """All recipes, by name."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    samples = len(gzip.decompress(TRAIN.read_bytes()).splitlines())
    size = sum(weights.numel() for weights in model.parameters())
    rate = default_lr(size, size=TrainingSize(samples))
    found = {f"plain-x{x:g}": Recipe(update=AdamWUpdate(lr=x * rate)) for x in RATES}

    def replay(lr: float = rate, **changed: Any) -> Recipe:
        return Recipe(recall=SelfReplay(**changed), update=AdamWUpdate(lr=lr))

    found |= {name: replay(**changed) for name, changed in CHANGED.items()}
    found |= {f"rate-x{x:g}": replay(x * rate) for x in RATES if x != 1}
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for name, (temperature, count, untrained) in DRAWN.items():
        file = folder / f"{name}.jsonl"
        if not file.exists():
            torch.manual_seed(0)
            writer = type(model)(model.config).eval() if untrained else copy.deepcopy(model)
            write_texts(file, writer, tokenizer, count, temperature)
        found[name] = replay(texts=str(file))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where the runs go")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="names of recipes; default: all")
    parser.add_argument("--limit", type=int, default=250, help="rows of a test")
    parser.add_argument("--max-updates", type=int, help="for a trial")
    args = parser.parse_args()
    folder = args.out / "recipes"
    folder.mkdir(parents=True, exist_ok=True)
    named = recipes(folder)
    files = {name: folder / f"{name}.yaml" for name in named if name in (args.only or named)}
    for name, file in files.items():
        file.write_text(named[name].to_yaml(), "utf-8")
    plan = Plan(
        model=str(MODEL), data=str(TRAIN), target=str(DEV), seeds=tuple(args.seeds),
        recipes=tuple(map(str, files.values())),
        measuring=Measuring(
            text=tuple(map(str, RETAINED.values())), limit=args.limit, context_free=8,
            max_length=256,
        ),
        training=Training(lr=None, batch_size=8, max_length=176, max_updates=args.max_updates),
    )  # fmt: skip
    results = compare(plan, args.out / "runs", jobs=2)
    protocol = {"drawn": DRAWN, "changed": CHANGED, "rates": RATES}
    write_results(args.json, torch.device("cpu"), protocol, **slim(json.loads(results.to_json())))


if __name__ == "__main__":
    main()
