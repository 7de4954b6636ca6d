"""One run of a plan as data: what was tested before and after, and what it took."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.evaluate.report import Curve, ForgettingReport, Score
from holdfast.io import codec as _codec

__all__ = ["Measured", "Moved", "RunResult", "measured", "result_of"]

#: Of the JSON form. Raised when a field is renamed, removed or changes its meaning.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Measured:
    """One test before and after.

    Attributes:
        name, metric, lower_is_better: as in :class:`~holdfast.evaluate.report.Score`.
        before, after: of the pretrained and of the tuned model.
        low, high: the 95 % interval of the change over the samples; None where there is none.
        n: how many samples.
    """

    name: str
    metric: str
    lower_is_better: bool
    before: float
    after: float
    low: float | None
    high: float | None
    n: int

    @property
    def change(self) -> float:
        """After − before."""
        return self.after - self.before

    @property
    def gain(self) -> float:
        """How much better it has become; a loss is negative."""
        return -self.change if self.lower_is_better else self.change

    @property
    def relative(self) -> float:
        """The gain as a share of the value before; of 1 where that was 0.

        What is no finite number any more has lost everything, −∞.
        """
        if not math.isfinite(self.after):
            return -math.inf
        if not math.isfinite(self.before):
            return 0.0
        return self.gain / abs(self.before or 1.0)

    @property
    def best(self) -> float:
        """The best end of the interval: over seeds, the best value of any."""
        change = self.low if self.lower_is_better else self.high
        return self.after if change is None else self.before + change


@dataclass(frozen=True)
class Moved:
    """How far the weights moved: ‖θ − θ*‖, and over ‖θ*‖."""

    distance: float
    relative: float


@dataclass(frozen=True)
class RunResult:
    """One run.

    Attributes:
        id, recipe, seed, values: who it is; see :class:`~holdfast.comparison.plan.RunSpec`.
        target: the new task.
        retained: what should not be forgotten.
        drift: how far the weights moved; None where they cannot be compared.
        kl: KL(base‖tuned), nats a prediction, by the inputs' name.
        seconds: of training and of testing it.
        peak_memory: bytes, of the device if it is a GPU, else of the process.
        versions: of what ran it.
        curves: over the updates.
    """

    id: str
    recipe: str
    seed: int
    target: Measured
    retained: tuple[Measured, ...]
    drift: Moved | None
    kl: dict[str, float]
    seconds: float
    peak_memory: int
    versions: dict[str, str] = field(default_factory=dict)
    values: dict[str, int | float | str | bool | None] = field(default_factory=dict)
    curves: tuple[Curve, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """As text."""
        return json.dumps(_codec.encode(self), indent=1, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> RunResult:
        """From its text; ValueError says what does not fit."""
        return _codec.decode(cls, json.loads(text), "the result")

    @property
    def label(self) -> str:
        """The recipe, with the values that set it apart."""
        values = (
            f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in self.values.items()
        )
        return " ".join([self.recipe, *values])

    @property
    def kept(self) -> float:
        """The mean over the retained tests of their relative gains: 0 is as before."""
        return _mean([test.relative for test in self.retained])

    @property
    def loss(self) -> float:
        """The mean over the retained tests of their relative losses; a gain counts as none."""
        return _mean([max(0.0, -test.relative) for test in self.retained])


def result_of(spec: Any, report: ForgettingReport, seconds: float, peak_memory: int) -> RunResult:
    """A run's result from its forgetting report."""
    targets = [measured(s) for s in report.scores if s.role == "target"]
    if not targets:
        raise ValueError("the target was not tested")
    moved = report.drift.total if report.drift else None
    return RunResult(
        id=spec.id,
        recipe=spec.recipe,
        seed=spec.seed,
        target=targets[0],
        retained=tuple(measured(s) for s in report.scores if s.role != "target"),
        drift=Moved(moved.distance, moved.relative) if moved else None,
        kl={d.name: d.kl.value for d in report.divergences},
        seconds=round(seconds, 3),
        peak_memory=peak_memory,
        versions=dict(report.versions),
        values=dict(spec.values),
        curves=report.curves,
    )


def measured(score: Score) -> Measured:
    """A score as a result keeps it."""
    return Measured(
        name=score.name,
        metric=score.metric,
        lower_is_better=score.lower_is_better,
        before=score.before.value,
        after=score.after.value,
        low=score.change.low,
        high=score.change.high,
        n=score.change.n,
    )


def _mean(values: Sequence[float]) -> float:
    if -math.inf in values:
        return -math.inf
    return sum(values) / len(values) if values else 0.0
