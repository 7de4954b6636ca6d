"""What a plan's models are tested on, ready for :func:`holdfast.measure`: all of it, or a half."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.comparison.plan import Plan
from holdfast.evaluate.suite import named
from holdfast.io.rows import is_text, open_rows, read_text

__all__ = ["inputs_of"]


def inputs_of(plan: Plan) -> dict[str, Any]:
    """The texts, rows and targets of a plan, by name."""
    asked, half = plan.measuring, plan.measuring.half
    text, data = named(asked.text, "text"), named(asked.data, "data")
    target = named(plan.target, "target")
    pairs = named(asked.similarity, "similarity")
    if half is None:
        return {"text": asked.text, "data": data, "target": target, "similarity": pairs}
    return {
        "text": {name: half_of_text(read_text(Path(path)), half) for name, path in text.items()},
        "data": {name: _half(path, half) for name, path in data.items()},
        "target": {name: _half(path, half) for name, path in target.items()},
        "similarity": {name: _half(path, half) for name, path in pairs.items()},
    }


def _half(source: str, half: int) -> Sequence[Any]:
    if is_text(Path(source)) and Path(source).is_file():
        return [{"text": half_of_text(read_text(Path(source)), half)}]
    rows = open_rows(source)
    if len(rows) < 2:
        raise ValueError(f"{source} has {len(rows)} row: two halves need at least two")
    return rows[half::2]


def half_of_text(text: str, half: int) -> str:
    """The first or the second half of a text, cut between two lines if it has any.

    >>> half_of_text("to be\\nor not\\nto be", 0), half_of_text("to be\\nor not\\nto be", 1)
    ('to be\\n', 'or not\\nto be')
    """
    middle = text.rfind("\n", 0, len(text) // 2) + 1 or len(text) // 2
    return text[middle:] if half else text[:middle]
