"""GLUE's small tasks as tensors on a device, and their metrics."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _loop import Batch
from torch import Tensor, nn
from torch.utils.data import Dataset

from holdfast.hosts._updates import order_of

#: Of each task: its metric, the length to cut at, and how many classes it has (1: a number).
TASKS = {
    "cola": ("matthews", 64, 2),
    "stsb": ("pearson", 128, 1),
    "mrpc": ("accuracy", 128, 2),
    "rte": ("accuracy", 128, 2),
    "sst2": ("accuracy", 64, 2),
}


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Samples(Dataset[Batch]):
    """Rows one by one, as holdfast scores them."""

    def __init__(self, rows: Batch) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows["labels"])

    def __getitem__(self, index: int) -> Batch:
        return {name: value[index] for name, value in self.rows.items()}


def trimmed(rows: Batch) -> Batch:
    """Rows without the padding that all of them have; on a GPU, graphs need one length."""
    mask = rows["attention_mask"]
    if mask.is_cuda:
        return rows
    longest = int(mask.sum(1).max())
    return {name: value[:, :longest] if value.dim() > 1 else value for name, value in rows.items()}


class Data:
    """A task's samples as tensors on a device, of a split at most ``most``, drawn at random."""

    def __init__(
        self, task: str, folder: Path, tokenizer: Any, device: torch.device,
        most: int | None = None,
    ) -> None:  # fmt: skip
        self.metric, length, self.classes = TASKS[task]
        self.splits = {}
        for split in ("train", "dev"):
            rows = read(folder / "glue" / f"{task}-{split}.jsonl.gz")
            if most is not None and most < len(rows):
                rows = random.Random(0).sample(rows, most)
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

    @property
    def train(self) -> Samples:
        return Samples(self.splits["train"])

    def batches(self, batch: int, seed: int, **columns: Tensor) -> Iterator[Batch]:
        """Full batches, epoch after epoch, without end. Columns have a value per row."""
        rows = self.splits["train"] | columns
        size = len(rows["labels"])
        for epoch in itertools.count():
            order = order_of(epoch, size, seed).to(rows["labels"].device)
            for begin in range(0, size - batch + 1, batch):
                some = order[begin : begin + batch]
                yield trimmed({name: value[some] for name, value in rows.items()})

    @torch.no_grad()
    def predictions(self, model: nn.Module) -> np.ndarray[Any, Any]:
        rows = {k: v for k, v in self.splits["dev"].items() if k != "labels"}
        device = rows["input_ids"].device
        model.eval()
        said = []
        for begin in range(0, len(rows["input_ids"]), 512):
            some = trimmed({name: value[begin : begin + 512] for name, value in rows.items()})
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
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
