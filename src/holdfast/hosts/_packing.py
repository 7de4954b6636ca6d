"""Packing: several samples in one sequence, so that no computation is spent on padding.

The positions start again at 0 with each sample. Attention of transformers then separates samples:
the loss is that of the same samples in rows of their own.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from holdfast._torch.batch import accepted_names, evaluating, logits_of
from holdfast.losses import IGNORED


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Distribute samples over sequences of at most ``room`` tokens; return their indices.

    Longer samples come first, and each goes where the least room is left (best-fit decreasing).

    >>> pack([2, 5, 3, 1], room=5)
    [[1], [2, 0], [3]]
    """
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # tokens that are left in a pack, and its number
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(free, (lengths[sample], 0))
        if place == len(free):
            packs.append([])
            left, number = room, len(packs) - 1
        else:
            left, number = free.pop(place)
        packs[number].append(sample)
        insort(free, (left - lengths[sample], number))
    return packs


class Packed(Dataset[dict[str, Any]]):
    """Samples of a causal language model, packed into sequences of at most ``room`` tokens.

    Args:
        data: samples with ``input_ids`` and ``labels``.
        columns: further columns of the samples, with a value per sample or per token.
    """

    def __init__(self, data: Any, room: int, columns: Sequence[str] = ()) -> None:
        self.data, self.columns = data, columns
        self.packs = pack([len(data[i]["input_ids"]) for i in range(len(data))], room)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        packed: dict[str, Any] = {"input_ids": [], "labels": [], "position_ids": []}
        packed |= {column: [] for column in self.columns}
        for i in self.packs[index]:
            sample = self.data[i]
            packed["input_ids"] += sample["input_ids"]
            # The last token of one sample does not predict the first one of the next.
            packed["labels"] += [IGNORED, *sample["labels"][1:]]
            packed["position_ids"] += range(len(sample["input_ids"]))
            for column in self.columns:
                packed[column] += per_token(sample, column)
        return packed


def per_token(sample: Mapping[str, Any], column: str) -> list[Any]:
    """The value of a sample for each of its tokens, because packing drops samples."""
    value = sample[column]
    return value if isinstance(value, list) else [value] * len(sample["input_ids"])


def check_packing(model: nn.Module) -> None:
    """Raise ValueError unless the model predicts packed samples as it does separate ones."""
    name = type(model).__name__
    if "position_ids" not in accepted_names(model)[0]:
        raise ValueError(f"{name} takes no positions, so it cannot separate packed samples")
    ids = torch.tensor([[5, 3, 4, 2]], device=next(model.parameters()).device)
    positions = torch.tensor([[0, 1, 0, 1]], device=ids.device)
    with torch.no_grad(), evaluating(model):
        packed = logits_of(model, {"input_ids": ids, "position_ids": positions})[:, 2:].float()
        alone = logits_of(model, {"input_ids": ids[:, 2:]}).float()
    is_half = next(model.parameters()).dtype != torch.float32
    if not (packed - alone).norm() <= (2e-2 if is_half else 1e-4) * alone.norm():
        raise ValueError(f"{name} lets packed samples see each other: train it without packing")
