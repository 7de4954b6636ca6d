"""A gate for pipelines: is what a fine-tuned model forgot within limits?

gate = check(measure(base, tuned, text="wiki.txt"), Limits(max_perplexity_rise=0.02))
gate.passed, gate.to_junit()
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from holdfast._torch.checks import NamedSettings, at_least_zero
from holdfast.evaluate.report import Estimate, ForgettingReport, Score
from holdfast.evaluate.skills import SKILL
from holdfast.report import gate as shown
from holdfast.report.document import Document
from holdfast.report.shown import Shown
from holdfast.report.words import kind_of


@dataclass(frozen=True)
class Limits(NamedSettings):
    """How much a fine-tuned model may forget. What is None is not limited.

    Attributes:
        max_perplexity_rise: rise of the perplexity of each test that should be retained, of its
            value before: 0.02 is 2 %. A rise of the NLL counts as the rise of its exponential.
        max_skill_rise: relative rise of the perplexity in each test of a skill.
        max_drop: drop of each retained accuracy or other share: 0.01 is one point.
        max_kl: divergence of the predictions from those of the base, in nats per prediction, on
            inputs other than those of a target. It is not applied where it was a training signal.
        max_drift: distance of the weights from those of the base, relative to their norm.
        min_target: the smallest score of each target after fine-tuning, of metrics such as an
            accuracy, where more is better.
        max_target_loss: the largest loss or perplexity of each target after fine-tuning.

    Example:
        >>> Limits(max_perplexity_rise=0.02, max_kl=0.05).max_drop is None
        True
    """

    max_perplexity_rise: float | None = None
    max_skill_rise: float | None = None
    max_drop: float | None = None
    max_kl: float | None = None
    max_drift: float | None = None
    min_target: float | None = None
    max_target_loss: float | None = None

    def __post_init__(self) -> None:
        for limit in fields(self):
            if (value := getattr(self, limit.name)) is not None and "target" not in limit.name:
                at_least_zero(limit.name, value)

    @property
    def given(self) -> dict[str, float]:
        """The limits that are not None."""
        found = {limit.name: getattr(self, limit.name) for limit in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Check:
    """One figure and its limit.

    Attributes:
        limit: the name of the limit, such as ``"max_kl"``.
        name: what was measured: the name of a test, or ``"all weights"``.
        value: the figure, in the unit of the limit, with its interval.
        most: the limit; of ``"min_target"``, the smallest value.
        passed: whether the figure is within the limit. One that is not finite never is.
    """

    limit: str
    name: str
    value: Estimate
    most: float
    passed: bool

    @property
    def is_close(self) -> bool:
        """Whether the limit lies within the interval: more samples might turn the outcome."""
        low, high = self.value.low, self.value.high
        return low is not None and high is not None and low <= self.most <= high


@dataclass(frozen=True, repr=False)
class Gate(Shown):
    """Whether a fine-tuned model is within limits, figure by figure.

    Attributes:
        checks: every figure that a limit applies to.
        report: what was measured.
    """

    checks: tuple[Check, ...]
    report: ForgettingReport
    schema_version: int = 1
    what: ClassVar[str] = "gate"

    @property
    def passed(self) -> bool:
        """Whether all figures are within their limits."""
        return all(check.passed for check in self.checks)

    def measured(self) -> ForgettingReport:
        """The report under the gate: a model card's metadata takes its scores."""
        return self.report

    def rows(self) -> list[dict[str, Any]]:
        """One row per figure."""
        return [
            {
                "limit": one.limit, "name": one.name, "value": one.value.value,
                "low": one.value.low, "high": one.value.high, "most": one.most,
                "passed": one.passed,
            }
            for one in self.checks
        ]  # fmt: skip

    def document(self) -> Document:
        """The verdict and one row per figure, in the form that all renderers show."""
        return shown.document(self)

    def to_junit(self) -> str:
        """JUnit XML, which CI systems show: one test case per figure."""
        return shown.to_junit(self)


def check(report: ForgettingReport, limits: Limits) -> Gate:
    """Compare the figures of a report with limits.

    A limit without any figure to apply it to is an error: it would pass whatever was forgotten. If
    the divergence was a training signal of the tuned model, ``max_kl`` is not applied to it, and
    another limit must have a figure.

    Example:
        >>> from holdfast.evaluate.report import Divergence
        >>> kl = Divergence("notes.txt", Estimate(0.08, 0.07, 0.09, n=64), 4096, "token", "")
        >>> gate = check(ForgettingReport("base", "tuned", divergences=(kl,)), Limits(max_kl=0.05))
        >>> gate.passed
        False
    """
    if not limits.given:
        raise ValueError(f"a gate needs at least one limit: {', '.join(vars(limits))}")
    checks = []
    for limit, most in limits.given.items():
        found = list(_figures(report, limit))
        if not found and not (limit == "max_kl" and _is_signal(report)):
            raise ValueError(f"{limit} has nothing to limit: {_NEEDED[limit]}")
        for name, value, sign in found:
            is_within = math.isfinite(value.value) and sign * value.value <= sign * most
            checks.append(Check(limit, name, value, most, is_within))
    if not checks:
        raise ValueError(
            "the divergence was a training signal of this model, so max_kl has nothing to limit: "
            "test a text or skills"
        )
    return Gate(tuple(checks), report)


def _is_signal(report: ForgettingReport) -> bool:
    return any(divergence.trained_on for divergence in report.divergences)


#: What the report lacks if a limit applies to nothing.
_NEEDED = {
    "max_perplexity_rise": "no retained test has a perplexity or NLL, so test a text",
    "max_skill_rise": "no skill was tested",
    "max_drop": "no retained test has an accuracy, so test rows with choices or labels, or tasks",
    "max_kl": "no divergence was measured on inputs other than those of a target",
    "max_drift": "the weights were not compared",
    "min_target": "no target has a score of which more is better",
    "max_target_loss": "no target has a loss or perplexity",
}


def _figures(report: ForgettingReport, limit: str) -> Iterator[tuple[str, Estimate, int]]:
    """The figures that a limit applies to; the sign is −1 if they must be larger than it."""
    retained = [score for score in report.scores if score.role == "retained"]
    likely = [score for score in retained if kind_of(score.metric) in ("perplexity", "nll")]
    if limit == "max_perplexity_rise":
        yield from ((s.name, _rise(s), 1) for s in likely if not s.metric.startswith(SKILL))
    elif limit == "max_skill_rise":
        yield from ((s.name, _rise(s), 1) for s in likely if s.metric.startswith(SKILL))
    elif limit == "max_drop":
        shares = (s for s in retained if kind_of(s.metric) == "share")
        yield from ((s.name, _scaled(s.change, -1.0), 1) for s in shares)
    elif limit == "max_kl":
        # On the target, predictions are to change; where they were trained to stay, they say
        # nothing about other inputs.
        targets = {s.name for s in report.scores if s.role == "target"}
        others = (d for d in report.divergences if d.name not in targets and not d.trained_on)
        yield from ((d.name, d.kl, 1) for d in others)
    elif limit == "max_drift" and report.drift is not None:
        yield "all weights", Estimate(report.drift.total.relative, None, None, 1), 1
    elif limit in ("min_target", "max_target_loss"):
        lower, sign = (False, -1) if limit == "min_target" else (True, 1)
        for score in report.scores:
            if score.role == "target" and score.lower_is_better == lower:
                yield f"{score.name} {score.metric}", score.after, sign


def _rise(score: Score) -> Estimate:
    """The relative rise of a perplexity, or of the exponential of an NLL."""
    if kind_of(score.metric) == "perplexity":
        return _scaled(score.change, 1 / score.before.value)
    low, high = score.change.low, score.change.high
    return Estimate(
        math.expm1(score.change.value),
        None if low is None else math.expm1(low),
        None if high is None else math.expm1(high),
        score.change.n,
    )


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    ends = [None if x is None else factor * x for x in (estimate.low, estimate.high)]
    low, high = ends if factor > 0 else reversed(ends)
    return Estimate(factor * estimate.value, low, high, estimate.n)
