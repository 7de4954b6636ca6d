"""RecAdam's tables and figures on GLUE, with MiniLM-L6.

    python benchmarks/papers/glue.py --model MINILM --data DATA --runs RUNS      # several at once
    python benchmarks/papers/glue.py … --collect benchmarks/papers/results/glue.json

Chen et al., *Recall and Learn* (https://arxiv.org/abs/2004.12651), Tables 1 and 2: plain
fine-tuning, RecAdam from the pretrained weights (PI) and from random ones (RI). The grid of k and
t0 is run with one seed; what it chooses, with five. DATA holds glue/*.jsonl.gz.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gzip
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _jobs
import numpy as np
import torch
from _common import default_device
from _loop import Batch, Distance, train
from torch import Tensor, nn

from holdfast import RandomInit, RecAdamUpdate, Recipe
from holdfast.anneal import Sigmoid
from holdfast.hosts._updates import order_of
from holdfast.run import Run

#: Of each task: its metric, the length to cut at, and how many classes it has (1: a number).
TASKS = {
    "cola": ("matthews", 64, 2),
    "stsb": ("pearson", 128, 1),
    "mrpc": ("accuracy", 128, 2),
    "rte": ("accuracy", 128, 2),
    "sst2": ("accuracy", 64, 2),
}
UPDATES, BATCH, LR, PULL, SEEDS = 1000, 32, 5e-5, 0.1, 5
K, T0 = (0.02, 0.1, 0.5), (0.1, 0.3)
#: RecAdam's t0 and width as shares of the run: what the library's defaults are chosen from.
LAYOUTS = {"a": (0.25, 0.02), "b": (0.5, 0.1), "c": (0.5, 0.3)}
FIGURE_2 = ("stsb", "cola")
MARKS = 20  # updates between two points of a curve


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Data:
    """A task's samples as tensors on a device."""

    def __init__(self, task: str, folder: Path, tokenizer: Any, device: torch.device) -> None:
        self.metric, length, self.classes = TASKS[task]
        self.splits = {}
        for split in ("train", "dev"):
            rows = read(folder / "glue" / f"{task}-{split}.jsonl.gz")
            first = [row.get("sentence", row.get("sentence1")) for row in rows]
            second = [row["sentence2"] for row in rows] if "sentence2" in rows[0] else None
            made = tokenizer(
                first, second, truncation=True, max_length=length, padding="max_length",
                return_tensors="pt", return_token_type_ids=True,
            )  # fmt: skip
            labels = torch.tensor([row["label"] for row in rows])
            labels = labels.float() if self.classes == 1 else labels.long()
            self.splits[split] = {k: v.to(device) for k, v in made.items()} | {
                "labels": labels.to(device)
            }

    def batches(self, seed: int) -> Iterator[Batch]:
        rows = self.splits["train"]
        size = len(rows["labels"])
        for epoch in range(-(-UPDATES // (size // BATCH))):
            order = order_of(epoch, size, seed).to(rows["labels"].device)
            for begin in range(0, size - BATCH + 1, BATCH):
                some = order[begin : begin + BATCH]
                yield {name: value[some] for name, value in rows.items()}

    @torch.no_grad()
    def predictions(self, model: nn.Module) -> np.ndarray[Any, Any]:
        rows = {k: v for k, v in self.splits["dev"].items() if k != "labels"}
        device = rows["input_ids"].device
        model.eval()
        said = []
        for begin in range(0, len(rows["input_ids"]), 512):
            some = {name: value[begin : begin + 512] for name, value in rows.items()}
            with torch.autocast(device.type, torch.bfloat16):
                said.append(model(**some).logits.float())
        return torch.cat(said).cpu().numpy()

    def figures(self, said: np.ndarray[Any, Any]) -> dict[str, float]:
        """The metric on all of dev, and on its halves: the first to choose by."""
        labels = self.splits["dev"]["labels"].cpu().numpy()
        shuffled = np.random.default_rng(0).permutation(len(labels))
        halves = np.array_split(shuffled, 2)
        parts = {"dev": shuffled, "half_a": halves[0], "half_b": halves[1]}
        found = {name: score(self.metric, said[i], labels[i]) for name, i in parts.items()}
        if self.metric == "accuracy":
            found["f1"] = score("f1", said, labels)
        return {name: round(100 * value, 3) for name, value in found.items()}


def score(metric: str, said: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    """GLUE's metrics, from logits."""
    if metric == "pearson":
        return float(np.corrcoef(said[:, 0], labels)[0, 1])
    chosen = said.argmax(1)
    if metric == "accuracy":
        return float((chosen == labels).mean())
    tp, tn = int(((chosen == 1) & (labels == 1)).sum()), int(((chosen == 0) & (labels == 0)).sum())
    fp, fn = int(((chosen == 1) & (labels == 0)).sum()), int(((chosen == 0) & (labels == 1)).sum())
    if metric == "f1":
        return 2 * tp / max(1, 2 * tp + fp + fn)
    below = math.sqrt(float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    return (tp * tn - fp * fn) / below if below else 0.0


class Lab:
    """The pretrained model, and tasks when they are asked for."""

    def __init__(self, model: Path, data: Path, device: torch.device) -> None:
        from transformers import AutoTokenizer, BertModel

        self.device, self.folder = device, data
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.base = BertModel.from_pretrained(model, attn_implementation="sdpa")
        self.base.float()

    @functools.cache  # noqa: B019
    def task(self, name: str) -> Data:
        return Data(name, self.folder, self.tokenizer, self.device)

    def model(self, classes: int, seed: int) -> nn.Module:
        from transformers import BertForSequenceClassification

        torch.manual_seed(seed)
        config = copy.deepcopy(self.base.config)
        config.num_labels = classes
        model = BertForSequenceClassification(config)
        model.bert.load_state_dict(self.base.state_dict())
        return model.to(self.device)

    def run(
        self, name: str, recipe: Recipe, seed: int, *, coupled: Sigmoid | None = None,
        curve: bool = False, **labels: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Fine-tune once."""
        data = self.task(name)
        task: Any = "regression" if data.classes == 1 else "classification"
        model = self.model(data.classes, seed)
        distance = Distance(model)
        run = Run(
            recipe, model, [{}], lr=LR, new="classifier", task=task, seed=seed, cache=False,
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
            itertools.islice(data.batches(seed), UPDATES),
            lambda batch: run.loss(batch, float(BATCH), 1),
            [1 - update / UPDATES for update in range(UPDATES)],
            clip_norm=1.0,
            autocast=torch.bfloat16 if self.device.type == "cuda" else None,
            before_step=couple(run.model, distance, coupled) if coupled else None,
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


def couple(model: nn.Module, distance: Distance, anneal: Sigmoid) -> Callable[[int], None]:
    """The coupled variant: λ·∇L + (1−λ)·γ·(θ − θ*) is what Adam sees."""
    body = [p for name, p in model.named_parameters() if not name.startswith("classifier")]

    def before(update: int) -> None:
        lam = anneal(update)
        gradients = [p.grad for p in body]
        torch._foreach_mul_(gradients, lam)
        torch._foreach_add_(
            gradients, torch._foreach_sub(distance.now, distance.then), alpha=(1 - lam) * PULL / LR
        )

    return before


def recadam(k: float, t0: float, start: str) -> Recipe:
    anneal = Sigmoid(k=k, t0=t0 * UPDATES)
    update = RecAdamUpdate(pull=PULL, anneal=anneal)
    return Recipe(update=update, start=RandomInit()) if start == "ri" else Recipe(update=update)


Jobs = dict[str, Callable[[], dict[str, Any]]]


def first_jobs(lab: Lab) -> Jobs:
    """All but what the grid chooses."""
    jobs: Jobs = {}
    for task in TASKS:
        curve = task in FIGURE_2
        jobs[f"{task}-vanilla-0"] = functools.partial(
            lab.run, task, Recipe(), 0, method="vanilla", curve=curve
        )
        for start in ("pi", "ri"):
            for k in K:
                for t0 in T0:
                    jobs |= recadam_job(lab, task, start, k, t0, 0, curve=curve and t0 == T0[1])
        for seed in range(1, SEEDS):
            jobs[f"{task}-vanilla-{seed}"] = functools.partial(
                lab.run, task, Recipe(), seed, method="vanilla"
            )
    for seed in range(SEEDS):
        for task in TASKS:
            jobs |= recadam_job(lab, task, "pi", K[1], T0[1], seed, curve=False)
            jobs[f"{task}-coupled-{seed}"] = functools.partial(
                lab.run, task, Recipe(), seed, method="coupled", k=K[1], t0=T0[1],
                coupled=Sigmoid(k=K[1], t0=T0[1] * UPDATES),
            )  # fmt: skip
            for layout, (t0, width) in LAYOUTS.items():
                jobs[f"{task}-layout-{layout}-{seed}"] = functools.partial(
                    lab.run, task, Recipe(update=RecAdamUpdate(t0=t0, width=width)), seed,
                    method="layout", t0=t0, width=width,
                )  # fmt: skip
    return jobs


def recadam_job(
    lab: Lab, task: str, start: str, k: float, t0: float, seed: int, *, curve: bool = False
) -> Jobs:
    job = functools.partial(
        lab.run, task, recadam(k, t0, start), seed, method=start, k=k, t0=t0, curve=curve
    )
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--only", default="", help="runs whose names hold this")
    parser.add_argument("--collect", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    lab = Lab(args.model, args.data, default_device())
    first = {name: job for name, job in first_jobs(lab).items() if args.only in name}
    if not args.collect:
        _jobs.work(first, args.runs, args.seconds)
    done = _jobs.records(args.runs)
    if args.only or any(name not in done for name in first):
        return
    second = chosen_jobs(lab, done)
    if not args.collect:
        _jobs.work(second, args.runs, args.seconds)
        return
    protocol = {
        "model": "all-MiniLM-L6-v2", "updates": UPDATES, "batch": BATCH, "lr": LR,
        "schedule": "linear to 0, no warm-up", "clip_norm": 1.0, "pull": PULL,
        "grid": {"k": K, "t0": T0, "seeds": 1}, "seeds": SEEDS, "layouts": LAYOUTS,
        "training": "float32 weights, bfloat16 autocast, dropout 0.1",
        "metrics": {task: metric for task, (metric, _, _) in TASKS.items()},
        "choice": {
            f"{task}-{start}": {by: chosen(done, task, start, by) for by in ("dev", "half_a")}
            for task in TASKS for start in ("pi", "ri")
        },
    }  # fmt: skip
    names = list(first | second)
    _jobs.collect(args.runs, names, args.collect, default_device(), protocol)


if __name__ == "__main__":
    main()
