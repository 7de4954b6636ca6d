"""The usual start: the pretrained weights."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.stages import Start

__all__ = ["Pretrained"]


@dataclass(frozen=True)
class Pretrained(Start):
    """Start from the pretrained weights: the identity of this stage, PI in the RecAdam paper.

    Example:
        >>> from holdfast import Pretrained, Recipe
        >>> Recipe(start=Pretrained()) == Recipe()
        True
    """
