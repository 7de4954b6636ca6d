"""RecAdam's tables and figures on GLUE, with MiniLM-L6.

    python benchmarks/papers/glue.py --model MINILM --data DATA --runs RUNS      # several at once
    python benchmarks/papers/glue.py … --collect benchmarks/papers/results/glue.json

Chen et al., *Recall and Learn* (https://arxiv.org/abs/2004.12651), Tables 1 and 2: plain
fine-tuning, RecAdam from the pretrained weights (PI) and from random ones (RI). The grid of k and
t0 is run with one seed; what it chooses, with five. DATA holds glue/*.jsonl.gz.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _jobs
import torch
from _common import default_device
from _glue import TASKS, Data
from _loop import Distance, train
from torch import Tensor, nn

from holdfast import RandomInit, RecAdamUpdate, Recipe
from holdfast.anneal import Sigmoid
from holdfast.run import Run

UPDATES, BATCH, LR, PULL, SEEDS = 1000, 32, 5e-5, 0.1, 5
K, T0 = (0.02, 0.1, 0.5), (0.1, 0.3)
#: RecAdam's t0 and width as shares of the run: what the library's defaults are chosen from.
LAYOUTS = {
    "a": (0.25, 0.02), "b": (0.5, 0.1), "c": (0.5, 0.3), "e": (0.3, 0.1), "f": (0.5, 0.15),
}  # fmt: skip
LOWER = (0.5, 0.2)  # of the learning rate, for plain Adam
WEAK = 1.0  # γ of a coupled pull, beside that of the decoupled one
FIGURE_2 = ("stsb", "cola")
MARKS = 20  # updates between two points of a curve


class Lab:
    """The pretrained model, and tasks when they are asked for."""

    def __init__(self, model: Path, data: Path, device: torch.device) -> None:
        self.path, self.folder, self.device = model, data, device

    @functools.cached_property
    def base(self) -> Any:
        from transformers import BertModel

        return BertModel.from_pretrained(self.path, attn_implementation="sdpa").float()

    @functools.cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path)

    @functools.cache  # noqa: B019
    def task(self, name: str) -> Data:
        return Data(name, self.folder, self.tokenizer, self.device)

    def model(self, classes: int, seed: int) -> nn.Module:
        from transformers import BertForSequenceClassification

        torch.manual_seed(seed)
        config = copy.deepcopy(self.base.config)
        config.num_labels = classes
        model: Any = BertForSequenceClassification(config)
        model.bert.load_state_dict(self.base.state_dict())
        made: nn.Module = model.to(self.device)
        return made

    def run(
        self, name: str, recipe: Recipe, seed: int, *, lr: float = LR, curve: bool = False,
        coupled: Sigmoid | None = None, gamma: float = PULL / LR, **labels: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Fine-tune once."""
        data = self.task(name)
        task: Any = "regression" if data.classes == 1 else "classification"
        model = self.model(data.classes, seed)
        distance = Distance(model)
        run = Run(
            recipe, model, [{}], lr=lr, new="classifier", task=task, seed=seed, cache=False,
            progress=False,
        )  # fmt: skip
        losses: list[Tensor] = []
        points: list[tuple[int, Tensor, Tensor]] = []

        def after(update: int, loss: Tensor) -> None:
            losses.append(loss.clone())
            if curve and update % MARKS == 0:
                points.append((update, torch.stack(losses[-MARKS:]).mean(), distance()))

        train(
            run,
            itertools.islice(data.batches(BATCH, seed), UPDATES),
            lambda batch: run.loss(batch, float(BATCH), 1),
            [1 - update / UPDATES for update in range(UPDATES)],
            clip_norm=1.0,
            autocast=torch.bfloat16 if self.device.type == "cuda" else None,
            before_step=couple(run.model, distance, coupled, gamma) if coupled else None,
            after_step=after,
        )
        found = data.figures(data.predictions(run.model))
        record = {
            "task": name, "seed": seed, **labels, **found, "distance": round(float(distance()), 4),
            "train_loss": round(float(torch.stack(losses[-50:]).mean()), 5),
        }  # fmt: skip
        if curve:
            record["curve"] = [[u, round(float(x), 4), round(float(d), 4)] for u, x, d in points]
        return record


def couple(
    model: nn.Module, distance: Distance, anneal: Sigmoid, gamma: float
) -> Callable[[int], None]:
    """The coupled variant: λ·∇L + (1−λ)·γ·(θ − θ*) is what Adam sees."""
    body = [p for name, p in model.named_parameters() if not name.startswith("classifier")]

    def before(update: int) -> None:
        lam = anneal(update)
        gradients = [p.grad for p in body if p.grad is not None]
        torch._foreach_mul_(gradients, lam)
        torch._foreach_add_(
            gradients, torch._foreach_sub(distance.now, distance.then), alpha=(1 - lam) * gamma
        )

    return before


def recadam(k: float, t0: float, start: str) -> Recipe:
    anneal = Sigmoid(k=k, t0=t0 * UPDATES)
    update = RecAdamUpdate(pull=PULL, anneal=anneal)
    return Recipe(update=update, start=RandomInit()) if start == "ri" else Recipe(update=update)


Jobs = dict[str, Callable[[], dict[str, Any]]]


def grid_jobs(lab: Lab) -> Jobs:
    """The grid with one seed, and plain fine-tuning with all."""
    jobs: Jobs = {}
    for task in TASKS:
        for seed in range(SEEDS):
            jobs[f"{task}-vanilla-{seed}"] = functools.partial(
                lab.run, task, Recipe(), seed, method="vanilla",
                curve=task in FIGURE_2 and seed == 0,
            )  # fmt: skip
        for start, k, t0 in itertools.product(("pi", "ri"), K, T0):
            jobs |= recadam_job(lab, task, start, k, t0, 0)
    return jobs


def other_jobs(lab: Lab) -> Jobs:
    """Coupled and decoupled at one point; RecAdam laid out otherwise; lower learning rates."""
    jobs: Jobs = {}
    anneal = Sigmoid(k=K[1], t0=T0[1] * UPDATES)
    for seed, task in itertools.product(range(SEEDS), TASKS):
        jobs |= recadam_job(lab, task, "pi", K[1], T0[1], seed)
        jobs[f"{task}-coupled-{seed}"] = functools.partial(
            lab.run, task, Recipe(), seed, method="coupled", k=K[1], t0=T0[1], coupled=anneal
        )
        if seed == 0:
            jobs[f"{task}-coupled-weak-{seed}"] = functools.partial(
                lab.run, task, Recipe(), seed, method="coupled-weak", k=K[1], t0=T0[1],
                coupled=anneal, gamma=WEAK,
            )  # fmt: skip
        for layout, (t0, width) in LAYOUTS.items():
            jobs[f"{task}-layout-{layout}-{seed}"] = functools.partial(
                lab.run, task, Recipe(update=RecAdamUpdate(t0=t0, width=width)), seed,
                method="layout", t0=t0, width=width,
            )  # fmt: skip
        for part in LOWER:
            jobs[f"{task}-vanilla-{part:g}lr-{seed}"] = functools.partial(
                lab.run, task, Recipe(), seed, lr=part * LR, method=f"vanilla-{part:g}lr"
            )
    return jobs


def recadam_job(lab: Lab, task: str, start: str, k: float, t0: float, seed: int) -> Jobs:
    job = functools.partial(
        lab.run, task, recadam(k, t0, start), seed, method=start, k=k, t0=t0,
        curve=task in FIGURE_2 and t0 == T0[1] and seed == 0,
    )  # fmt: skip
    return {f"{task}-{start}-k{k:g}-t{t0:g}-{seed}": job}


def chosen(done: dict[str, _jobs.Record], task: str, start: str, by: str) -> tuple[float, float]:
    """The point of the grid that is best by a figure, with seed 0."""
    grid = [done[f"{task}-{start}-k{k:g}-t{t0:g}-0"] for k in K for t0 in T0]
    best = max(grid, key=lambda record: float(record[by]))
    return best["k"], best["t0"]


def chosen_jobs(lab: Lab, done: dict[str, _jobs.Record]) -> Jobs:
    """Five seeds of what the grid chose, on all of dev and on its first half."""
    jobs: Jobs = {}
    for seed in range(SEEDS):
        for task in TASKS:
            for start in ("pi", "ri"):
                for by in ("dev", "half_a"):
                    jobs |= recadam_job(lab, task, start, *chosen(done, task, start, by), seed)
    return jobs


def main() -> None:
    parser = _jobs.Parser(__doc__)
    parser.add_input("--model")
    parser.add_input("--data")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    lab, begin = Lab(args.model, args.data, default_device()), time.monotonic()
    grid, others = grid_jobs(lab), other_jobs(lab)

    def work(jobs: Jobs) -> None:
        some = _jobs.selected(jobs, args.only)
        _jobs.work(some, args.runs, args.seconds - (time.monotonic() - begin))

    def undone() -> bool:
        done, gone = _jobs.records(args.runs), _jobs.failed(args.runs, grid)
        return any(name not in done and name not in gone for name in grid)

    if not args.collect:
        work(grid)
        while undone() and not args.only:  # other processes are at it
            if time.monotonic() - begin > args.seconds:
                return
            time.sleep(1)
        done = _jobs.records(args.runs)
        whole = all(name in done for name in grid)
        work((chosen_jobs(lab, done) if whole else {}) | others)
        sys.exit(1 if _jobs.failed(args.runs, grid | others) else 0)
    done = _jobs.records(args.runs)
    protocol = {
        "model": "all-MiniLM-L6-v2", "updates": UPDATES, "batch": BATCH, "lr": LR,
        "schedule": "linear to 0, no warm-up", "clip_norm": 1.0, "pull": PULL,
        "grid": {"k": K, "t0": T0, "seeds": 1}, "seeds": SEEDS, "layouts": LAYOUTS,
        "coupled_gammas": [WEAK, PULL / LR],
        "training": "float32 weights, bfloat16 autocast, dropout 0.1",
        "metrics": {task: metric for task, (metric, _, _) in TASKS.items()},
        "choice": {
            f"{task}-{start}": {by: chosen(done, task, start, by) for by in ("dev", "half_a")}
            for task in TASKS for start in ("pi", "ri")
        },
    }  # fmt: skip
    _jobs.collect(args.runs, grid | chosen_jobs(lab, done) | others, args.collect, protocol)


if __name__ == "__main__":
    main()
