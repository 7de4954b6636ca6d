"""Labels of rows, and the targets that they mean to a model.

Functions that take a ``config`` read a transformers model configuration, or any object with the
same attributes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from holdfast._torch.names import shorten

#: Pairs of columns that hold the two texts of one sample.
_PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence"))


def text_columns(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the text columns of a row: a pair, one column, or none."""
    for pair in _PAIRS:
        if all(isinstance(row.get(column), str) for column in pair):
            return pair
    return next(((c,) for c in ("text", "sentence") if isinstance(row.get(c), str)), ())


def as_number(label: Any) -> float | None:
    """Return a label as a finite number, also if it is text as in a CSV file; else None.

    >>> as_number("4.75"), as_number(3), as_number("red"), as_number("nan")
    (4.75, 3.0, None, None)
    """
    try:
        number = float(label)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def class_name(label: Any) -> str:
    """Return the name of a class: text unchanged, a whole number as its digits.

    >>> class_name("red"), class_name(3), class_name(3.0), class_name(True)
    ('red', '3', '3', '1')
    """
    if isinstance(label, str):
        return label.strip()
    number = as_number(label)
    if number is None:
        raise ValueError(f"a label must be text or a finite number, got {label!r}")
    return str(int(number)) if number == int(number) else str(label)


def class_names(labels: Sequence[Any]) -> list[str]:
    """Return the distinct class names, sorted as numbers if all of them are numbers.

    >>> class_names(["10", "9", "10"]), class_names(["b", "a"]), class_names([2, 0])
    (['9', '10'], ['a', 'b'], ['0', '2'])
    """
    found = {class_name(label) for label in labels}
    if all(name.lstrip("-").isdigit() for name in found):
        return sorted(found, key=int)
    return sorted(found)


def is_regression(config: Any) -> bool:
    """Whether a classifier's configuration describes a regression: one number, no classes."""
    problem = getattr(config, "problem_type", None)
    return problem == "regression" or (problem is None and getattr(config, "num_labels", 0) == 1)


def target_of(config: Any, label: Any, name: str) -> int | float:
    """Return the target of a label: a class index, or the number itself for a regression.

    Args:
        config: the model's configuration.
        label: a class name of the model, a class index, or a number for a regression. If any class
            name of the model is itself a number, the label is a name and never an index.
        name: the data's name, for errors.
    """
    if is_regression(config):
        number = as_number(label)
        if number is None:
            raise ValueError(f"{name}: the model predicts a number, but the label is {label!r}")
        return number
    index = class_index(config, label)
    if index is None:
        known = _index_by_name(config)
        classes = f"{len(known)} classes: {shorten(list(known))}" if known else "classes"
        raise ValueError(f"{name}: the label {label!r} is not one of the model's {classes}")
    return index


def class_index(config: Any, label: Any) -> int | None:
    """Return the index of a class in the model's configuration; None if it has no such class."""
    known, word = _index_by_name(config), class_name(label)
    if word in known:
        return known[word]
    number = as_number(label)
    if number is None or number != int(number) or number < 0:
        return None
    if known and (number >= len(known) or _any_number(tuple(known))):
        return None
    return int(number)


def _index_by_name(config: Any) -> dict[str, int]:
    names: Mapping[Any, str] = getattr(config, "id2label", None) or {}
    return {str(name): int(i) for i, name in sorted(names.items(), key=lambda item: int(item[0]))}


@lru_cache  # called once per row with the same classes
def _any_number(names: tuple[str, ...]) -> bool:
    return any(as_number(name) is not None for name in names)
