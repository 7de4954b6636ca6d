"""The recall of the preset ``holdfast``: chosen by the kind of model, with a learning rate."""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from holdfast._torch.adapters import has_adapters, without_peft
from holdfast._torch.checks import at_least_zero
from holdfast.losses import infer_task
from holdfast.methods.identity import NoRecall
from holdfast.methods.self_replay import SelfReplay
from holdfast.stages import Checks, MedianLoss, Recall, Recipe, Run, SearchRange, SearchSpace

logger = logging.getLogger(__name__)

#: The learning rate of a language model of 135 million parameters. It falls with the size.
_LR, _SIZE, _SLOPE = 5e-4, 135e6, 0.8
_HIGHEST = 3e-3
_ADAPTERS = 6.0  # times the learning rate of full fine-tuning


@dataclass(frozen=True)
class Auto(Recall):
    """The recall that fits the model. A run logs what it became; a recipe file keeps ``auto``.

    - A causal language model rehearses texts that it writes itself
      (:class:`~holdfast.SelfReplay`).
    - Any other model is fine-tuned without a recall.

    It also has a learning rate, used if neither the recipe nor the trainer or loop sets one:
    5e-4 for a language model of 135 million parameters, less for a larger one (size to the power of
    −0.8), six times as much for adapters.

    Args:
        strength: the strength of the chosen recall, relative to its default; 0 turns it off.

    Example:
        >>> from holdfast import Recipe
        >>> Recipe.preset("holdfast").recall
        Auto(strength=1.0)
    """

    checks: ClassVar[Checks] = {"strength": at_least_zero}
    neutral: ClassVar[dict[str, Any] | None] = {"strength": 0.0}
    uses_base: ClassVar[bool] = True

    strength: float = 1.0

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"strength": SearchRange(0.1, 10.0, 1.0)}

    def resolve(self, recipe: Recipe, run: Run) -> Recipe:
        recall = SelfReplay(self.strength) if _writes(run.model) else NoRecall()
        logger.info(f"holdfast: {recall}")
        return replace(recipe, recall=recall)

    def default_lr(self, run: Run) -> float | None:
        if not _writes(run.model):
            return None
        size = sum(p.numel() for p in without_peft(run.model).parameters())
        lr = min(_HIGHEST, _LR * (_SIZE / size) ** _SLOPE)
        if run.recipe.trainable.keeps_base or has_adapters(run.model):
            lr *= _ADAPTERS
        return _rounded(lr)


def _writes(model: nn.Module) -> bool:
    """Whether a model is a causal language model."""
    try:
        return infer_task(model) == "causal_lm"
    except ValueError:  # an unknown kind
        return False


def _rounded(x: float) -> float:
    """Two significant digits, so that the learning rate can be written down.

    >>> _rounded(1.7345e-4)
    0.00017
    """
    return round(x, 1 - math.floor(math.log10(x)))
