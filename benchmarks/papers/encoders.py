"""A sentence encoder learns a task with a new head: what it learns, and what it keeps.

MiniLM-L6 is fine-tuned on RTE, SST-2 and CoLA. Kept: zero-shot STS-B, which is Spearman's ρ between
the cosine of two mean-pooled embeddings and the label. Plain fine-tuning at four learning rates,
with WiSE-FT, against the preset ``holdfast`` at its defaults.

    python benchmarks/papers/encoders.py --model MINILM --data DATA --runs RUNS
    python benchmarks/papers/encoders.py --runs RUNS --collect encoders.json

With ``--choose``, the settings of ``holdfast`` are searched on data that the table does not report:
MRPC as the task, and pairs of STS-B's training split. DATA holds glue/*.jsonl.gz. Processes that
are started side by side with the same RUNS share the work.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import _jobs
import numpy as np
import torch
from _common import default_device
from _glue import TASKS, Data, read, trimmed
from _loop import Batch, Distance, counted, train
from _rates import learning_rate
from _summary import comparison, mean_points, over_tasks
from glue import Lab as GlueLab
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import default_collate

from holdfast import Features, Recipe, Reference, Run, WiseFT
from holdfast.hosts._updates import warm_up_and_decay

ALPHAS = (1.0, 0.75, 0.5, 0.25)
RATES = (1e-5, 2e-5, 5e-5, 1e-4)
#: What ``holdfast`` is chosen from.
STRENGTHS, HIGHER_RATES = (0.03, 0.1, 0.3), (5e-5, 1e-4, 2e-4, 4e-4)
BATCH, UPDATES = 32, {"rte": 600, "sst2": 600, "cola": 800, "mrpc": 600}
MOST_ROWS = 20_000  # of a training set
FIELDS = ("target", "kept")


class Plan(NamedTuple):
    """A recipe and its learning rate.

    If ``lr`` is None, it is the recipe's default, and with ``times`` a multiple of that.
    """

    recipe: Recipe
    lr: float | None
    times: float | None = None


class Table(NamedTuple):
    """What is run, on which tasks, with which seeds; its runs' names begin with a prefix."""

    plans: dict[str, Plan]
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    prefix: str = ""


def reported() -> Table:
    plain = {f"standard-{lr:g}": Plan(Recipe(), lr) for lr in RATES}
    plans = plain | {"holdfast": Plan(Recipe.preset("holdfast"), None)}
    return Table(plans, ("rte", "sst2", "cola"), (0, 1, 2))


def choices() -> Table:
    plain = {f"standard-{lr:g}": Plan(Recipe(), lr) for lr in RATES}
    plans = plain | {
        f"features-{strength:g}-{lr:g}": Plan(Recipe(recall=Features(strength)), lr)
        for strength, lr in itertools.product(STRENGTHS, HIGHER_RATES)
    }
    return Table(plans, ("mrpc",), (0,), "choose-")


class Similarity:
    """Pairs of sentences, and how like they are."""

    def __init__(self, rows: Sequence[Any], tokenizer: Any, device: torch.device) -> None:
        self.labels = np.array([row["label"] for row in rows])
        self.sides = [
            tokenizer(
                [row[side] for row in rows], truncation=True, max_length=64, padding="max_length",
                return_tensors="pt",
            ).to(device)
            for side in ("sentence1", "sentence2")
        ]  # fmt: skip

    def spearman(self, encoder: nn.Module) -> dict[str, float]:
        """Spearman's ρ in percent: ``kept``, and ρ by features that no recipe is trained on."""
        cosines = self.cosines(encoder)
        return {name: round(100 * spearman(x, self.labels), 3) for name, x in cosines.items()}

    @torch.no_grad()
    def cosines(self, encoder: nn.Module) -> dict[str, Any]:
        """Of the two sentences of each pair, by each kind of features."""
        first, second = (self._embeddings(encoder, side) for side in self.sides)
        return {
            name: F.cosine_similarity(first[name], second[name]).cpu().numpy() for name in first
        }

    def _embeddings(self, encoder: nn.Module, side: Any) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {"kept": [], "kept_first_token": [], "kept_middle": []}
        for begin in range(0, len(self.labels), 512):
            some = trimmed({name: value[begin : begin + 512] for name, value in side.items()})
            mask = some["attention_mask"][..., None]
            layers = [x.float() for x in encoder(**some, output_hidden_states=True).hidden_states]
            middle, last = layers[len(layers) // 2], layers[-1]
            found["kept"].append((last * mask).sum(1) / mask.sum(1))
            found["kept_first_token"].append(last[:, 0])
            found["kept_middle"].append((middle * mask).sum(1) / mask.sum(1))
        return {name: torch.cat(parts) for name, parts in found.items()}


def ranks(values: Any) -> Any:
    """Equal values share the mean of their ranks.

    >>> ranks([3.0, 1.0, 3.0]).tolist()
    [2.5, 1.0, 2.5]
    """
    _, back, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[back]


def spearman(one: Any, other: Any) -> float:
    """The correlation of their ranks.

    >>> round(spearman([0.1, 0.2, 0.9], [1, 2, 3]), 6)
    1.0
    """
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


class Tuned(NamedTuple):
    """A model after training, its pretrained weights, and how it was trained."""

    model: nn.Module
    theta: Reference
    about: _jobs.Record


class Lab(GlueLab):
    """The pretrained model, the tasks, and the pairs that show what is kept."""

    warm_up = 0.06  # of the updates
    weight_decay = 0.01

    def __init__(self, args: Any) -> None:
        super().__init__(args.model, args.data, default_device())
        self.args = args

    @functools.cache  # noqa: B019
    def task(self, name: str) -> Data:
        most = max(BATCH, self.args.limit or MOST_ROWS)
        return Data(name, self.folder, self.tokenizer, self.device, most=most)

    @functools.cached_property
    def pairs(self) -> Similarity:
        split = "train" if self.args.choose else "dev"
        rows = read(self.folder / "glue" / f"stsb-{split}.jsonl.gz")
        if self.args.choose:  # a sentence may be in both splits
            dev = read(self.folder / "glue" / "stsb-dev.jsonl.gz")
            seen = {row[side] for row in dev for side in ("sentence1", "sentence2")}
            rows = [r for r in rows if not {r["sentence1"], r["sentence2"]} & seen][::3]
        return Similarity(rows[: self.args.limit], self.tokenizer, self.device)

    def pretrained(self) -> _jobs.Record:
        model: Any = self.model(2, 0)
        return {"recipe": "pretrained", "points": {"0": self.kept(model.eval())}}

    def kept(self, model: Any) -> dict[str, float]:
        return self.pairs.spearman(model.bert)

    def tune(self, task: str, name: str, plan: Plan, seed: int) -> _jobs.Record:
        data, (model, theta, about) = self.task(task), self.trained(task, plan, seed)

        def figures(model: nn.Module) -> dict[str, float]:
            found = data.figures(data.predictions(model))
            return {"target": found.pop("dev"), **self.kept(model), **found}

        points = WiseFT().sweep(model, theta, ALPHAS, figures)
        return {
            "task": task, "recipe": name, "seed": seed, **about,
            "points": {f"{alpha:g}": point for alpha, point in points.items()},
        }  # fmt: skip

    def trained(self, task: str, plan: Plan, seed: int) -> Tuned:
        """Make all updates of a plan."""
        gc.collect()  # graphs of the run before
        data, updates = self.task(task), self.args.updates or UPDATES[task]
        model = self.model(data.classes, seed)
        theta, distance = Reference.of(model, without="classifier"), Distance(model)
        lr = learning_rate(
            plan.recipe, model, plan.lr, plan.times, new=("classifier",), task="classification"
        )
        run = Run(
            plan.recipe, model, data.train, lr=lr,
            weight_decay=self.weight_decay, new="classifier", task="classification",
            collate=default_collate, seed=seed, cache=False, progress=False,
        )  # fmt: skip
        columns = {
            name: torch.tensor([sample[name] for sample in run.criterion.data], device=self.device)
            for name in run.criterion.columns
        }
        batches = itertools.islice(data.batches(BATCH, seed, **columns), updates)
        losses: list[Tensor] = []

        def loss(batch: Batch) -> Tensor:
            update: Any = batch["update"]
            rows = {name: value for name, value in batch.items() if name != "update"}
            return run.loss(rows, float(BATCH), update)

        train(
            run, counted(batches, self.device), loss,
            [warm_up_and_decay(u, updates, warm_up=self.warm_up) for u in range(updates)],
            clip_norm=1.0, autocast=torch.bfloat16 if self.device.type == "cuda" else None,
            after_step=lambda _, value: losses.append(value.clone()),
        )  # fmt: skip
        tuned: Any = run.finish()
        if hasattr(tuned, "merge_and_unload"):  # from here on adapters are weights like any others
            tuned = tuned.merge_and_unload()
        about = {
            "lr": run.lr, "settings": run.recipe.to_dict(),
            "distance": round(float(distance()), 4),
            "train_loss": round(float(torch.stack(losses[-50:]).mean()), 5),
        }  # fmt: skip
        return Tuned(tuned, theta, about)


def jobs_of(lab: Lab, table: Table) -> dict[str, Any]:
    """All runs of a table."""
    plans, tasks, seeds, prefix = table
    jobs: dict[str, Any] = {f"{prefix}pretrained": lab.pretrained}
    for seed, (name, plan), task in itertools.product(seeds, plans.items(), tasks):
        jobs[f"{prefix}{task}-{name}-{seed}"] = functools.partial(lab.tune, task, name, plan, seed)
    return jobs


def main() -> None:
    parser = _jobs.Parser(__doc__)
    parser.add_input("--model")
    parser.add_input("--data")
    parser.add_argument("--choose", action="store_true", help="search settings, on other data")
    parser.add_argument("--updates", type=int, help="instead of 600 or 800, for a trial")
    parser.add_argument("--limit", type=int, help="rows of each set, for a trial")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    table = choices() if args.choose else reported()
    jobs = _jobs.selected(jobs_of(Lab(args), table), args.only)
    if args.collect is None:
        sys.exit(1 if _jobs.work(jobs, args.runs, args.seconds) else 0)
    protocol = {
        "model": "all-MiniLM-L6-v2", "tasks": {task: UPDATES[task] for task in table.tasks},
        "batch": BATCH, "most_rows": MOST_ROWS, "seeds": table.seeds, "weight_decay": 0.01,
        "schedule": "6 % warm-up, linear to 0", "clip_norm": 1.0,
        "training": "float32 weights, bfloat16 autocast, dropout 0.1",
        "target": {task: TASKS[task][0] for task in table.tasks},
        "kept": "Spearman's ρ of STS-B, " + ("training pairs" if args.choose else "dev")
        + ", by the cosine of mean-pooled last states; kept_first_token: of the first token's last "
        "state; kept_middle: of mean-pooled states of the middle layer",
    }  # fmt: skip
    _jobs.collect(args.runs, jobs, args.collect, protocol)
    done = _jobs.records(args.runs)
    runs = [done[name] for name in jobs if name in done]
    for task in table.tasks:
        points = mean_points(run for run in runs if run.get("task", task) == task)
        print(f"\n{task}\n{comparison(points, FIELDS)}")
    if len(table.tasks) > 1:
        print(f"\nmean of the tasks\n{comparison(mean_points(over_tasks(runs, FIELDS)), FIELDS)}")


if __name__ == "__main__":
    main()
