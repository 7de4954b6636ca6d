"""A sentence encoder learns a task: ``holdfast`` at its defaults against everything else.

Settings, opponents, seeds and measures are in PROTOCOL.md. The model is MiniLM-L6, the targets are
RTE, SST-2, CoLA and MRPC, and zero-shot STS-B is retained.

    python benchmarks/proof/sentence_encoders.py --model MINILM --data DATA --runs RUNS
    python benchmarks/proof/sentence_encoders.py … --stage more     # further seeds
    python benchmarks/proof/sentence_encoders.py --runs RUNS --only rte- \\
        --collect benchmarks/proof/results/minilm_rte.json

DATA holds glue/*.jsonl.gz. Processes that are started side by side with the same RUNS share the
work. A record has the outcomes of single samples at α = 1: ``target_report`` is a bit per row of
dev, whether the prediction is right, and ``stsb`` the cosine of each pair. The labels are in the
record ``pretrained``.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))

import _jobs
import _stages
import encoders
import torch
from _glue import Data, score
from _measures import RATES_OF_OURS, TIMES
from _samples import PARTS, pack, pack_numbers
from _stages import HOLDFAST
from encoders import BATCH, MOST_ROWS, UPDATES, Plan, spearman
from torch import nn

from holdfast import L2SP, Flow, LoRA, MoFOUpdate, RecAdamUpdate, Recipe, WiseFT

TARGETS = ("rte", "sst2", "cola", "mrpc")
#: Of guessing. None: the share of the more frequent class.
CHANCE: dict[str, float | None] = {"rte": 0.5, "sst2": 0.5, "cola": 0.0, "mrpc": None}
ALPHAS = (0.25, 0.5, 0.75)
RATES, PENALTY_RATES, LORA_RATES = (
    (1e-5, 2e-5, 5e-5, 1e-4, 2e-4), (5e-5, 1e-4), (2e-4, 5e-4, 1e-3, 2e-3),
)  # fmt: skip
#: The rows of the protocol: a recipe and its learning rates.
ROWS: dict[str, tuple[Recipe, tuple[float, ...]]] = {
    "plain": (Recipe(), RATES),
    "l2-sp": (Recipe(penalties=(L2SP(),)), PENALTY_RATES),
    "recadam": (Recipe(update=RecAdamUpdate()), PENALTY_RATES),
    "flow": (Recipe(objective=Flow()), PENALTY_RATES),
    "mofo": (Recipe(update=MoFOUpdate()), PENALTY_RATES),
    "lora": (Recipe(trainable=LoRA(r=16)), LORA_RATES),
}


class Lab(encoders.Lab):
    """The pretrained model, the targets, and the pairs of STS-B."""

    def stages(self, target: str) -> _stages.Stages:
        """All runs of a target."""
        make = functools.partial(functools.partial, self.record, target)
        plans = {"holdfast": make("holdfast", "holdfast", Plan(HOLDFAST, None))}
        for family, (recipe, rates) in ROWS.items():
            for lr in rates:
                name = f"{family}-{lr:g}"
                plans[name] = make(family, name, Plan(recipe, lr))
        for times in TIMES:
            name = f"{RATES_OF_OURS}-x{times:g}"
            plans[name] = make(RATES_OF_OURS, name, Plan(HOLDFAST, None, times))
        once = {"pretrained": functools.partial(self.base_record, target)}
        return _stages.Stages(target, once, plans)

    def base_record(self, target: str) -> _jobs.Record:
        """The pretrained model, the labels of all samples, and the figures of guessing."""
        model: Any = self.model(2, 0)
        labels = self.labels(target)
        guess, chance = CHANCE[target], {"stsb": 0.0}
        for part, rows in PARTS.items():
            share = float(labels[rows].mean())
            chance[f"target_{part}"] = round(max(share, 1 - share) if guess is None else guess, 6)
        counts = {part: len(labels[rows]) for part, rows in PARTS.items()}
        return {
            "plan": "pretrained", "task": target, "metric": self.task(target).metric,
            "chance": chance, "rows": counts | {"stsb": len(self.pairs.labels)},
            "labels": {
                "target_report": pack(labels[PARTS["report"]]),
                "stsb": pack_numbers(self.pairs.labels, 3),
            },
            "points": {"base": self.retained(model.eval(), whole=True)},
        }  # fmt: skip

    def record(self, target: str, family: str, name: str, plan: Plan, seed: int) -> _jobs.Record:
        """Train by a plan, and test the model; a plain one also merged with its base."""
        data = self.task(target)
        model, theta, about = self.trained(target, plan, seed)
        points = {"tuned": self.point(data, model, whole=True)}
        if family == "plain":
            test = functools.partial(self.point, data, whole=False)
            merged = WiseFT().sweep(model, theta, ALPHAS, test)
            points |= {f"wise-ft-{alpha:g}": point for alpha, point in merged.items()}
        return {
            "plan": name, "family": family, "task": target, "seed": seed,
            "updates": self.args.updates or UPDATES[target], "train_rows": len(data.train), **about,
            "points": points,
        }  # fmt: skip

    def point(self, data: Data, model: Any, *, whole: bool) -> _jobs.Record:
        """The target on both parts of dev, and what is retained; if ``whole``, every sample."""
        said, labels = data.predictions(model), data.splits["dev"]["labels"].cpu().numpy()
        found: _jobs.Record = {
            f"target_{part}": round(score(data.metric, said[rows], labels[rows]), 6)
            for part, rows in PARTS.items()
        }
        found |= self.retained(model, whole=whole)
        if whole:
            right = (said.argmax(1) == labels)[PARTS["report"]]
            found["samples"] = {"target_report": pack(right), **found["samples"]}
        return found

    def retained(self, model: Any, *, whole: bool) -> _jobs.Record:
        """Spearman's ρ of STS-B by the cosine of mean-pooled states; if ``whole``, the cosines."""
        encoder: nn.Module = model.bert
        cosines = self.pairs.cosines(encoder)["kept"]
        found: _jobs.Record = {"stsb": round(spearman(cosines, self.pairs.labels), 6)}
        return found | ({"samples": {"stsb": pack_numbers(cosines)}} if whole else {})

    def labels(self, target: str) -> Any:
        return self.task(target).splits["dev"]["labels"].cpu().numpy()


def main() -> None:
    parser = _jobs.Parser(__doc__)
    parser.add_input("--model")
    parser.add_input("--data")
    _stages.add_stage(parser)
    parser.add_argument("--updates", type=int, help="instead of 600 or 800, for a trial")
    parser.add_argument("--limit", type=int, help="rows of each set, for a trial")
    parser.set_defaults(choose=False)  # STS-B's dev split
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    lab = Lab(args)
    protocol = {
        "rules": "benchmarks/proof/PROTOCOL.md", "model": "all-MiniLM-L6-v2",
        "updates": {target: args.updates or UPDATES[target] for target in TARGETS},
        "batch_size": BATCH, "most_rows": args.limit or MOST_ROWS,
        "training": "float32 weights, bfloat16 autocast, dropout 0.1, 6 % warm-up, linear to 0, "
        "clipped to 1, weight decay 0.01",
        "target": "accuracy, of CoLA Matthews' correlation; choose: even rows of dev, report: odd",
        "stsb": "Spearman's ρ of dev, by the cosine of mean-pooled last states in float32",
    }  # fmt: skip
    _stages.run([lab.stages(target) for target in TARGETS], args, protocol)


if __name__ == "__main__":
    main()
