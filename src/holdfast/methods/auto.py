"""The recall of the preset ``holdfast``: chosen by the kind of model, with a learning rate."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from holdfast._torch.adapters import has_adapters, without_peft
from holdfast._torch.checks import at_least_zero
from holdfast.losses import LossFunction, Task, infer_task
from holdfast.methods.identity import NoRecall
from holdfast.methods.self_replay import SelfReplay
from holdfast.stages import Checks, MedianLoss, Recall, Recipe, SearchRange, SearchSpace

logger = logging.getLogger(__name__)

# The learning rate of a language model of 135 million parameters. It falls with the size.
_LR, _SIZE, _SLOPE = 5e-4, 135e6, 0.8
_HIGHEST = 3e-3
_ADAPTERS = 6.0  # times the learning rate of full fine-tuning


@dataclass(frozen=True)
class Auto(Recall):
    """The recall that fits the model. A run logs its choice; a recipe file keeps ``auto``.

    - A causal language model rehearses texts sampled from itself (:class:`~holdfast.SelfReplay`).
    - Any other model is fine-tuned without a recall.

    It also chooses the learning rate of a language model (:func:`default_lr`) if neither the
    recipe nor the trainer or loop sets one.

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

    @property
    def trains_on_drawn_texts(self) -> bool:
        """True unless it is off: a model that generates texts rehearses them."""
        return self.strength > 0

    def resolve(
        self, recipe: Recipe, model: nn.Module, new: Sequence[str], task: Task | LossFunction | None
    ) -> Recipe:
        recall: Recall = NoRecall()
        update = recipe.update
        if _generates_text(model, task):
            recall = SelfReplay(self.strength)
            if update.lr is None:
                size = sum(p.numel() for p in without_peft(model).parameters())
                adapters = recipe.trainable.keeps_base or has_adapters(model)
                update = replace(update, lr=default_lr(size, adapters=adapters))
        logger.info(f"the recall was resolved to {recall}")
        return replace(recipe, recall=recall, update=update)


def default_lr(parameters: int, *, adapters: bool = False) -> float:
    """The learning rate for a language model, with two significant digits.

    5e-4 for a model of 135 million parameters, less for a larger one (size to the power of −0.8),
    at most 3e-3; six times as much for adapters.

    >>> default_lr(135_000_000), default_lr(135_000_000, adapters=True)
    (0.0005, 0.003)
    """
    lr: float = min(_HIGHEST, _LR * (_SIZE / parameters) ** _SLOPE) * (
        _ADAPTERS if adapters else 1.0
    )
    return round(lr, 1 - math.floor(math.log10(lr)))


def _generates_text(model: nn.Module, task: Task | LossFunction | None) -> bool:
    """Whether a model is a causal language model."""
    try:
        return (infer_task(model) if task is None else task) == "causal_lm"
    except ValueError:  # an unknown kind
        return False
