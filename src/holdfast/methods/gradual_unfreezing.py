"""Gradual unfreezing (ULMFiT): unfreeze one layer after another, starting with the head.

Howard and Ruder, *Universal Language Model Fine-tuning for Text Classification*, ACL 2018,
https://arxiv.org/abs/1801.06146. "We first unfreeze the last layer and fine-tune all unfrozen
layers for one epoch. We then unfreeze the next lower frozen layer and repeat, until we fine-tune
all layers". The last layer is the least general, and a trained head disturbs lower layers less.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from holdfast._torch.checks import above_zero, share
from holdfast._torch.layers import head_of, layer_of, within
from holdfast.methods._freezing import Freezing, enter, phase_count, set_phases, trainable_names
from holdfast.stages import Checks, Run


@dataclass(frozen=True)
class GradualUnfreezing(Freezing):
    """First train only the top layer, then unfreeze one layer at a time from the top down.

    The top layer is everything after the last numbered layer: the last norm, the pooler, the head.
    A head that shares its weights with the embeddings is unfrozen with them, at the end.
    DistributedDataParallel needs ``find_unused_parameters=True``.

    Args:
        until: the share of the run after which all layers train; layers are unfrozen at equal
            intervals. 0 is full fine-tuning. (The paper: one epoch per layer.)

    Example:
        >>> from holdfast import GradualUnfreezing, Recipe
        >>> Recipe(trainable=GradualUnfreezing(until=0.3)).name
        'gradual-unfreezing'
    """

    checks: ClassVar[Checks] = {"until": share}
    neutral: ClassVar[dict[str, Any] | None] = {"until": 0.0}
    needs_pretrained_start: ClassVar[str] = "trains the top layers first"

    until: float = 0.5

    def prepare(self, run: Run) -> nn.Module:
        """Number the layers; in phase n, n + 1 of them train."""
        model = run.model
        head = head_of(model)
        always = (*run.new, *([head] if head else []))
        trainable = trainable_names(model)
        layers = {n: layer for n, layer in layer_of(model).items() if n in set(trainable)}
        from_the_top = sorted(set(layers.values()), reverse=True)
        if not from_the_top:
            raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient")
        if self.until > 0 and len(from_the_top) == 1:
            raise ValueError(
                f"GradualUnfreezing unfreezes layers one by one, but {type(model).__name__} has "
                "one trainable layer (layers are the children of an nn.ModuleList or "
                "nn.Sequential, and the parts before and after them). Leave it out"
            )
        frozen = [
            [n for n, layer in layers.items() if layer < lowest and not within(n, always)]
            for lowest in from_the_top
        ]
        set_phases(model, frozen)
        return model

    def advance(self, model: nn.Module, update: int, total_updates: int) -> None:
        enter(model, layers_free(update, total_updates, phase_count(model), self.until) - 1)


def layers_free(update: int, total_updates: int, layers: int, until: float) -> int:
    """The number of layers, from the top, that train in an update, counted from 1.

    >>> [layers_free(update, 8, layers=3, until=0.5) for update in range(1, 9)]
    [1, 1, 2, 2, 3, 3, 3, 3]
    """
    done = update - 1
    if done >= until * total_updates:
        return layers
    # The small number compensates rounding errors if the quotient is an integer.
    return min(layers, 1 + math.floor(done * (layers - 1) / (until * total_updates) + 1e-9))


def slanted_triangular(
    update: int, total_updates: int, *, cut: float = 0.1, ratio: float = 32
) -> float:
    """The slanted triangular schedule of ULMFiT, as a factor of the peak learning rate.

    Howard and Ruder, ACL 2018, https://arxiv.org/abs/1801.06146, equation 3. The rate rises
    linearly from 1/ratio to 1 over the first ``cut`` of the run, and falls back over the rest:

        cut = ⌊T·cut_frac⌋
        p = t/cut  if t < cut,  else 1 − (t − cut)/(cut·(1/cut_frac − 1))
        η_t = η_max · (1 + p·(ratio − 1))/ratio

    Args:
        update: t, counted from 0 as in torch's ``LambdaLR``. After the end the rate stays low.
        total_updates: T.
        cut: cut_frac, the fraction of the run in which the rate rises.
        ratio: how many times smaller than the peak the lowest rate is.

    Example:
        >>> import torch
        >>> from holdfast.optim import slanted_triangular
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
        >>> scheduler = torch.optim.lr_scheduler.LambdaLR(
        ...     optimizer, lambda update: slanted_triangular(update, total_updates=100)
        ... )
        >>> scheduler.get_last_lr()
        [0.0003125]
        >>> slanted_triangular(10, 100)
        1.0
    """
    total = above_zero("total_updates", total_updates)
    if not 0 < above_zero("cut", cut) < 1:
        raise ValueError(f"cut must be a fraction of the run, in (0, 1), got {cut!r}")
    if above_zero("ratio", ratio) < 1:
        raise ValueError(f"ratio must be at least 1, got {ratio!r}")
    if update < 0:
        raise ValueError(f"update is counted from 0, got {update!r}")
    peak = int(total * cut)  # 0 in a very short run: it begins at the peak
    if update < peak:
        p = update / peak
    else:
        p = max(0.0, 1 - (update - peak) / (peak * (1 / cut - 1) or total))
    return (1 + p * (ratio - 1)) / ratio
