"""Names, amounts and lists in words, for every form of the report."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.evaluate.report import Estimate, Score

Outcome = Literal["lost", "gained", "same", "unsure", "broken"]

_SHARES = re.compile("acc|agree|match|em$|f1|mc[12]$|pass$|precision|recall|share")
_PERPLEXITIES = ("perplexity", "ppl")
#: By unit, where a loss stops being little and where it starts to be much.
_STEPS = {"points": (1.0, 5.0), "nats a token": (0.05, 0.25), "% in perplexity": (5.0, 28.0)}
#: Samples from which on an interval says something.
FEWEST = 8
_STEPS_ELSE = (2.0, 10.0)  # per cent of what it was


@dataclass(frozen=True)
class Change:
    """The change of a score in the unit that one speaks of it in.

    Attributes:
        unit: ``"points"``, ``"nats a token"``, ``"% in perplexity"`` or ``"in"`` and the metric.
        value, low, high: after − before and its interval, in that unit.
        outcome: lost or gained only if the interval excludes 0, the same if it does not; unsure
            without an interval, broken if it is not a finite number.
        severity: of the change's size: below 1 little, below 2 some, else much.
    """

    unit: str
    value: float
    low: float | None
    high: float | None
    outcome: Outcome
    severity: float

    @property
    def amount(self) -> str:
        """Its size: ``3.1 points``; of a perplexity that rose by much, ``a factor of 25``."""
        if (times := self.times) is not None:
            return f"a factor of {times} {self.unit.removeprefix('% ')}"
        return _amount(abs(self.value), self.unit)

    @property
    def times(self) -> str | None:
        """How many times as large a perplexity is, from three times on: ``25``."""
        factor = 1 + self.value / 100
        if not self.unit.startswith("%") or not 3 <= factor < math.inf:
            return None
        if factor >= 1e6:
            return "over 1,000,000"
        return f"{factor:.1f}" if factor < 9.95 else f"{factor:,.0f}"

    @property
    def signed(self) -> str:
        """With its sign: ``−3.1 points``."""
        return signed(self.value, self.unit)

    @property
    def margin(self) -> str:
        """Half the interval's width: ``±0.8 points``; nothing where there is no width."""
        if self.low is None or self.high is None or self.low == self.high:
            return ""
        return f"±{_amount((self.high - self.low) / 2, self.unit)}"


def change_of(score: Score) -> Change:
    """How a score changed, and whether that is more than chance."""
    unit, factor = _unit(score)
    change = score.change
    value = change.value * factor
    low, high = (None if x is None or math.isnan(x) else x * factor for x in _interval(change))
    worse = value > 0 if score.lower_is_better else value < 0
    if not math.isfinite(value):
        outcome: Outcome = "broken"
    elif value == 0 and not low and not high:  # as little as there can be
        outcome = "same"
    elif low is None or high is None:
        outcome = "unsure"
    elif low <= 0 <= high:
        outcome = "same"
    else:
        outcome = "lost" if worse else "gained"
    return Change(unit, value, low, high, outcome, _severity(score, value, unit))


def kind_of(metric: str) -> str:
    """``"share"``, ``"nll"``, ``"perplexity"`` or ``"other"``, from what a source calls a metric.

    >>> [kind_of(m) for m in ("acc_norm", "exact_match (strict)", "nll", "word_perplexity", "bleu")]
    ['share', 'share', 'nll', 'perplexity', 'other']
    """
    words = re.split(r"[\W_]+", metric.lower())
    if any(word in _PERPLEXITIES for word in words):
        return "perplexity"
    if any(_SHARES.match(word) for word in words):
        return "share"
    return "nll" if "nll" in words else "other"


def level(metric: str, value: float) -> str:
    """A score as one reads it: shares in per cent.

    >>> level("accuracy", 0.6831), level("nll", 2.8049)
    ('68.3 %', '2.805')
    """
    kind = kind_of(metric)
    if not math.isfinite(value):
        return _not_finite(value)
    if kind == "share":
        return f"{100 * value:.1f} %"
    return f"{value:.3f}" if kind == "nll" else f"{value:.4g}"


def signed(value: float, unit: str = "nats a token") -> str:
    """A change with its sign, short enough for a table.

    >>> signed(-3.14, "points"), signed(0.12)
    ('−3.1 points', '+0.120 nats a token')
    """
    if not math.isfinite(value):
        return f"{_not_finite(value)} {unit}"
    sign = "+" if value > 0 else "−" if value < 0 else ""
    return f"{sign}{_digits(abs(value), unit, table=True)}{_spaced(unit)}"


def between(low: float | None, high: float | None, unit: str) -> str:
    """An interval without its unit: ``−3.9 to −2.3``."""
    if low is None or high is None:
        return "–"
    bounds = (signed(x, unit).removesuffix(_spaced(unit)) for x in (low, high))
    return " to ".join(bounds)


def nats(value: float) -> str:
    """A divergence.

    >>> nats(0.0803), nats(0.4321), nats(0.00001), nats(0.0)
    ('0.080', '0.43', 'under 0.001', '0')
    """
    return _not_finite(value) if not math.isfinite(value) else _digits(value, "nats")


def percent(share: float) -> str:
    """A relative drift.

    >>> percent(0.01934), percent(0.00001), percent(0.0), percent(float("inf"))
    ('1.9 %', 'under 0.01 %', '0 %', '∞')
    """
    if not math.isfinite(share):
        return _not_finite(share)
    figure = 100 * share
    if figure == 0:
        return "0 %"
    if figure < 0.01:
        return "under 0.01 %"
    return f"{figure:.2f} %" if figure < 1 else f"{figure:.1f} %"


def count(number: int) -> str:
    """A whole number with its thousands apart.

    >>> count(134515008)
    '134,515,008'
    """
    return f"{number:,}"


def listed(items: Sequence[str], most: int = 4) -> str:
    """Items joined as in a sentence, the first few of many.

    >>> listed(["a", "b", "c"]), listed(list("abcdefg"))
    ('a, b and c', 'a, b, c and 4 others')
    """
    items = list(items)
    if len(items) > most:
        items = [*items[: most - 1], f"{len(items) - most + 1} others"]
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def plain(name: str) -> str:
    """A name on one line, without control characters and what else does not print.

    >>> plain("a\\n\\x1b[31mb")
    'a ␛[31mb'
    """
    shown = "".join(c if c.isprintable() else "␛" if c == "\x1b" else " " for c in name)
    return " ".join(shown.split()) or "(no name)"


def _unit(score: Score) -> tuple[str, float]:
    """The unit of a score's change, and what to multiply the change with."""
    kind = kind_of(score.metric)
    if kind == "perplexity" and math.isfinite(score.before.value) and score.before.value > 0:
        return "% in perplexity", 100 / score.before.value
    units = {"share": ("points", 100.0), "nll": ("nats a token", 1.0)}
    return units.get(kind, (f"in {plain(score.metric)}", 1.0))


def _interval(change: Estimate) -> tuple[float | None, float | None]:
    """The interval; of a few samples there is none, whatever resampling gives."""
    return (None, None) if change.n < FEWEST else (change.low, change.high)


def _severity(score: Score, value: float, unit: str) -> float:
    little, much = _STEPS.get(unit, _STEPS_ELSE)
    size = abs(value)
    if unit not in _STEPS:
        before = abs(score.before.value)
        size = 100 * size / before if before > 0 else math.inf
    if math.isnan(size):
        return math.inf
    return size / little if size < little else 1 + (size - little) / (much - little)


def _amount(size: float, unit: str) -> str:
    return f"{_digits(size, unit)}{_spaced(unit)}"


def _digits(size: float, unit: str, table: bool = False) -> str:
    """A size in the unit's digits; what would round to 0 is under the least that is shown."""
    if size == 0:
        return "0"
    if not unit.startswith(("points", "nats", "%")):
        return f"{size:.3g}"
    if unit.startswith("%") and size >= (99.5 if table else 9.95):
        return f"{size:.0f}" if size < 1e9 else f"{size:.2g}"
    digits = 3 if unit.startswith("nats") and (table or size < 0.0995) else 1
    digits = 2 if unit.startswith("nats") and digits == 1 else digits
    if size < 0.5 * 10**-digits:
        return f"under {10**-digits:.{digits}f}" if not table else f"{size:.1g}"
    return f"{size:.{digits}f}"


def _spaced(unit: str) -> str:
    return f" {unit}"


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
