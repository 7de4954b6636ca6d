"""Three tasks in a row on one model: what is forgotten of the base, and of the tasks before.

SmolLM2 learns GSM8K, then MBPP, then BoolQ. Each stage takes the model of the stage before as its
base, so that `holdfast` draws its texts from it. Rules and measures are in PROTOCOL.md.

    cd benchmarks/proof
    python continual.py --model SMOLLM2 --data DATA --runs RUNS
    python continual.py … --collect results/continual.json
"""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _exam import Exam
from _jobs import Record, work_or_collect
from _lm_tests import load
from _measures import CHANCE, above_chance
from _targets import Target, make_target
from language import Bench, Plan
from language_models import MODELS, MOST, RATES, jobs_of, make_parser, retained_tests

from holdfast import LoRA, Recipe

ORDER = ("gsm8k", "mbpp", "boolq")
PLANS = {
    "holdfast": Plan(Recipe.preset("holdfast"), None),
    "plain-x1": Plan(Recipe(), 1.0),
    "plain-x0.2": Plan(Recipe(), 0.2),
    "lora-x6": Plan(Recipe(trainable=LoRA(r=16)), 6.0),
}


class Continual(Bench):
    """One model and all targets. ``now`` is the target of the stage that is trained."""

    now: Target

    @property
    def samples(self) -> list[dict[str, list[int]]]:
        return self.now.train

    @functools.cached_property
    def targets(self) -> dict[str, Target]:
        limit, found = self.args.limit, {}
        for name in ORDER:
            target = make_target(name, self.tokenizer, self.folder, self.args.samples)
            found[name] = target._replace(choose=[], report=target.report[:limit])
        return found

    @functools.cached_property
    def exam(self) -> Exam:
        """The retained tests that the base passes, and the report parts of all targets."""
        tests = [t for t in retained_tests(self, MOST) if t["name"] not in ORDER]
        nothing = Target(0, [], [], [], [], lambda texts: [])
        learned = [
            {"name": f"learned_{name}", "kind": "text", "requests": target.report}
            for name, target in self.targets.items()
        ]

        def take() -> Record:
            exam = Exam(nothing, [*learned, *tests], self.tokenizer, self.device)
            return exam.take(load(self.args.model, self.device), whole=False)

        self.base_figures: Record = self.kept("base-continual", take)
        passed = above_chance(self.base_figures)
        kept = [test for test in tests if test["name"] not in CHANCE or test["name"] in passed]
        return Exam(nothing, [*learned, *kept], self.tokenizer, self.device)

    def pretrained(self) -> Record:
        self.exam  # noqa: B018 (measures the base)
        return {"plan": "pretrained", "points": {"base": self.base_figures}}

    def run(self, name: str, plan: Plan, seed: int) -> Record:
        """Train on one target after the other, and examine the model after each of them."""
        exam, first = self.exam, self.args.model
        self.args.lr = RATES["smollm2"]
        points, stages = {}, []
        last = self.prepared / f"stage-{name}-{seed}"
        try:
            for number, target in enumerate(ORDER, 1):
                self.now, self.epochs = self.targets[target], self.targets[target].epochs
                model, about = self.trained(plan, seed)
                points[f"{number}-{target}"] = exam.take(model, whole=False)
                stages.append(about)
                model.save_pretrained(last)
                self.args.model = last
                del model
                self.free()
        finally:
            self.args.model = first
            shutil.rmtree(last, ignore_errors=True)
        return {"plan": name, "seed": seed, "stages": stages, "points": points}


def main() -> None:
    parser = make_parser(__doc__)
    args: Any = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    bench = Continual(args)
    protocol = {
        "model": MODELS["smollm2"], "targets": ORDER, "rules": "benchmarks/proof/PROTOCOL.md",
        "training": "each stage as in language_models.py, from the model of the stage before",
    }  # fmt: skip
    work_or_collect(jobs_of(bench, PLANS), args, protocol)


if __name__ == "__main__":
    main()
