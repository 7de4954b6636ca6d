"""The same tuned checkpoints through every merge: what do the merged models learn and retain?

SmolLM2-135M-Instruct is fine-tuned on GSM8K as in language.py, plainly, at two learning rates and
with two seeds each. ``merge_on_disk`` merges the saved checkpoints with their base, by every method
and several settings: one tuned model, and both seeds of a learning rate where a method merges
several. Every merged checkpoint is loaded again and tested as in language.py.

    python benchmarks/papers/merges.py --model SMOLLM2 --data DATA --runs RUNS
    python benchmarks/papers/merges.py … --collect benchmarks/papers/results/merges.json

Processes that are started side by side with the same RUNS share the work.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _jobs import Parser, Record, work_or_collect
from _lm_tests import load
from language import Bench, Plan

from holdfast import DARE, FAPM, SLERP, TIES, LiNeS, ModelStock, Recipe, WiseFT
from holdfast.io.merge import merge_on_disk
from holdfast.recipe import changed_settings
from holdfast.registry import entry_of
from holdfast.stages import Merging

SEEDS = (0, 1)
RATES = (1.0, 0.5)  # times --lr
ONE: list[Merging] = [
    *(WiseFT(alpha) for alpha in (0.3, 0.5, 0.7, 0.85)),
    *(SLERP(t) for t in (0.3, 0.5, 0.7, 0.85)),
    *(LiNeS(alpha, beta) for alpha, beta in ((0.0, 0.7), (0.0, 1.0), (0.2, 0.8), (0.4, 0.6))),
    *(TIES(density) for density in (0.05, 0.2, 0.8)),
    *(TIES(density, lam=0.5) for density in (0.2, 0.5, 0.8)),
    *(DARE(drop) for drop in (0.3, 0.6, 0.9)),
    *(DARE(drop, lam=0.5) for drop in (0.3, 0.6)),
    *(FAPM(keep) for keep in (0.05, 0.1, 0.3, 0.6, 0.8)),
]
BOTH: list[Merging] = [
    ModelStock(),
    *(TIES(density, lam) for density, lam in itertools.product((0.2, 0.8), (0.5, 1.0))),
    *(DARE(drop, lam) for drop, lam in itertools.product((0.3, 0.6), (0.5, 1.0))),
]


class Merges(Bench):
    """The tuned checkpoints, and tests of their merges."""

    def place(self, rate: float, seed: int) -> Path:
        folder: Path = self.prepared
        return folder / f"tuned-{rate * self.args.lr:g}-s{seed}"

    def tune(self, rate: float, seed: int) -> Record:
        """Train a model plainly, test it and save it."""
        model, about = self.trained(Plan(Recipe(), rate), seed)
        place = self.place(rate, seed)
        part = place.with_name(f"{place.name}.part")
        model.save_pretrained(part)
        part.rename(place)
        return {
            "method": "keep", "rate": about["lr"], "seeds": [seed], "settings": {},
            "point": self.tests.measure(model), **about,
        }  # fmt: skip

    def merge(self, method: Merging, rate: float, seeds: Sequence[int]) -> Record:
        """Merge tuned checkpoints with the base, and test the result."""
        tuned = [self.place(rate, seed) for seed in seeds]
        while missing := [place.name for place in tuned if not place.exists()]:
            print(f"waiting for {', '.join(missing)}", flush=True)
            time.sleep(5)
        name = name_of(method, rate, seeds)
        out, begin = self.prepared / f"merged-{name}", time.monotonic()
        merge_on_disk(self.args.model, tuned, out, method, overwrite=True)
        seconds = time.monotonic() - begin
        size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        point = self.tests.measure(load(out, self.device))
        shutil.rmtree(out)
        return {
            "method": entry_of(method).name, "settings": changed_settings(method),
            "rate": rate * self.args.lr, "seeds": list(seeds), "point": point,
            "merge_seconds": round(seconds, 2), "gigabytes": round(size / 1e9, 3),
        }  # fmt: skip


def name_of(method: Merging, rate: float, seeds: Sequence[int]) -> str:
    values = [entry_of(method).name, *(f"{x:g}" for x in changed_settings(method).values())]
    return "-".join([*values, f"{rate:g}lr", "s" + "".join(map(str, seeds))])


def main() -> None:
    parser = Parser(__doc__)
    parser.add_input("--model")
    parser.add_input("--data")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--samples", type=int, default=7473, help="of the training data")
    parser.add_argument("--limit", type=int, default=500, help="rows of a test; of MMLU twice that")
    parser.set_defaults(generate=False)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    bench = Merges(args)
    jobs: dict[str, Callable[[], Record]] = {}
    for rate, seed in itertools.product(RATES, SEEDS):
        jobs[f"keep-{rate:g}lr-s{seed}"] = functools.partial(bench.tune, rate, seed)
    for rate in RATES:
        several = [*((method, SEEDS[:1]) for method in ONE), *((method, SEEDS) for method in BOTH)]
        for method, seeds in several:
            name = name_of(method, rate, seeds)
            if name in jobs:
                raise ValueError(f"two merges have the name {name}")
            jobs[name] = functools.partial(bench.merge, method, rate, seeds)
    protocol = {
        "model": "SmolLM2-135M-Instruct (Q4_1, dequantised)", "target": "GSM8K", "epochs": 1,
        "lr": args.lr, "samples": args.samples, "rows_a_test": args.limit,
        "training": "plain, as in language.json", "merging": "float32 checkpoints on disk",
    }  # fmt: skip
    work_or_collect(jobs, args, protocol)


if __name__ == "__main__":
    main()
