"""RecAdam and AdamW on real handwritten digits: how much does each learn and forget?

A small network learns upright digits (from scikit-learn, without a download) and is then fine-tuned
on 200 digits tilted by 30°. All methods share the learning rate, steps and batches. The test images
are in neither training set. A method that learns less also forgets less, so AdamW at one third of
the learning rate is the control.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from pathlib import Path
from statistics import median

import sklearn
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import TensorDataset

import holdfast
from holdfast import RecAdam, Reference
from holdfast.anneal import Anneal, Constant, Sigmoid

STEPS, BATCH, DEGREES, TEST_IMAGES, TARGET_IMAGES = 1000, 32, 30, 597, 200
# λ(t) (None: AdamW) and the factor of the learning rate. RecAdam with its default annealing, with
# an early and short shift, and with a pull that never ends.
METHODS: dict[str, tuple[Anneal | None, float]] = {
    "AdamW": (None, 1.0),
    "AdamW, lr ÷ 3": (None, 1 / 3),
    "RecAdam": (Sigmoid.over(STEPS), 1.0),
    "RecAdam, short shift": (Sigmoid.over(STEPS, t0=0.25, width=0.02), 1.0),
    "RecAdam, constant λ": (Constant(0.95), 1.0),
}
Figures = dict[str, float]


def train(
    model: nn.Module, images: Tensor, labels: Tensor, lr: float, anneal: Anneal | None, seed: int
) -> None:
    """Train in place, in a plain PyTorch loop."""
    optimizer: Optimizer
    if anneal is None:
        optimizer = AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    else:  # the anchors are the current weights
        optimizer = RecAdam(model.parameters(), lr=lr, gamma=0.1 / lr, anneal=anneal)
    schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=STEPS)
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (BATCH,), generator=shuffle)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return 100 * float((model(images).argmax(1) == labels).double().mean())


def tilt(images: Tensor) -> Tensor:
    cos, sin = math.cos(math.radians(DEGREES)), math.sin(math.radians(DEGREES))
    turn = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(images), 2, 3)
    grid = F.affine_grid(turn, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def pretrain(seed: int) -> tuple[nn.Module, TensorDataset, TensorDataset]:
    """A network pretrained on upright digits, tilted training digits, and upright test digits."""
    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(digits.target)
    rest, test = train_test_split(range(len(x)), test_size=TEST_IMAGES, stratify=y, random_state=0)
    source, target = train_test_split(
        rest, test_size=TARGET_IMAGES, stratify=y[rest], random_state=seed
    )
    torch.manual_seed(seed)
    body = [nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    model = nn.Sequential(*body, nn.Linear(128, 10))
    train(model, x[source], y[source], 1e-3, None, seed)
    return model, TensorDataset(tilt(x[target]), y[target]), TensorDataset(x[test], y[test])


def run(seed: int, lr: float) -> dict[str, Figures]:
    """Pretrain once, fine-tune with each method, and measure on the test images."""
    pretrained, target, test = pretrain(seed)
    images, labels = test.tensors
    reference = Reference.of(pretrained)

    def measure(model: nn.Module) -> Figures:
        return {
            "target": accuracy(model, tilt(images), labels),
            "retained": accuracy(model, images, labels),
            "distance": reference.distance(model).total,
        }

    results = {"pretrained": measure(pretrained)}
    for name, (anneal, share) in METHODS.items():
        model = copy.deepcopy(pretrained)
        train(model, target.tensors[0], target.tensors[1], lr * share, anneal, seed)
        results[name] = measure(model)
    return results


def conclusion(figures: dict[str, Figures]) -> str:
    """Summarize the medians in one sentence."""
    start, adamw = figures["pretrained"], figures["AdamW"]
    sentences = []
    for name in ("AdamW, lr ÷ 3", "RecAdam", "RecAdam, constant λ"):
        forgot = adamw["retained"] - figures[name]["retained"]
        learned = figures[name]["target"] - adamw["target"]
        sentences.append(
            f"{name} forgot {abs(forgot):.1f} points {'less' if forgot < 0 else 'more'} "
            f"and learned {abs(learned):.1f} {'less' if learned < 0 else 'more'}"
        )
    lost, gained = start["retained"] - adamw["retained"], adamw["target"] - start["target"]
    return (
        f"AdamW forgot {lost:.1f} points (upright digits) and learned {gained:.1f} (tilted ones). "
        f"Compared with it: {'; '.join(sentences)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)), metavar="SEED")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    args = parser.parse_args()

    torch.set_num_threads(1)  # more threads slow down a network this small
    console = Console()
    runs = [run(seed, args.lr) for seed in track(args.seeds, "seeds", console=console)]
    figures = {m: {f: median(r[m][f] for r in runs) for f in runs[0][m]} for m in runs[0]}

    table = Table("", title=f"accuracy, lr {args.lr:g}: median (range) of {len(runs)} seeds")
    for heading in ("target (tilted)", "retained (upright)", "‖θ−θ*‖"):
        table.add_column(heading, justify="right")
    for name, row in figures.items():
        each = [[r[name][f] for r in runs] for f in row]
        table.add_row(name, *(f"{median(v):.1f} ({min(v):.1f}–{max(v):.1f})" for v in each))
    console.print(table, conclusion(figures), highlight=False)
    if args.json:
        methods = {
            name: {"anneal": anneal and anneal.to_dict(), "lr_share": share}
            for name, (anneal, share) in METHODS.items()
        }
        split = {"degrees": DEGREES, "test_images": TEST_IMAGES, "target_images": TARGET_IMAGES}
        protocol = {"lr": args.lr, "lr_decay": "linear to 0", "gamma": 0.1 / args.lr} | split
        protocol |= {"steps": STEPS, "batch": BATCH, "seeds": args.seeds, "methods": methods}
        versions = {m.__name__: m.__version__ for m in (holdfast, torch, sklearn)}
        report = {"versions": versions, "protocol": protocol, "medians": figures, "runs": runs}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
