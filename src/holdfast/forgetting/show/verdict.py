"""What was forgotten, in plain words.

A loss is a loss only if the interval of its change excludes 0. What was not tested is said to be
untested: a drift of the weights or of the predictions is not yet forgetting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from holdfast.forgetting.report import Divergence, Drift, DriftRow, ForgettingReport, Score
from holdfast.forgetting.show._words import Change, change_of, kind_of, listed, nats, percent, plain

__all__ = ["Level", "Verdict", "verdict"]

Level = Literal["nothing", "little", "some", "much", "unknown"]

#: KL below this, in nats, is rounding.
_STILL = 1e-6
#: Up to so many tests are named.
_FEW = 4
#: From so many tests on, some 95 % intervals exclude 0 by chance.
_MANY = 20
Judged = tuple[str, Score, Change]


@dataclass(frozen=True)
class Verdict:
    """The answer on top of a report.

    Attributes:
        headline: one sentence.
        sentences: what else there is to say, the most important first.
        level: how much was forgotten. By its worst loss: little below 1 point, 0.05 nats a token
            or 5 % in perplexity; much from 5 points, 0.25 nats a token or 28 % on; for other
            metrics 2 and 10 % of what it was. ``"unknown"`` where that was not tested.
    """

    headline: str
    sentences: tuple[str, ...]
    level: Level

    def __str__(self) -> str:
        return " ".join([self.headline, *self.sentences])


def verdict(report: ForgettingReport) -> Verdict:
    """Sum up a report.

    >>> from holdfast.forgetting.report import Estimate
    >>> def at(value, margin): return Estimate(value, value - margin, value + margin, 1838)
    >>> piqa = Score("PIQA", "accuracy", False, at(0.684, 0.02), at(0.653, 0.02), at(-0.031, 0.01))
    >>> arc = Score("ARC-easy", "accuracy", False, at(0.58, 0.02), at(0.58, 0.02), at(0.0, 0.008))
    >>> print(verdict(ForgettingReport("base", "tuned", scores=(piqa, arc))))
    Lost 3.1 points on PIQA. No measurable change on ARC-easy (±0.8 points).
    """
    judged = _judge(report.scores)
    retained = [j for j in judged if j[1].role == "retained"]
    targets = [j for j in judged if j[1].role == "target"]
    broken = _broken(report.drift, judged)
    headline, level = _headline(report, retained)
    sentences = [
        *([headline] if broken else []),
        *_on_retained(retained, headline),
        *_on_targets(targets),
        *_on_predictions(report.divergences, headline),
        *_on_weights(report.drift, headline),
        *_on_what_is_missing(report, retained, level),
    ]
    if broken:
        headline, level = broken[0], "much"
        sentences = [*broken[1:], *sentences]
    return Verdict(headline, tuple(sentences), level)


def where(layers: Sequence[DriftRow]) -> str | None:
    """The run of neighbouring layers where most of the drift is, if it is a small part of all.

    It is the shortest run with more than half of the squared distance, and the layers beside it
    that moved about as much.

    >>> rows = [DriftRow(f"layers.{i}", 3.0 if i in (2, 3) else 1.0, 10.0, 4) for i in range(8)]
    >>> where(rows)
    'layers 2–3'
    """
    distances = [r.distance if math.isfinite(r.distance) else 0.0 for r in layers]
    largest = max(distances, default=0.0) or 1.0
    squares = [(distance / largest) ** 2 for distance in distances]
    sums = [0.0, *accumulate(squares)]
    most = len(layers) // 2
    for length in range(1, most + 1):
        inside = {i: sums[i + length] - sums[i] for i in range(len(layers) - length + 1)}
        first = max(inside, key=inside.__getitem__)
        if inside[first] > sums[-1] / 2:
            last, alike = first + length - 1, inside[first] / length / 2
            while first > 0 and squares[first - 1] >= alike:
                first -= 1
            while last + 1 < len(layers) and squares[last + 1] >= alike:
                last += 1
            small = last - first + 1 <= most
            return _range([row.name for row in layers], first, last) if small else None
    return None


def is_still(drift: Drift) -> bool:
    """Whether both models have the same tensors with the same values."""
    return drift.total.distance == 0 and not (
        drift.only_base or drift.only_tuned or drift.not_finite
    )


def source_of(divergence: Divergence) -> str:
    """On which inputs predictions were compared."""
    free = divergence.name == "context-free"
    return "the base model's own texts" if free else plain(divergence.name)


def _judge(scores: Sequence[Score]) -> list[Judged]:
    """Scores with what to call them and how they changed, the worst first."""
    names = [plain(score.name) for score in scores]
    judged = [
        (
            name if names.count(name) == 1 else f"{name} ({plain(score.metric)})",
            score,
            change_of(score),
        )
        for name, score in zip(names, scores, strict=True)
    ]
    return sorted(judged, key=lambda j: -j[2].severity)


def _broken(drift: Drift | None, judged: Sequence[Judged]) -> list[str]:
    """What is so wrong that it has to be said first."""
    said = []
    if drift is not None and drift.not_finite:
        names = [plain(name) for name in drift.not_finite]
        tensors = "1 tensor holds" if len(names) == 1 else f"{len(names)} tensors hold"
        said.append(f"The tuned model is broken: {tensors} NaN or infinity ({listed(names)}).")
    lame = [n for n, s, c in judged if c.outcome == "broken" and math.isfinite(s.before.value)]
    if lame:
        said.append(f"The tuned model has no finite score on {listed(lame)}.")
    return said


def _headline(report: ForgettingReport, retained: Sequence[Judged]) -> tuple[str, Level]:
    lost = [j for j in retained if j[2].outcome == "lost"]
    unsure = [j for j in retained if j[2].outcome in ("unsure", "broken")]
    if lost:
        worst = max(change.severity for _, _, change in lost)
        level: Level = "little" if worst < 1 else "some" if worst < 2 else "much"
        return _losses(lost, retained), level
    if _nothing_moved(report):
        return "Nothing forgotten.", "nothing"
    if unsure:
        return "Forgetting cannot be told from chance.", "unknown"
    if retained:
        return f"No measurable loss on {_named(retained)}.", "nothing"
    if finite := [d for d in report.divergences if math.isfinite(d.kl.value)]:
        most = max(finite, key=lambda d: d.kl.value)
        size = f"up to {nats(most.kl.value)}" if len(finite) > 1 else nats(most.kl.value)
        moved = f"moved by {size} nats a {plain(most.per)}"
        moved = moved if abs(most.kl.value) >= _STILL else "did not move"
        return f"Forgetting was not tested; predictions {moved}.", "unknown"
    if report.drift is not None:
        return f"Forgetting was not tested; the weights {_moved(report.drift)}.", "unknown"
    return "Forgetting was not tested.", "unknown"


def _losses(lost: Sequence[Judged], among: Sequence[Judged]) -> str:
    """What was lost. A perplexity is not lost, it rises."""
    rose = [j for j in lost if kind_of(j[1].metric) == "perplexity"]
    if len(lost) > _FEW or not rose:
        return f"Lost {_on(lost, among)}."
    rest = [j for j in lost if j not in rose]
    said = [f"lost {_on(rest)}"] if rest else []
    sizes = [
        f"{change.amount.removesuffix(' in perplexity')} on {name}" for name, _, change in rose
    ]
    sentence = "; ".join([*said, f"perplexity rose by {listed(sizes)}"])
    return f"{sentence[0].upper()}{sentence[1:]}."


def _nothing_moved(report: ForgettingReport) -> bool:
    if report.drift is None and not report.divergences:
        return False
    return (
        (report.drift is None or is_still(report.drift))
        and all(abs(d.kl.value) < _STILL for d in report.divergences)
        and all(score.change.value == 0 for score in report.scores)
    )


def _on_retained(retained: Sequence[Judged], headline: str) -> list[str]:
    said = []
    by = {o: [j for j in retained if j[2].outcome == o] for o in ("same", "gained", "unsure")}
    if by["same"] and headline != "Nothing forgotten.":
        said.append(f"No measurable change on {_named(by['same'], margins=True)}.")
    tested = sum(change.low is not None for _, _, change in retained)
    if tested >= _MANY and any(change.outcome == "lost" for _, _, change in retained):
        chance = max(1, round(0.025 * tested))
        said.append(f"Of {tested} tests about {chance} would seem lost by chance alone.")
    if by["gained"]:
        by_ = "by " if len(by["gained"]) <= _FEW else ""
        said.append(f"Better {by_}{_on(by['gained'], retained)}.")
    for worse, word in ((True, "Worse"), (False, "Better")):
        some = [j for j in by["unsure"] if ((j[2].value > 0) == j[1].lower_is_better) == worse]
        if some:
            said.append(f"{word} by {_on(some)}, but without an interval that may be chance.")
    return said


def _on_targets(targets: Sequence[Judged]) -> list[str]:
    said = []
    for name, score, change in targets:
        if change.outcome == "gained":
            if score.lower_is_better:
                said.append(f"Improved the target {name} by {change.amount}.")
            else:
                said.append(f"Gained {change.amount} on the target {name}.")
        elif change.outcome == "lost":
            said.append(f"Lost {change.amount} on the target {name}.")
        elif change.outcome == "same":
            margin = f" ({change.margin})" if change.margin else ""
            said.append(f"No measurable change on the target {name}{margin}.")
        elif change.outcome == "unsure":
            worse = (change.value > 0) == score.lower_is_better
            said.append(
                f"The target {name} is {'worse' if worse else 'better'} by {change.amount}, "
                f"without an interval."
            )
    return said


def _on_predictions(divergences: Sequence[Divergence], headline: str) -> list[str]:
    said = []
    moved = [d for d in divergences if abs(d.kl.value) >= _STILL and math.isfinite(d.kl.value)]
    if moved and not (len(moved) == 1 and "predictions moved" in headline):
        sizes = [f"{nats(d.kl.value)} nats a {plain(d.per)} on {source_of(d)}" for d in moved]
        said.append(f"Predictions moved by {listed(sizes)}.")
    if odd := [source_of(d) for d in divergences if not math.isfinite(d.kl.value)]:
        said.append(f"The divergence on {listed(odd)} is not a finite number.")
    return said


def _on_weights(drift: Drift | None, headline: str) -> list[str]:
    if drift is None:
        return []
    said = []
    if is_still(drift):
        said.append("The two models have the same weights.")
    elif drift.total.distance == 0:
        said.append("The weights that both models have did not move.")
    elif math.isfinite(drift.total.distance):
        place = where(drift.layers)
        spread = f", most of it in {place}" if place else ""
        if spread or "the weights" not in headline:
            said.append(f"The weights {_moved(drift)}{spread}.")
    for names, lacks in ((drift.only_base, "tuned"), (drift.only_tuned, "base")):
        if names:
            said.append(f"The {lacks} model lacks {listed([plain(name) for name in names])}.")
    return said


def _on_what_is_missing(
    report: ForgettingReport, retained: Sequence[Judged], level: Level
) -> list[str]:
    if retained or level != "unknown":
        return []
    if not (report.scores or report.divergences or report.drift):
        return ["Nothing was measured."]
    return ["What the tuned model still knows takes a test of tasks that it should have kept."]


def _moved(drift: Drift) -> str:
    return f"moved by {percent(drift.total.relative)} of their norm"


def _on(judged: Sequence[Judged], among: Sequence[Judged] = ()) -> str:
    """By how much and on what; of many tests how many they are, and the first."""
    amounts = [(name, change.amount) for name, _, change in judged]
    if len(judged) > _FEW and among:
        (name, amount), *_ = amounts
        return f"on {len(judged)} of {len(among)} tests, most on {name} ({amount})"
    return listed([f"{amount} on {name}" for name, amount in amounts])


def _named(judged: Sequence[Judged], margins: bool = False) -> str:
    if len(judged) > _FEW:
        return f"{len(judged)} tests"
    named = [f"{n} ({c.margin})" if margins and c.margin else n for n, _, c in judged]
    return listed(named)


def _range(names: Sequence[str], first: int, last: int) -> str:
    """A run of layers: their numbers if they are numbered alike, else their names."""
    found = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    start, end = found[first], found[last]
    if start and end and start[1] == end[1]:
        alone = len({match[1] for match in found if match}) == 1
        stem = "layer" if alone else plain(start[1].rstrip("._ "))
        if first == last:
            return f"{stem} {start[2]}"
        return f"{'layers' if alone else stem} {start[2]}–{end[2]}"
    if first == last:
        return plain(names[first])
    return f"{plain(names[first])} to {plain(names[last])}"
