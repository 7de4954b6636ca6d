"""What was forgotten, in plain words.

A loss is a loss only if the interval of its change excludes 0. What was not tested is said to be
untested: a drift of the weights or of the predictions is not yet forgetting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from holdfast.evaluate.report import Divergence, Drift, DriftRow, ForgettingReport, Score
from holdfast.report.places import place_of
from holdfast.report.words import Change, change_of, kind_of, listed, nats, percent, plain

__all__ = ["Level", "Verdict", "verdict"]

Level = Literal["nothing", "little", "some", "much", "unknown"]

#: KL below this, in nats, is rounding.
_STILL = 1e-6
#: Up to so many tests are named.
_FEW = 4
#: From so many tests on, some 95 % intervals exclude 0 by chance.
_MANY = 20


@dataclass(frozen=True)
class Judged:
    """A score, what to call it, and how it changed.

    Attributes:
        name: of the test.
        metric: its own, where another score is of the same test; else nothing.
    """

    name: str
    metric: str
    score: Score
    change: Change

    def called(self, *notes: str) -> str:
        """The name, and what else there is to say of it in brackets."""
        said = [note for note in (self.metric, *notes) if note]
        return f"{self.name} ({', '.join(said)})" if said else self.name


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
        return "\n".join([self.headline, *self.sentences])


def verdict(report: ForgettingReport) -> Verdict:
    """Sum up a report.

    >>> from holdfast.evaluate.report import Estimate
    >>> def at(value, margin): return Estimate(value, value - margin, value + margin, 1838)
    >>> piqa = Score("PIQA", "accuracy", False, at(0.684, 0.02), at(0.653, 0.02), at(-0.031, 0.01))
    >>> arc = Score("ARC-easy", "accuracy", False, at(0.58, 0.02), at(0.58, 0.02), at(0.0, 0.008))
    >>> print(verdict(ForgettingReport("base", "tuned", scores=(piqa, arc))))
    Lost 3.1 points on PIQA.
    No measurable change on ARC-easy (±0.8 points).
    """
    judged = _judge(report.scores)
    retained = [j for j in judged if j.score.role == "retained"]
    targets = [j for j in judged if j.score.role == "target"]
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
            return place_of([row.name for row in layers], first, last) if small else None
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
        Judged(name, plain(score.metric) if names.count(name) > 1 else "", score, change_of(score))
        for name, score in zip(names, scores, strict=True)
    ]
    return sorted(judged, key=lambda j: -j.change.severity)


def _broken(drift: Drift | None, judged: Sequence[Judged]) -> list[str]:
    """What is so wrong that it has to be said first."""
    said = []
    if drift is not None and drift.not_finite:
        names = [plain(name) for name in drift.not_finite]
        tensors = "1 tensor holds" if len(names) == 1 else f"{len(names)} tensors hold"
        said.append(f"The tuned model is broken: {tensors} NaN or infinity ({listed(names)}).")
    lame = [
        j.called()
        for j in judged
        if j.change.outcome == "broken" and math.isfinite(j.score.before.value)
    ]
    if lame:
        said.append(f"The tuned model has no finite score on {listed(lame)}.")
    return said


def _headline(report: ForgettingReport, retained: Sequence[Judged]) -> tuple[str, Level]:
    lost = [j for j in retained if j.change.outcome == "lost"]
    unsure = [j for j in retained if j.change.outcome in ("unsure", "broken")]
    if lost:
        worst = max(j.change.severity for j in lost)
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
    rose = [j for j in lost if kind_of(j.score.metric) == "perplexity"]
    if len(lost) > _FEW or not rose:
        return f"Lost {_on(lost, among)}."
    rest = [j for j in lost if j not in rose]
    said = [f"lost {_on(rest)}"] if rest else []
    sizes = [f"{_rise(j.change)} on {j.called()}" for j in rose]
    if all(size.startswith("by ") for size in sizes):
        sizes = [sizes[0], *(size.removeprefix("by ") for size in sizes[1:])]
    sentence = "; ".join([*said, f"perplexity rose {listed(sizes)}"])
    return f"{sentence[0].upper()}{sentence[1:]}."


def _rise(change: Change) -> str:
    """By how much a perplexity rose."""
    if change.times is not None:
        return f"{change.times}-fold"
    return f"by {change.amount.removesuffix(' in perplexity')}"


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
    outcomes = ("same", "gained", "unsure")
    by = {o: [j for j in retained if j.change.outcome == o] for o in outcomes}
    if by["same"] and headline != "Nothing forgotten.":
        said.append(f"No measurable change on {_named(by['same'], margins=True)}.")
    tested = sum(j.change.low is not None for j in retained)
    if tested >= _MANY and any(j.change.outcome == "lost" for j in retained):
        chance = max(1, round(0.025 * tested))
        said.append(f"Of {tested} tests about {chance} would seem lost by chance alone.")
    if by["gained"]:
        by_ = "by " if len(by["gained"]) <= _FEW else ""
        said.append(f"Better {by_}{_on(by['gained'], retained)}.")
    for worse, word in ((True, "Worse"), (False, "Better")):
        some = [j for j in by["unsure"] if _is_worse(j) == worse]
        if some:
            said.append(f"{word} by {_on(some)}, but without an interval that may be chance.")
    return said


def _on_targets(targets: Sequence[Judged]) -> list[str]:
    said = []
    for target in targets:
        change, name = target.change, target.called()
        if change.outcome == "gained":
            if target.score.lower_is_better:
                said.append(f"Improved the target {name} by {change.amount}.")
            else:
                said.append(f"Gained {change.amount} on the target {name}.")
        elif change.outcome == "lost":
            said.append(f"Lost {change.amount} on the target {name}.")
        elif change.outcome == "same":
            said.append(f"No measurable change on the target {target.called(change.margin)}.")
        elif change.outcome == "unsure":
            said.append(
                f"The target {name} is {'worse' if _is_worse(target) else 'better'} by "
                f"{change.amount}, without an interval."
            )
    return said


def _is_worse(judged: Judged) -> bool:
    return (judged.change.value > 0) == judged.score.lower_is_better


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
    if len(judged) > _FEW and among:
        first = judged[0].called(judged[0].change.amount)
        return f"on {len(judged)} of {len(among)} tests, most on {first}"
    return listed([f"{j.change.amount} on {j.called()}" for j in judged])


def _named(judged: Sequence[Judged], margins: bool = False) -> str:
    if len(judged) > _FEW:
        return f"{len(judged)} tests"
    return listed([j.called(j.change.margin) if margins else j.called() for j in judged])
