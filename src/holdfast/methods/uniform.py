"""Every target counts the same: plain fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.stages import Objective

__all__ = ["Uniform"]


@dataclass(frozen=True)
class Uniform(Objective):
    """The mean loss over all targets, Loss_T = Σ loss / number of targets.

    Example:
        >>> from holdfast import Recipe, Uniform
        >>> Recipe(objective=Uniform()) == Recipe()
        True
    """
