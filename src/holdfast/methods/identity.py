"""The identity of each stage: with all of them, a recipe is plain fine-tuning."""

from dataclasses import dataclass

from holdfast.methods._batch_norm import HoldsStatistics
from holdfast.stages import Merging, Objective, Recall, Start


@dataclass(frozen=True)
class Full(HoldsStatistics):
    """Everything may change. Parameters that the user has frozen stay frozen.

    Args:
        hold_statistics: BatchNorm normalizes with the pretrained running statistics, also in
            training, and does not change them. Hosts then warm up the learning rate and clip
            gradients by default, because training may diverge without.
    """


@dataclass(frozen=True)
class Pretrained(Start):
    """Start from the pretrained weights (PI in the RecAdam paper)."""


@dataclass(frozen=True)
class Uniform(Objective):
    """The mean loss over all targets, Loss_T = Σ loss / number of targets."""


@dataclass(frozen=True)
class NoRecall(Recall):
    """The loss preserves no old knowledge."""


@dataclass(frozen=True)
class Keep(Merging):
    """Keep the tuned model.

    Example:
        >>> from holdfast import Full, Keep, Pretrained, Recipe, Uniform
        >>> plain = Recipe(
        ...     trainable=Full(), start=Pretrained(), objective=Uniform(), merging=Keep()
        ... )
        >>> plain == Recipe()
        True
    """
