"""Full fine-tuning: everything may change."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.stages import Trainable

__all__ = ["Full"]


@dataclass(frozen=True)
class Full(Trainable):
    """Everything may change: the identity of this stage. What was frozen before stays frozen.

    Example:
        >>> from holdfast import Full, Recipe
        >>> Recipe(trainable=Full()) == Recipe()
        True
    """
