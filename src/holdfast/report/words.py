"""Numbers, changes, names and lists as text: one way to say each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from holdfast._torch.finite import is_finite
from holdfast.report.printing import plain as plain

if TYPE_CHECKING:
    from holdfast.comparison.results import Measured
    from holdfast.evaluate.report import Score

MetricKind = Literal["share", "nll", "perplexity", "other"]
ChangeOutcome = Literal["lost", "gained", "no measurable change", "no interval", "not finite"]

NONE = "–"
#: An interval over fewer samples is ignored.
FEWEST = 8

_SHARES = re.compile("acc|agree|match|em$|f1|mc[12]$|pass$|precision|recall|share")
_PERPLEXITIES = ("perplexity", "ppl")
_GREEK = {"alpha": "α", "beta": "β", "lam": "λ"}
#: The unit of a change, where a loss stops being little, and where it starts to be much.
_UNITS: dict[MetricKind, tuple[str, float, float]] = {
    "share": ("points", 1.0, 5.0),
    "nll": ("nats per token", 0.05, 0.25),
    "perplexity": ("%", 5.0, 28.0),
    "other": ("", 2.0, 10.0),  # the metric itself, but the limits are percent of the value before
}


class Span(NamedTuple):
    """A value and its interval."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Change:
    """The change of a score, in the unit in which people state it."""

    kind: MetricKind
    unit: str  # "points", "nats per token", "%" for perplexities, else the metric's name
    value: float  # after − before
    low: float | None  # the interval of the change
    high: float | None
    outcome: ChangeOutcome  # no measurable change if the interval includes 0
    loss: float  # its size: below 1 little, from 2 on much; negative for a gain

    @property
    def amount(self) -> str:
        """The size, for a sentence: ``3.1 points``; of a large rise in perplexity ``25-fold``."""
        factor = 1 + self.value / 100
        if self.kind == "perplexity" and 3 <= factor < math.inf:
            fold = digits(factor, 1 if factor < 9.95 else 0)
            return "over 1,000,000-fold" if factor >= 1e6 else f"{fold}-fold"
        return f"{self._digits(abs(self.value))} {self.unit}"

    @property
    def figure(self) -> str:
        """The signed number, for a table: ``−3.1``, ``+0.118``, ``+8.3 %``."""
        return self._signed(self.value) + (" %" if self.kind == "perplexity" else "")

    @property
    def signed(self) -> str:
        """The signed number with its unit: ``−3.1 points``."""
        return f"{self._signed(self.value)} {self.unit}"

    @property
    def told(self) -> str:
        """The same for a sentence: ``perplexity +8.3 %``, of a large rise ``25-fold``."""
        said = self.amount if self.amount.endswith("-fold") else self.signed
        return f"perplexity {said}" if self.kind == "perplexity" else said

    @property
    def margin(self) -> str:
        """Half of the interval's width: ``±0.8 points``; empty without an interval."""
        if self.low is None or self.high is None or self.low == self.high:
            return ""
        return f"±{self._digits((self.high - self.low) / 2)} {self.unit}"

    @property
    def interval(self) -> str:
        """The interval without its unit: ``−3.9 to −2.3``."""
        return between(self.low, self.high, self._signed)

    def _digits(self, size: float) -> str:
        if self.kind == "other":
            return f"{size:.3g}" if is_finite(size) else digits(size, 0)
        if self.kind == "perplexity":
            return percent(size / 100).removesuffix(" %")
        return digits(size, 3 if self.kind == "nll" else 1)

    def _signed(self, value: float) -> str:
        sign = "+" if 0 < value < math.inf else "−" if value < 0 else ""
        return sign + self._digits(abs(value))


def change(metric: str, lower_is_better: bool, before: float, moved: Span) -> Change:
    kind = kind_of(metric)
    if kind == "perplexity" and not 0 < before < math.inf:
        kind = "other"
    scale = {"share": 100.0, "perplexity": 100 / (before or 1)}.get(kind, 1.0)
    value = scale * moved.value
    low, high = (None if x is None or math.isnan(x) else x * scale for x in moved[1:])
    worse = value > 0 if lower_is_better else value < 0
    if not is_finite(value):
        outcome: ChangeOutcome = "not finite"
    elif low is None or high is None:
        outcome = "no interval" if value or low or high else "no measurable change"
    elif low <= 0 <= high:
        outcome = "no measurable change"
    else:
        outcome = "lost" if worse else "gained"
    unit, little, much = _UNITS[kind]
    size = abs(value)
    if kind == "other":
        size = 100 * size / abs(before) if abs(before) > 0 else math.inf
    severity = size / little if size < little else 1 + (size - little) / (much - little)
    loss = math.inf if outcome == "not finite" else severity if worse else -severity
    return Change(kind, unit or plain(metric), value, low, high, outcome, loss)


def change_of(score: Score) -> Change:
    """The change of a score, judged by its interval if it rests on enough samples."""
    found = score.change
    moved = Span(found.value, *((None, None) if found.n < FEWEST else (found.low, found.high)))
    return change(score.metric, score.lower_is_better, score.before.value, moved)


def change_in(test: Measured, before: float | None = None, after: float | None = None) -> Change:
    """The change of a test of a run, or between two other values of the same metric."""
    before = test.before if before is None else before
    after = test.after if after is None else after
    return change(test.metric, test.lower_is_better, before, Span(after - before))


def share_kept(scores: Iterable[tuple[str, bool, float, float]]) -> float | None:
    """The mean share that is left of some scores, each at most 1; None if none is a share.

    The scores are given as (metric, whether lower is better, before, after).

    >>> share_kept([("perplexity", True, 20.0, 25.0), ("accuracy", False, 0.5, 0.6)])
    0.9
    """
    shares = []
    for metric, lower_is_better, before, after in scores:
        if kind_of(metric) == "nll" and is_finite(before - after):
            shares.append(min(1.0, _exp(before - after)))
        elif kind_of(metric) != "nll" and is_finite(before) and is_finite(after) and before > 0:
            left = before / max(before, after) if lower_is_better else after / before
            shares.append(max(0.0, min(1.0, left)))
    return sum(shares) / len(shares) if shares else None


def share_text(share: float) -> str:
    """A share in percent, which says 100 only if all is kept.

    >>> share_text(0.934), share_text(0.9996), share_text(1.0)
    ('93 %', '99.9 %', '100 %')
    """
    return f"{math.floor(1000 * share) / 10:g} %" if share > 0.985 else f"{100 * share:.0f} %"


def settings_text(settings: Mapping[str, float], between: str = ", ") -> str:
    """Settings of a method as text; Greek letters as in the papers.

    >>> settings_text({"alpha": 0.5, "keep": 1.0})
    'α = 0.5, keep = 1'
    """
    return between.join(f"{symbol(name)} = {value:g}" for name, value in settings.items())


def symbol(name: str) -> str:
    """The symbol of a setting, or its name."""
    return _GREEK.get(name, plain(name))


def reached(test: str, metric: str, value: float) -> str:
    """A score with its test, in words; nats also as a perplexity.

    >>> reached("gsm8k", "nll", 2.182), reached("piqa", "accuracy", 0.597)
    ('perplexity 8.864 on gsm8k (2.182 nats per token)', '59.7 % accuracy on piqa')
    """
    kind, score = kind_of(metric), score_text(metric, value)
    if kind == "nll":
        perplexity = score_text("perplexity", _exp(value))
        return f"perplexity {perplexity} on {plain(test)} ({score} nats per token)"
    level = f"{plain(metric)} {score}" if kind == "perplexity" else f"{score} {plain(metric)}"
    return f"{level} on {plain(test)}"


def kept(tests: Sequence[Measured]) -> list[str]:
    """How much a model kept of what it could do before, as a sentence; none without tests.

    >>> from holdfast.comparison.results import Measured
    >>> prose = Measured("prose", "perplexity", True, 20.0, 20.2, None, None, 500)
    >>> code = Measured("code", "perplexity", True, 10.0, 10.5, None, None, 500)
    >>> kept([prose, code])
    ['It kept 97 % (worst: code, perplexity +5.0 %).']
    """
    share = share_kept((t.metric, t.lower_is_better, t.before, t.after) for t in tests)
    if odd := [plain(test.name) for test in tests if not is_finite(test.after)]:
        return [f"It gives NaN or infinity on {listed(odd)}."]
    if share is None:
        return []
    name, worst = max(((plain(t.name), change_in(t)) for t in tests), key=lambda row: row[1].loss)
    where = f" (worst: {name}, {worst.told})" if worst.loss > 0 else ""
    return [f"It kept {share_text(share)}{where}."]


def _exp(value: float) -> float:
    return math.exp(value) if not value > 700 else math.inf


def kind_of(metric: str) -> MetricKind:
    """The kind of a metric, from its name.

    >>> [kind_of(m) for m in ("acc_norm", "exact_match (strict)", "nll", "word_perplexity", "bleu")]
    ['share', 'share', 'nll', 'perplexity', 'other']
    """
    words = re.split(r"[\W_]+", metric.lower())
    if any(word in _PERPLEXITIES for word in words):
        return "perplexity"
    if any(_SHARES.match(word) for word in words):
        return "share"
    return "nll" if "nll" in words else "other"


def digits(value: float, places: int) -> str:
    """A number with a fixed number of decimals; a small one keeps one significant digit.

    >>> digits(0.0803, 3), digits(0.00004, 3), digits(0.0, 3), digits(float("-inf"), 3)
    ('0.080', '4e-05', '0', '−∞')
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    text = f"{value:,.{places}f}" if abs(value) < 1e6 else f"{value:.3g}"
    text = text if text.strip("-0.,") else f"{value:.1g}"
    return text.replace("-", "−") if value < 0 else text


def score_text(metric: str, value: float) -> str:
    """A score; shares are in percent.

    >>> score_text("accuracy", 0.6831), score_text("nll", 2.8049)
    ('68.3 %', '2.805')
    """
    kind = kind_of(metric)
    if kind == "share" and is_finite(value):
        return f"{digits(100 * value, 1)} %"
    if kind == "nll" or not is_finite(value):
        return digits(value, 3)
    return f"{value:.4g}"


nats = partial(digits, places=3)


def percent(share: float) -> str:
    """A share in percent.

    >>> percent(0.01934), percent(0.0093), percent(1.676), percent(float("inf"))
    ('1.9 %', '0.93 %', '168 %', '∞')
    """
    size = abs(100 * share)
    text = digits(100 * share, 2 if size < 1 else 1 if size < 99.5 else 0)
    return f"{text} %" if is_finite(share) else text


def seconds(value: float) -> str:
    """A duration.

    >>> seconds(4.21), seconds(312.0), seconds(6000)
    ('4.2 s', '5.2 min', '1.7 h')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if value >= 1.5 * size:
            return f"{digits(value / size, 1)} {unit}"
    return f"{digits(value, 1 if value < 10 else 0)} s"


def gibibytes(size: float) -> str:
    """An amount of memory.

    >>> gibibytes(789204992), gibibytes(80 * 2**30)
    ('0.74 GiB', '80.0 GiB')
    """
    value = size / 2**30
    return f"{digits(value, 2 if value < 10 else 1)} GiB"


def gigabytes(size: float) -> str:
    """An amount of memory, in the units in which makers of GPUs state it.

    >>> gigabytes(80e9), gigabytes(789204992), gigabytes(2.5e6), gigabytes(400)
    ('80.0 GB', '0.79 GB', '2.50 MB', 'below 0.01 MB')
    """
    if 0 < size < 1e4:
        return "below 0.01 MB"
    value, unit = (size / 1e9, "GB") if size >= 1e7 else (size / 1e6, "MB")
    return f"{digits(value, 2 if value < 10 else 1)} {unit}"


def between(low: float | None, high: float | None, text: Callable[[float], str] = nats) -> str:
    return NONE if low is None or high is None else f"{text(low)} to {text(high)}"


def listed(items: Sequence[str], most: int = 4) -> str:
    """Items joined as in a sentence, the first few of many.

    >>> listed(["a", "b", "c"]), listed(list("abcdefg"))
    ('a, b and c', 'a, b, c and 4 others')
    """
    items = list(items)
    if len(items) > most:
        items = [*items[: most - 1], f"{len(items) - most + 1} others"]
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def cut(text: str, most: int) -> str:
    """A long text without its middle: names often differ at their ends."""
    half = most // 2
    return text if len(text) <= most else f"{text[: half - 1]}…{text[-half:]}"
