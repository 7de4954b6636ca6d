"""A recipe in a loop with Accelerate, on real handwritten digits.

A small network that knows upright digits is fine-tuned on tilted ones, with and without a recipe.
The script runs on one process or several, with the same output:

    python examples/accelerate_loop.py
    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse
import copy

import torch
from accelerate import Accelerator
from digits import accuracy, pretrain, tilt
from torch import nn
from torch.utils.data import TensorDataset

from holdfast import Recipe, Run
from holdfast.hosts.accelerate import AccelerateLoop


def linear(update: int, total: int) -> float:
    return 1 - update / total


def finetune(
    accelerator: Accelerator, recipe: Recipe, model: nn.Module, data: TensorDataset, updates: int
) -> nn.Module:
    """Fine-tune in a loop that clips and logs as usual."""
    run = Run(recipe, model, data, lr=1e-3, task="classification", cache=False, progress=False)
    # An update has 32 samples on any number of ranks.
    batch_size = 32 // accelerator.num_processes
    loop = AccelerateLoop(
        accelerator, run, max_updates=updates, batch_size=batch_size, schedule=linear
    )
    for update in loop:
        loss = loop.backward()
        accelerator.clip_grad_norm_(loop.model.parameters(), 1.0)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if update % 250 == 0:
            accelerator.print(f"update {update}: loss {float(loss):.4f}", run.log())
    return loop.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="recadam+wise-ft", help="methods joined by +")
    parser.add_argument("--updates", type=int, default=500)
    args = parser.parse_args()

    torch.set_num_threads(1)  # more threads slow down a network this small
    accelerator = Accelerator(cpu=True)
    pretrained, data, test = pretrain(seed=0)
    images, labels = test.tensors

    models = {"before": pretrained}
    for name, recipe in {"after": Recipe.preset(args.recipe), "standard": Recipe()}.items():
        accelerator.print(f"{name}: {args.recipe if name == 'after' else 'plain fine-tuning'}")
        model = copy.deepcopy(pretrained)
        models[name] = finetune(accelerator, recipe, model, data, args.updates)
    for what, x in {"target": tilt(images), "retained": images}.items():
        before, after, standard = (accuracy(model, x, labels) for model in models.values())
        accelerator.print(
            f"{what}: before {before:.1f} %, after {after:.1f} % (standard {standard:.1f} %)"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
