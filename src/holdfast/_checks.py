"""Validation of numbers, with errors that name the setting."""

from __future__ import annotations

import math
from typing import Any


def at_least_zero(name: str, value: Any) -> float:
    """A finite number ≥ 0, as a plain float."""
    number = _number(name, value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be a finite number ≥ 0, got {value!r}")
    return number


def above_zero(name: str, value: Any) -> float:
    """A finite number > 0, as a plain float."""
    number = _number(name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return number


def _number(name: str, value: Any) -> float:
    if isinstance(value, str | bytes | bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, got {value!r}") from error
