"""A recipe in the Hugging Face Trainer, on real handwritten digits.

As in digits.py, a network that knows upright digits is fine-tuned on tilted ones, with and without
a recipe. The score "retained" is its accuracy on upright digits.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from typing import Any

import digits
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset
from transformers import TrainingArguments
from transformers.modeling_outputs import ImageClassifierOutput

from holdfast.hosts.hf import HoldfastTrainer


class DigitClassifier(nn.Module):
    """A network with the interface that the Trainer expects: it takes labels, returns a loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        logits = self.network(pixels)
        loss: Any = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def as_rows(data: TensorDataset) -> list[dict[str, Any]]:
    images, labels = data.tensors
    return [{"pixels": x, "labels": int(y)} for x, y in zip(images, labels, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="flow+l2-sp", help="methods joined by +")
    parser.add_argument("--updates", type=int, default=400)
    args = parser.parse_args()

    torch.set_num_threads(1)
    pretrained, target, test = digits.pretrain(seed=0)
    images, labels = test.tensors
    scores = {"before": digits.accuracy(pretrained, images, labels)}
    for name in ("standard", args.recipe):
        model = DigitClassifier(copy.deepcopy(pretrained))
        with tempfile.TemporaryDirectory() as folder:
            trainer = HoldfastTrainer(
                model=model,
                recipe=name,
                task="classification",
                args=TrainingArguments(
                    folder,
                    max_steps=args.updates,
                    per_device_train_batch_size=32,
                    learning_rate=1e-3,
                    save_strategy="no",
                    report_to=[],
                    disable_tqdm=True,
                    use_cpu=True,
                    logging_steps=100,
                ),
                train_dataset=as_rows(target),
            )
            trainer.train()
        network = model.network.eval()
        scores[name] = digits.accuracy(network, images, labels)
        learned = digits.accuracy(network, digits.tilt(images), labels)
        print(f"{name}: {learned:.1f} % of the tilted digits correct")
    print(
        f"retained: before {scores['before']:.1f} %, after {scores[args.recipe]:.1f} % "
        f"(standard {scores['standard']:.1f} %)"
    )


if __name__ == "__main__":
    main()
