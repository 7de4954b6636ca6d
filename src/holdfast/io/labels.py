"""Labels: what a row says, and what it means to a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import nn

from holdfast._torch.names import shorten

__all__ = [
    "as_number", "class_name", "id_in", "is_regression", "label_id", "target_in", "target_of",
    "texts_of",
]  # fmt: skip

#: Pairs of columns that are two texts of one sample.
TEXTS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"))


def texts_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The text columns of a row: a pair or one; none if it holds no text."""
    for pair in TEXTS:
        if all(isinstance(row.get(column), str) for column in pair):
            return pair
    return next(((c,) for c in ("text", "sentence") if isinstance(row.get(c), str)), ())


def as_number(label: Any) -> float | None:
    """A label as a number, also where a CSV file has it as text; None if it is none.

    >>> as_number("4.75"), as_number(3), as_number("red"), as_number("nan")
    (4.75, 3.0, None, None)
    """
    try:
        number = float(label)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def class_name(label: Any) -> str:
    """What a class is called: a text as it is, a whole number by its digits.

    >>> class_name("red"), class_name(3), class_name(3.0), class_name(True)
    ('red', '3', '3', '1')
    """
    if isinstance(label, str):
        return label.strip()
    number = as_number(label)
    if number is None:
        raise ValueError(f"{label!r} is no label: a label is a text or a number")
    return str(int(number)) if number == int(number) else str(label)


def is_regression(config: Any) -> bool:
    """Whether a classifier's configuration is that of a regression: one number, no classes."""
    problem = getattr(config, "problem_type", None)
    return problem == "regression" or (problem is None and getattr(config, "num_labels", 0) == 1)


def target_of(model: nn.Module, label: Any, name: str) -> int | float:
    """What a model is to say: the number of a class, or the number itself of a regression."""
    return target_in(getattr(model, "config", None), label, name)


def target_in(config: Any, label: Any, name: str) -> int | float:
    """The same by the model's configuration."""
    if not is_regression(config):
        return id_in(config, label, name)
    number = as_number(label)
    if number is None:
        raise ValueError(f"{name}: the model predicts a number, and the label {label!r} is none")
    return number


def label_id(model: nn.Module, label: Any, name: str) -> int:
    """The index of a class that a row names by the model's own word for it, or by its number.

    Where one of the model's words is a number itself, a label is a word and no index.
    """
    return id_in(getattr(model, "config", None), label, name)


def id_in(config: Any, label: Any, name: str) -> int:
    """The same by the model's configuration."""
    index = index_in(config, label)
    if index is None:
        known = _known(config)
        raise ValueError(
            f"{name}: the label {label!r} is none of the model's {len(known) or ''} classes"
            + (f": {shorten(list(known))}" if known else "")
        )
    return index


def index_in(config: Any, label: Any) -> int | None:
    """The index of a class by the model's configuration; None if it has no such class."""
    known, word = _known(config), class_name(label)
    if word in known:
        return known[word]
    number = as_number(label)
    if number is None or number != int(number) or number < 0:
        return None
    if known and (number >= len(known) or _any_number(tuple(known))):
        return None
    return int(number)


def _known(config: Any) -> dict[str, int]:
    """The classes of a model by their names, in their order."""
    names: Mapping[Any, str] = getattr(config, "id2label", None) or {}
    return {str(name): int(i) for i, name in sorted(names.items(), key=lambda item: int(item[0]))}


@lru_cache  # the classes are the same for every row
def _any_number(names: tuple[str, ...]) -> bool:
    return any(as_number(name) is not None for name in names)


def distinct(labels: Sequence[Any]) -> list[str]:
    """The classes that occur: numbers in their order, other names in theirs.

    >>> distinct(["10", "9", "10"]), distinct(["b", "a"]), distinct([2, 0])
    (['9', '10'], ['a', 'b'], ['0', '2'])
    """
    found = {class_name(label) for label in labels}
    if all(name.lstrip("-").isdigit() for name in found):
        return sorted(found, key=int)
    return sorted(found)
