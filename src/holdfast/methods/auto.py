"""The recall of the preset ``holdfast``: chosen by the kind of model, with a learning rate."""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import nn

from holdfast._torch.adapters import has_adapters, without_peft
from holdfast._torch.checks import at_least_zero
from holdfast._torch.head_tap import output_layer
from holdfast._torch.layers import head_of, within
from holdfast._torch.multimodal import text_part
from holdfast.losses import LossFunction, Task, infer_task
from holdfast.methods._batch_norm import HoldsStatistics, statistics_of
from holdfast.methods.features import Features, text_encoder
from holdfast.methods.identity import Full, Keep, NoRecall
from holdfast.methods.lp_ft import LPFT
from holdfast.methods.self_replay import SelfReplay
from holdfast.methods.wise_ft import WiseFT
from holdfast.stages import (
    Checks,
    MedianLoss,
    Recall,
    Recipe,
    SearchRange,
    SearchSpace,
    TrainingSize,
)

logger = logging.getLogger(__name__)

Kind = Literal["language", "encoder", "image"]
# The learning rate of a model of some size; it falls with the size.
_RATES: dict[Kind, tuple[float, float]] = {
    "language": (5e-4, 135e6), "encoder": (1e-4, 22.7e6), "image": (5e-4, 2.35e6),
}  # fmt: skip
_SLOPE, _HIGHEST = 0.8, 1e-3
# That of a larger language model, and the slope beyond. It is not for adapters.
_LARGER, _LARGER_SLOPE = (2.5e-5, 494e6), 0.5
_ADAPTERS = 6.0  # times the learning rate of full fine-tuning
# The learning rate of a language model falls with fewer samples and with more epochs.
_SAMPLES, _LEAST = (600, 3000), 0.1
_ONLY_HEAD = 1e-3  # the learning rate of a head on frozen features
_FEATURES: dict[Kind, float] = {"encoder": 0.1, "image": 0.3}  # the strength of the recall
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
    - Any other model is fine-tuned without a recall. A warning gives the reason.

    If only the head of an encoder or an image model is trained (:class:`~holdfast.LinearProbe`),
    its features cannot move, and it needs no recall.

    It also chooses the learning rate (:func:`default_lr`, or 1e-3 for such a head) if neither the
    recipe nor the trainer or loop sets one. That of a language model depends on the number of
    samples and epochs as well. In the Trainer and TRL, the default ``learning_rate`` counts as not
    set: to train with it, name it in the recipe, ``update=AdamWUpdate(lr=5e-5)``.

    Args:
        strength: the strength of the recall, relative to what is chosen for the model; 0 turns it
            off.

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
        self,
        recipe: Recipe,
        model: nn.Module,
        new: Sequence[str],
        task: Task | LossFunction | None,
        size: TrainingSize,
    ) -> Recipe:
        model, adapters = without_peft(model), has_adapters(model) or recipe.trainable.keeps_base
        task = _task_of(model, task)
        try:
            kind = kind_of(model, new, task)
        except ValueError as reason:
            logger.warning(
                f"holdfast has no recall for {type(model).__name__}: {reason}. The loss preserves "
                "no old knowledge, as in plain fine-tuning"
            )
            return replace(recipe, recall=NoRecall())
        if kind != "language" and recipe.trainable.trains_only_head:
            logger.info(
                f"the recipe was resolved to {NoRecall()}: only the head is trained, so the "
                "features cannot move"
            )
            return _with_lr(replace(recipe, recall=NoRecall()), _ONLY_HEAD)
        recall: Recall
        if kind == "language":
            recall = SelfReplay(self.strength)
        else:
            recall = Features(self.strength * _FEATURES[kind])
        chosen = replace(recipe, recall=recall)
        if kind == "image" and self.strength:
            chosen = _for_images(chosen, model, new, task)
        others = [m for m in (chosen.trainable, chosen.merging) if m not in dict(recipe).values()]
        logger.info(f"the recipe was resolved to {', '.join(map(str, (recall, *others)))}")
        like: Kind = "language" if kind == "encoder" and _is_decoder(model) else kind
        lr = default_lr(_size(model), adapters=adapters, kind=like, size=size)
        return _with_lr(chosen, lr)


def default_lr(
    parameters: int,
    *,
    adapters: bool = False,
    kind: Kind = "language",
    size: TrainingSize = TrainingSize(),  # noqa: B008 (immutable)
) -> float:
    """The learning rate for a model, with two significant digits.

    5e-4 for a language model of 135 million parameters, 1e-4 for an encoder of 22.7 million, 5e-4
    for an image model of 2.35 million; less for a larger one (size to the power of −0.8), at most
    1e-3. Adapters of any of them get six times as much. If all weights of a larger language model
    are trained, it gets still less: 2.5e-5 for 494 million parameters, and beyond it falls with the
    square root of the size. A decoder with a classification head counts as a language model.

    That of a language model is divided by the number of epochs. With fewer than 3,000 samples it
    falls with the square root of their number, down to 600. A tenth of it is the least.

    >>> default_lr(135_000_000), default_lr(135_000_000, adapters=True)
    (0.0005, 0.003)
    >>> default_lr(135_000_000, size=TrainingSize(samples=750, epochs=2))
    0.00013
    >>> default_lr(110_000_000, kind="encoder")
    2.8e-05
    """
    lr = _by_size(max(1, parameters), kind, adapters)
    if kind == "language":
        least, enough = _SAMPLES
        samples = enough if size.seen is None else min(max(least, size.seen), enough)
        lr *= max(_LEAST, math.sqrt(samples / enough) / max(1.0, size.epochs))
    return round(lr, 1 - math.floor(math.log10(lr)))


def _by_size(parameters: int, kind: Kind, adapters: bool) -> float:
    """The learning rate for many samples and one epoch."""
    rate, usual = _RATES[kind]
    found: float = min(_HIGHEST, rate * (usual / parameters) ** _SLOPE)
    if adapters:
        return _ADAPTERS * found
    if kind != "language" or parameters <= usual:
        return found
    lower, larger = _LARGER
    if parameters < larger:
        slope = math.log(rate / lower) / math.log(larger / usual)
        return float(rate * (usual / parameters) ** slope)
    return float(lower * (larger / parameters) ** _LARGER_SLOPE)


def kind_of(model: nn.Module, new: Sequence[str], task: Task | LossFunction | None) -> Kind:
    """The kind of a model. ValueError, with the reason, if there is no recall for it."""
    if task == "causal_lm":
        if not hasattr(model, "get_output_embeddings"):
            raise ValueError("it is no language model of transformers")
        return "language"
    if not (task is None or isinstance(task, str)):
        raise ValueError("a loss function as task= hides the outputs")
    if (encoder := text_encoder(model)) is not None:
        if getattr(getattr(encoder, "config", None), "is_encoder_decoder", False):
            raise ValueError("it is an encoder-decoder model")
        if task is None:
            raise ValueError("its task is not known, so neither are the samples' targets")
        return "encoder"
    if not _takes_images(model):
        raise ValueError(
            "it is no model of texts, and no image model with two-dimensional convolutions"
        )
    if not (new or head_of(model)):
        raise ValueError("its head is not known (name a new one in new=)")
    return "image"


def _takes_images(model: nn.Module) -> bool:
    """Whether a model has two-dimensional convolutions, and is no audio or video model.

    Such models may have these convolutions too. Those of transformers are known by their inputs.
    """
    named: list[Any] = [part for part in model.modules() if hasattr(part, "main_input_name")]
    if any(m.main_input_name != "pixel_values" or hasattr(m.config, "num_frames") for m in named):
        return False
    return any(isinstance(part, nn.Conv2d) for part in model.modules())


def _with_lr(recipe: Recipe, lr: float) -> Recipe:
    """The recipe with a learning rate, unless it has its own."""
    if recipe.update.lr is not None:
        return recipe
    return replace(recipe, update=replace(recipe.update, lr=lr))


def _is_decoder(model: nn.Module) -> bool:
    """Whether transformers has a causal language model with the body of a model, but no masked one.

    Classes of encoders, such as BERT, have both.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    config = type(getattr(text_encoder(model), "config", None))
    return config in MODEL_FOR_CAUSAL_LM_MAPPING and config not in MODEL_FOR_MASKED_LM_MAPPING


def _size(model: nn.Module) -> int:
    """The number of parameters of a model; of a multimodal one, those of its decoder.

    An output layer that is not the embedding does not count: some copies of a model share the two,
    and some do not. DeepSpeed empties the parameters that it shares among ranks.
    """
    if getattr(model, "is_quantized", False):  # several parameters may be packed into one number
        config = copy.deepcopy(cast(Any, model).config)
        del config.quantization_config
        with torch.device("meta"):
            model = type(model)(config)
    own = _own_output_layer(model)
    counted = (p for p in text_part(model).parameters() if id(p) not in own)
    return sum(cast(int, getattr(p, "ds_numel", p.numel())) for p in counted)


def _own_output_layer(model: Any) -> set[int]:
    """The ids of the parameters of an output layer that are not those of the embedding."""
    head = output_layer(model)
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # of other models
        return set()
    if head is None or embedding is None:
        return set()
    return {*map(id, head.parameters())} - {*map(id, embedding.parameters())}


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
