"""The recall of the preset ``holdfast``: chosen by the kind of model, with a learning rate."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import nn

from holdfast._torch.adapters import has_adapters, without_peft
from holdfast._torch.checks import at_least_zero
from holdfast._torch.layers import head_of, within
from holdfast.losses import LossFunction, Task, infer_task
from holdfast.methods._batch_norm import HoldsStatistics, statistics_of
from holdfast.methods.features import Features, text_encoder
from holdfast.methods.identity import Full, Keep, NoRecall
from holdfast.methods.lp_ft import LPFT
from holdfast.methods.self_replay import SelfReplay
from holdfast.methods.wise_ft import WiseFT
from holdfast.stages import Checks, MedianLoss, Recall, Recipe, SearchRange, SearchSpace

logger = logging.getLogger(__name__)

Kind = Literal["language", "encoder", "image"]
# The learning rate of a model of some size; it falls with the size.
_RATES: dict[Kind, tuple[float, float]] = {
    "language": (5e-4, 135e6), "encoder": (1e-4, 22.7e6), "image": (5e-4, 2.35e6),
}  # fmt: skip
_SLOPE, _HIGHEST = 0.8, 1e-3
_ADAPTERS = 6.0  # times the learning rate of full fine-tuning
_ALPHA = 0.7  # the share of the tuned weights of an image model


@dataclass(frozen=True)
class Auto(Recall):
    """The recall that fits the model. A run logs its choice; a recipe file keeps ``auto``.

    - A causal language model rehearses texts sampled from itself (:class:`~holdfast.SelfReplay`).
    - An encoder of texts, or another classifier of texts, keeps its features
      (:class:`~holdfast.Features`).
    - An image model keeps its features too. A new linear head is fitted first
      (:class:`~holdfast.LPFT`), BatchNorm's statistics are held, and the weights are interpolated
      in the end (:class:`~holdfast.WiseFT`), unless the recipe has other methods in these stages.
    - Any other model is fine-tuned without a recall.

    It also chooses the learning rate (:func:`default_lr`) if neither the recipe nor the trainer or
    loop sets one.

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
        task = _task_of(model, task)
        kind = kind_of(model, new, task)
        recall: Recall = NoRecall()
        if kind == "language":
            recall = SelfReplay(self.strength)
        elif kind is not None:
            recall = Features(self.strength * Features.strength)
        chosen = replace(recipe, recall=recall)
        if kind == "image" and self.strength:
            chosen = _for_images(chosen, without_peft(model), new, task)
        others = [m for m in (chosen.trainable, chosen.merging) if m not in dict(recipe).values()]
        logger.info(f"the recall was resolved to {', with '.join(map(str, (recall, *others)))}")
        if kind is not None and recipe.update.lr is None:
            size = sum(p.numel() for p in without_peft(model).parameters())
            adapters = recipe.trainable.keeps_base or has_adapters(model)
            lr = default_lr(size, adapters=adapters, kind=kind)
            chosen = replace(chosen, update=replace(chosen.update, lr=lr))
        return chosen


def default_lr(parameters: int, *, adapters: bool = False, kind: Kind = "language") -> float:
    """The learning rate for a model, with two significant digits.

    5e-4 for a language model of 135 million parameters, 1e-4 for an encoder of 22.7 million, 5e-4
    for an image model of 2.35 million; less for a larger one (size to the power of −0.8), at most
    1e-3; six times as much for adapters.

    >>> default_lr(135_000_000), default_lr(135_000_000, adapters=True)
    (0.0005, 0.003)
    >>> default_lr(110_000_000, kind="encoder")
    2.8e-05
    """
    rate, size = _RATES[kind]
    lr: float = min(_HIGHEST, rate * (size / parameters) ** _SLOPE)
    lr *= _ADAPTERS if adapters else 1.0
    return round(lr, 1 - math.floor(math.log10(lr)))


def kind_of(model: nn.Module, new: Sequence[str], task: Task | LossFunction | None) -> Kind | None:
    """The kind of a model that has a recall; None for any other."""
    inner = without_peft(model)
    if task == "causal_lm":
        return "language"
    if not (task is None or isinstance(task, str)):
        return None
    if (encoder := text_encoder(inner)) is not None:
        config = getattr(encoder, "config", None)
        return None if getattr(config, "is_encoder_decoder", False) else "encoder"
    sees = any(isinstance(module, nn.Conv2d) for module in inner.modules())
    return "image" if sees and (new or head_of(inner)) else None


def _for_images(
    recipe: Recipe, model: nn.Module, new: Sequence[str], task: Task | LossFunction | None
) -> Recipe:
    """Fill the stages that the recipe leaves at their defaults."""
    trainable, merging = recipe.trainable, recipe.merging
    head = _linear_head(model, new)
    if trainable == Full() and head and task in ("classification", "regression", "multi_label"):
        trainable = LPFT(head)
    if isinstance(trainable, HoldsStatistics) and statistics_of(model):
        trainable = replace(trainable, hold_statistics=True)
    return replace(
        recipe, trainable=trainable, merging=WiseFT(_ALPHA) if merging == Keep() else merging
    )


def _linear_head(model: nn.Module, new: Sequence[str]) -> str | None:
    """The name of the linear layer that is all of the new parts; None if there is more."""
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if within(name, new) and any(True for _ in module.parameters(recurse=False))
    ]
    return layers[0][0] if len(layers) == 1 and isinstance(layers[0][1], nn.Linear) else None


def _task_of(model: nn.Module, task: Task | LossFunction | None) -> Task | LossFunction | None:
    try:
        return infer_task(model) if task is None else task
    except ValueError:  # an unknown kind
        return None
