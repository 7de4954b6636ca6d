"""A recipe in Lightning: learn tilted digits, remember upright ones. Ten seconds on a CPU.

    python examples/lightning_digits.py recadam+flow      # any recipe; the default is recadam

The network and the data are those of digits.py: pretrained on upright digits, fine-tuned on 200
tilted ones, tested on unseen images. This example runs one seed; digits.py runs several.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from typing import Any

import torch
from digits import accuracy, pretrain, tilt
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from holdfast.hosts.lightning import RecipeCallback, ResumableLoader

EPOCHS, BATCH, LR, SEED = 100, 32, 1e-3, 0


class Digits(LightningModule):
    """A plain LightningModule whose model, data, loss and optimizer come from the callback."""

    def __init__(self, recipe: str, pretrained: nn.Module, data: TensorDataset) -> None:
        super().__init__()
        self.holdfast = RecipeCallback(
            recipe, pretrained, data, lr=LR, task="classification", seed=SEED, progress=False
        )
        self.model = self.holdfast.model

    def configure_callbacks(self) -> list[Callback]:
        return [self.holdfast]

    def train_dataloader(self) -> ResumableLoader:
        return self.holdfast.train_dataloader(BATCH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.holdfast.loss(batch)

    def configure_optimizers(self) -> Any:
        return self.holdfast.configure_optimizers(lambda update, total: 1 - update / total)


def finetune(recipe: str, pretrained: nn.Module, data: TensorDataset) -> nn.Module:
    module = Digits(recipe, copy.deepcopy(pretrained), data)
    trainer = Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    return module.model


def main() -> None:
    torch.set_num_threads(1)  # more threads slow down a network this small
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    pretrained, data, test = pretrain(SEED)
    images, labels = test.tensors
    names = sys.argv[1] if len(sys.argv) > 1 else "recadam"
    standard = finetune("standard", pretrained, data)
    ours = finetune(names, pretrained, data)
    print(names)
    for what, x in (("learned ", tilt(images)), ("retained", images)):
        before, after, plain = (accuracy(m, x, labels) for m in (pretrained, ours, standard))
        print(f"{what}: before {before:.1f} %, after {after:.1f} % (standard {plain:.1f} %)")


if __name__ == "__main__":
    main()
