"""What a forgetting report says, in plain words.

A change counts as a loss only if its interval excludes 0. Drift of the weights or of the
predictions is not yet forgetting: without tests, forgetting is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from holdfast.report.document import Answer
from holdfast.report.words import Change, change_of, listed, nats, percent, plain

if TYPE_CHECKING:
    from holdfast.evaluate.report import Divergence, Drift, ForgettingReport, Score

Forgotten = Literal["nothing", "little", "some", "much", "unknown"]

NO_TESTS = "To see what was forgotten, test tasks that the model should keep."
#: A KL below this, in nats, is rounding error.
_STILL = 1e-6
#: More tests than this are counted instead of named.
_FEW = 4
#: From this many tests on, some 95 % intervals exclude 0 by chance.
_MANY = 20
_DOUBT = "; without an interval this may be chance"


@dataclass(frozen=True)
class Verdict(Answer):
    """The answer of a forgetting report.

    Attributes:
        forgotten: how much, by the worst loss. Little is below 1 point, 0.05 nats per token or 5 %
            of perplexity; much is at least 5 points, 0.25 nats per token or 28 %. For other metrics
            the limits are 2 and 10 % of the value before. ``"unknown"`` if it was not tested.
    """

    forgotten: Forgotten = "unknown"


class Judged(NamedTuple):
    name: str
    score: Score
    change: Change

    def __str__(self) -> str:
        return f"{self.change.amount} on {self.name}"


def verdict(report: ForgettingReport) -> Verdict:
    """Sum up a report.

    >>> from holdfast.evaluate.report import Estimate, ForgettingReport, Score
    >>> def at(value, margin): return Estimate(value, value - margin, value + margin, 1838)
    >>> piqa = Score("PIQA", "accuracy", False, at(0.684, 0.02), at(0.653, 0.02), at(-0.031, 0.01))
    >>> arc = Score("ARC-easy", "accuracy", False, at(0.58, 0.02), at(0.58, 0.02), at(0.0, 0.008))
    >>> print(verdict(ForgettingReport("base", "tuned", scores=(piqa, arc))))
    Lost 3.1 points on PIQA.
    No measurable change on ARC-easy (±0.8 points).
    """
    names = [plain(score.name) for score in report.scores]
    judged = [
        Judged(f"{name} {plain(s.metric)}" if names.count(name) > 1 else name, s, change_of(s))
        for name, s in zip(names, report.scores, strict=True)
    ]
    judged.sort(key=lambda j: -abs(j.change.loss))
    retained = [j for j in judged if j.score.role == "retained"]
    broken = _broken(report.drift, judged)
    headline, forgotten = _headline(report, retained)
    sentences = [
        *_on_retained(retained),
        *_on_targets([j for j in judged if j.score.role == "target"]),
        *_on_predictions(report.divergences),
        *(_on_weights(report.drift) if report.drift else ()),
    ]
    if not (report.scores or report.divergences or report.drift):
        sentences.append("Nothing was measured.")
    elif not retained and forgotten == "unknown":
        sentences.append(NO_TESTS)
    if broken:
        return Verdict(broken[0], (*broken[1:], headline, *sentences), "much")
    return Verdict(headline, tuple(sentences), forgotten)


def source_of(divergence: Divergence) -> str:
    free = divergence.name == "context-free"
    return "the base model's own texts" if free else plain(divergence.name)


def no_evidence(inputs: str) -> str:
    """The sentence about a divergence that was a training signal.

    >>> no_evidence("its texts")
    'The divergence on its texts was a training signal: it is no evidence of retention.'
    """
    return f"The divergence on {inputs} was a training signal: it is no evidence of retention."


def _broken(drift: Drift | None, judged: Sequence[Judged]) -> list[str]:
    """Defects of the tuned model that come before everything else."""
    said = []
    if names := [plain(name) for name in drift.not_finite] if drift else []:
        tensors = "1 tensor holds" if len(names) == 1 else f"{len(names)} tensors hold"
        said.append(f"The tuned model is broken: {tensors} NaN or infinity ({listed(names)}).")
    broken = [j for j in judged if j.change.outcome == "not finite"]
    if names := [j.name for j in broken if math.isfinite(j.score.before.value)]:
        said.append(f"The tuned model has no finite score on {listed(names)}.")
    return said


def _headline(report: ForgettingReport, retained: Sequence[Judged]) -> tuple[str, Forgotten]:
    if lost := [j for j in retained if j.change.outcome == "lost"]:
        worst = lost[0].change.loss
        forgotten: Forgotten = "little" if worst < 1 else "some" if worst < 2 else "much"
        return _losses(lost, len(retained)), forgotten
    drift = report.drift
    divergences = [d for d in report.divergences if not d.trained_on]
    still = drift is None or _is_still(drift)
    still = still and all(abs(d.kl.value) < _STILL for d in divergences)
    if (drift or divergences) and still and all(s.change.value == 0 for s in report.scores):
        return "Nothing forgotten.", "nothing"
    if any(j.change.outcome in ("no interval", "not finite") for j in retained):
        return "The changes cannot be distinguished from chance.", "unknown"
    if retained:
        return f"No measurable loss on {_named(retained)}.", "nothing"
    return "Forgetting was not tested.", "unknown"


def _losses(lost: Sequence[Judged], tests: int) -> str:
    """The losses. Changes of a perplexity are worded as increases."""
    if len(lost) > _FEW:
        worst = f"{lost[0].name} ({lost[0].change.amount})"
        return f"Lost on {len(lost)} of {tests} tests, most on {worst}."
    rose = [str(j) for j in lost if j.change.kind == "perplexity"]
    rest = [str(j) for j in lost if j.change.kind != "perplexity"]
    if not rest:
        return f"Perplexity rose {listed(rose)}."
    return f"Lost {listed(rest)}{f'; perplexity rose {listed(rose)}' if rose else ''}."


def _on_retained(retained: Sequence[Judged]) -> list[str]:
    said = []
    same, gained, unsure, lost = (
        [j for j in retained if j.change.outcome == outcome]
        for outcome in ("no measurable change", "gained", "no interval", "lost")
    )
    if same:
        said.append(f"No measurable change on {_named(same, margins=True)}.")
    tested = sum(j.change.low is not None for j in retained)
    if lost and tested >= _MANY:
        chance = max(1, round(0.025 * tested))
        said.append(f"By chance alone, about {chance} of {tested} tests would show a loss.")
    if gained:
        said.append(f"Improved by {listed(list(map(str, gained)))}.")
    for worse, word in ((True, "Worse"), (False, "Better")):
        if some := [str(j) for j in unsure if (j.change.loss > 0) == worse]:
            said.append(f"{word} by {listed(some)}{_DOUBT}.")
    return said


def _on_targets(targets: Sequence[Judged]) -> list[str]:
    said = []
    for j in targets:
        moved = f"{'got worse' if j.change.loss > 0 else 'improved'} by {j.change.amount}"
        if j.change.outcome == "no measurable change":
            said.append(f"No measurable change on the target {_named([j], margins=True)}.")
        elif j.change.outcome != "not finite":
            doubt = _DOUBT if j.change.outcome == "no interval" else ""
            said.append(f"The target {j.name} {moved}{doubt}.")
    return said


def _on_predictions(divergences: Sequence[Divergence]) -> list[str]:
    said = []
    moved = [d for d in divergences if abs(d.kl.value) >= _STILL and math.isfinite(d.kl.value)]
    if moved:
        sizes = [f"{nats(d.kl.value)} nats per {plain(d.per)} on {source_of(d)}" for d in moved]
        said.append(f"Predictions moved by {listed(sizes)}.")
    if trained := [source_of(d) for d in divergences if d.trained_on]:
        said.append(no_evidence(listed(trained)))
    if odd := [source_of(d) for d in divergences if not math.isfinite(d.kl.value)]:
        said.append(f"The divergence on {listed(odd)} is not a finite number.")
    return said


def _on_weights(drift: Drift) -> list[str]:
    said = []
    if _is_still(drift):
        said.append("The two models have the same weights.")
    elif drift.total.distance == 0:
        said.append("The weights that both models have did not move.")
    elif math.isfinite(drift.total.distance):
        most = max(drift.layers, key=lambda row: row.relative, default=None)
        where = f", most in {plain(most.name)} ({percent(most.relative)})" if most else ""
        said.append(f"The weights moved by {percent(drift.total.relative)} of their norm{where}.")
    for names, lacks in ((drift.only_base, "tuned"), (drift.only_tuned, "base")):
        if names:
            said.append(f"The {lacks} model lacks {listed([plain(name) for name in names])}.")
    return said


def _is_still(drift: Drift) -> bool:
    """Whether both models have the same tensors with the same values."""
    odd = drift.only_base or drift.only_tuned or drift.not_finite
    return drift.total.distance == 0 and not odd


def _named(judged: Sequence[Judged], margins: bool = False) -> str:
    if len(judged) > _FEW:
        return f"{len(judged)} tests"
    notes = [f" ({j.change.margin})" if margins and j.change.margin else "" for j in judged]
    return listed([j.name + note for j, note in zip(judged, notes, strict=True)])
