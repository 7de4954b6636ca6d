"""The learning rate of ``holdfast`` and the number of epochs, on data that no table reports.

The data and the tests are those of language_rates.py. A part of the windows is learned in one or
more epochs, at several multiples of the learning rate that ``holdfast`` has for this model.

    python benchmarks/papers/language_epochs.py --model SMOLLM2 --data DATA --runs RUNS
    python benchmarks/papers/language_epochs.py --runs RUNS --collect language_epochs.json
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from language import Plan
from language_rates import RatesBench, make_parser, run_jobs

from holdfast import Recipe

LR = 5e-4
FACTORS = (0.1, 0.2, 0.35, 0.6, 1.0)
#: Windows and epochs; in the second group plain fine-tuning runs as well.
PARTS = ((600, 1), (600, 10), (2000, 1))
COMPARED = ((600, 3), (2000, 3), (6400, 1))


class EpochsBench(RatesBench):
    """The bench of language_rates.py with a part of the windows in several epochs."""

    alphas = (0.5, 0.7, 0.85)
    windows = 0

    @property
    def samples(self) -> list[dict[str, list[int]]]:
        return super().samples[: self.windows]

    def run_part(self, name: str, plan: Plan, windows: int, epochs: int) -> dict[str, Any]:
        self.windows, self.epochs = windows, epochs
        found = self.run(name, plan, 0)
        return {**found, "windows": windows, "epochs": epochs}


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(lr=LR, updates=200)
    bench = EpochsBench(parser.parse_args())
    torch.set_float32_matmul_precision("high")
    jobs: dict[str, Any] = {"epochs-pretrained": bench.pretrained}
    recipes = {"holdfast": Recipe.preset("holdfast"), "plain": Recipe()}
    for kind, recipe in recipes.items():
        for windows, epochs in (*COMPARED, *(PARTS if kind == "holdfast" else ())):
            for factor in FACTORS:
                name = f"{kind}-{windows}x{epochs}-x{factor:g}"
                run = functools.partial(bench.run_part, name, Plan(recipe, factor))
                jobs[f"epochs-{name}"] = functools.partial(run, windows, epochs)
    run_jobs(bench, jobs, lr=LR)


if __name__ == "__main__":
    main()
