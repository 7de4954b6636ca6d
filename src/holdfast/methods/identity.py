"""The identity of each stage: with all of them, a recipe is plain fine-tuning."""

from dataclasses import dataclass

from holdfast.stages import Merging, Objective, Recall, Start, Trainable


@dataclass(frozen=True)
class Full(Trainable):
    """Everything may change. Parameters that the user has frozen stay frozen."""


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
