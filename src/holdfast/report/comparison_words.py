"""Amounts in words, as the tables and the recommendation say them."""

from __future__ import annotations

import math

from holdfast.comparison.results import Measured
from holdfast.evaluate.report import Estimate, Score
from holdfast.report.words import Change, change_of, percent


def change_in(test: Measured, after: float | None = None) -> Change:
    """How a test changed, to its value or to another, in the unit that one speaks of it in."""
    value = test.after if after is None else after
    values = (test.before, value, value - test.before)
    parts = [Estimate(x, None, None, test.n) for x in values]
    return change_of(
        Score(test.name, test.metric, test.lower_is_better, parts[0], parts[1], parts[2])
    )


def short_change(change: Change) -> str:
    """A change as it stands in a table: of its unit only the per cent sign."""
    text = change.signed.removesuffix(f" {change.unit}")
    if not change.unit.startswith("%"):
        return text
    return f"{change.value:+.0f} %" if 99.5 <= change.value < math.inf else f"{text} %"


def share(value: float) -> str:
    """A loss, in per cent.

    >>> share(0.0423), share(1.676), share(0.0)
    ('4.2 %', '168 %', '0 %')
    """
    return f"{100 * value:.0f} %" if 0.1 <= value < math.inf else percent(value)


def seconds(value: float) -> str:
    """A time.

    >>> seconds(4.21), seconds(312.0), seconds(6000)
    ('4.2 s', '5.2 min', '1.7 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if value >= 1.5 * size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
