"""Do methods add up? FLOW beside and together with L2-SP, LoRA and WiSE-FT, on real digits.

The setting of examples/digits.py: a network that knows upright handwritten digits is fine-tuned on
200 tilted ones. A pair is compared with its method alone, on the same batches; ``additivity_lm.py``
asks the same of a language model. Half a minute on a CPU.

    python benchmarks/additivity.py --seeds 0 1 2 --json FILE
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from statistics import median

import torch
from _common import default_device, write_results

from holdfast import L2SP, Flow, LoopSettings, LoRA, Recipe, WiseFT, finetune_loop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import digits

UPDATES, BATCH = 600, 32
RECIPES = {
    "standard": Recipe(),
    "FLOW": Recipe(objective=Flow()),
    "L2-SP": Recipe(penalties=[L2SP()]),
    "FLOW + L2-SP": Recipe(objective=Flow(), penalties=[L2SP()]),
    "LoRA": Recipe(trainable=LoRA(r=8)),
    "FLOW + LoRA": Recipe(trainable=LoRA(r=8), objective=Flow()),
    "WiSE-FT": Recipe(merging=WiseFT(0.5)),
    "FLOW + WiSE-FT": Recipe(objective=Flow(), merging=WiseFT(0.5)),
}
Figures = dict[str, float]


def run(seed: int, args: argparse.Namespace) -> dict[str, Figures]:
    """Pretrain once, fine-tune by each recipe, and measure on the test images."""
    pretrained, target, test = digits.pretrain(seed)
    images, labels = test.tensors

    def measure(model: torch.nn.Module) -> Figures:
        model.eval()
        return {
            "target": digits.accuracy(model, digits.tilt(images), labels),
            "retained": digits.accuracy(model, images, labels),
        }

    results = {"pretrained": measure(pretrained)}
    for name, recipe in RECIPES.items():
        lr = args.lora_lr if isinstance(recipe.trainable, LoRA) else args.lr
        model = finetune_loop(
            copy.deepcopy(pretrained), recipe, target, lr=lr, batch_size=BATCH,
            seed=seed, task="classification", progress=False, settings=LoopSettings(
                max_updates=UPDATES, schedule=lambda update, total: 1 - update / total
            ),
        )  # fmt: skip
        results[name] = measure(model)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lora-lr", type=float, default=3e-3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    torch.set_num_threads(1)  # so small a network is slower on more
    runs = [run(seed, args) for seed in args.seeds]
    medians = {
        name: {kind: median(r[name][kind] for r in runs) for kind in ("target", "retained")}
        for name in runs[0]
    }
    print(f"{'median of ' + str(len(runs)) + ' seeds':24}{'tilted':>8}{'upright':>9}  each seed")
    for name, figures in medians.items():
        each = " ".join(f"{r[name]['retained']:.1f}" for r in runs)
        print(f"{name:24}{figures['target']:8.1f}{figures['retained']:9.1f}  {each}")
    for pair in (name for name in medians if name.startswith("FLOW + ")):
        alone = pair.removeprefix("FLOW + ")
        gains = [r[pair]["retained"] - r[alone]["retained"] for r in runs]
        print(f"{pair} retains {', '.join(f'{g:+.1f}' for g in gains)} points over {alone}")
    if args.json:
        protocol = {
            "lr": args.lr, "lora_lr": args.lora_lr, "lr_decay": "linear to 0", "updates": UPDATES,
            "batch": BATCH, "seeds": args.seeds,
            "recipes": {name: recipe.to_dict() for name, recipe in RECIPES.items()},
        }  # fmt: skip
        write_results(args.json, default_device(), protocol, medians=medians, runs=runs)


if __name__ == "__main__":
    main()
