"""HFT, half fine-tuning: freeze a random half of the matrices, drawn anew in each round.

Hui et al., *HFT: Half Fine-Tuning for Large Language Models*, https://arxiv.org/abs/2404.18466.

    θ ← θ − lr·(M ⊙ u),   M = 0 for the frozen half

Whole matrices are drawn, per category (attention, feed-forward, norm) and layer: two of the four
of attention, one of two norms. Of the three matrices of a gated feed-forward network, two are
frozen in one layer and one in the next. Embeddings and the head always train.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from holdfast._torch.checks import natural_number, positive_integer, share
from holdfast._torch.layers import block_of, category_of, head_of, within
from holdfast.methods._freezing import Freezing, enter, set_phases, trainable_names
from holdfast.stages import Checks, Run


@dataclass(frozen=True)
class HFT(Freezing):
    """Freeze half of the parameter matrices of each category and layer.

    A matrix is frozen together with its bias. Parameters outside of the numbered layers
    (embeddings, the head, the last norm) always train. With several rounds,
    DistributedDataParallel needs ``find_unused_parameters=True``.

    Args:
        frozen: the share of frozen matrices; 0 is full fine-tuning.
        rounds: the number of equal parts of the run, each with its own draw. The paper draws once
            per task of a sequence of tasks.
        seed: seeds the draw. If None, the run's seed is used.

    Example:
        >>> from holdfast import HFT, Recipe
        >>> Recipe(trainable=HFT(rounds=3)).name
        'hft'
    """

    checks: ClassVar[Checks] = {"frozen": share, "rounds": positive_integer, "seed": natural_number}
    neutral: ClassVar[dict[str, Any] | None] = {"frozen": 0.0}
    needs_pretrained_start: ClassVar[str] = "freezes half of the matrices"

    frozen: float = 0.5
    rounds: int = 1
    seed: int | None = None

    def prepare(self, run: Run) -> nn.Module:
        """Draw the frozen half of every round."""
        model = run.model
        head = head_of(model)
        groups = matrices(model, keep=(*run.new, *([head] if head else [])))
        if not groups:
            raise ValueError(
                f"{type(model).__name__} has no matrices to freeze: HFT needs trainable matrices "
                "in numbered layers (nn.ModuleList or nn.Sequential), apart from head and "
                "embeddings"
            )
        generator = torch.Generator().manual_seed(run.seed if self.seed is None else self.seed)
        owner = {name: name.rpartition(".")[0] for name, _ in model.named_parameters()}
        draws = [draw_frozen(groups, self.frozen, generator) for _ in range(self.rounds)]
        set_phases(model, [[name for name in owner if owner[name] in drawn] for drawn in draws])
        return model

    def advance(self, model: nn.Module, update: int, total_updates: int) -> None:
        enter(model, min((update - 1) * self.rounds // total_updates, self.rounds - 1))


def draw_frozen(
    groups: Mapping[tuple[str, int], Sequence[str]], fraction: float, generator: torch.Generator
) -> set[str]:
    """Draw a fraction of the names of each category and layer.

    If a layer's share is not an integer, layers alternate: up to each layer, the number of drawn
    names of a category is the fraction, rounded up or down.

    Example:
        >>> groups = {("ffn", layer): [f"{layer}.up", f"{layer}.down", f"{layer}.gate"]
        ...           for layer in range(4)}
        >>> drawn = draw_frozen(groups, 0.5, torch.Generator().manual_seed(0))
        >>> [sum(name in drawn for name in names) for names in groups.values()]
        [2, 1, 2, 1]
    """
    drawn: set[str] = set()
    for category in sorted({category for category, _ in groups}):
        # Systematic sampling: ⌊fraction·n + u⌋ of the first n, with one u for all layers.
        offset = float(torch.rand((), generator=generator, dtype=torch.float64))
        seen = 0
        for layer in sorted(layer for c, layer in groups if c == category):
            names = groups[category, layer]
            before, seen = seen, seen + len(names)
            count = math.floor(fraction * seen + offset) - math.floor(fraction * before + offset)
            order = torch.randperm(len(names), generator=generator).tolist()
            drawn.update(names[i] for i in order[:count])
    return drawn


def matrices(model: nn.Module, keep: Sequence[str] = ()) -> dict[tuple[str, int], list[str]]:
    """The modules with trainable parameters in the numbered layers, by (category, layer).

    Embeddings and the parts in ``keep`` are left out.
    """
    trainable = set(trainable_names(model))
    groups: dict[tuple[str, int], list[str]] = {}
    numbers: dict[str, int] = {}
    for name, block in block_of(model).items():
        if block is None or name not in trainable or within(name, keep):
            continue
        owner = name.rpartition(".")[0]
        module = model.get_submodule(owner)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        key = category_of(owner[len(block) :], module), numbers.setdefault(block, len(numbers))
        if owner not in groups.setdefault(key, []):
            groups[key].append(owner)
    return groups
