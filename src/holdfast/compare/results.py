"""What came of the runs of a plan: one JSON a run, all of them together, medians over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.forgetting import _codec
from holdfast.forgetting.report import Curve, ForgettingReport, Score

__all__ = ["Measured", "Moved", "Results", "RunResult", "Summary", "result_of", "summarise"]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Measured:
    """One test before and after.

    Attributes:
        name, metric, lower_is_better: as in :class:`~holdfast.forgetting.report.Score`.
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


@dataclass(frozen=True)
class Moved:
    """How far the weights moved: ‖θ − θ*‖, and over ‖θ*‖."""

    distance: float
    relative: float


@dataclass(frozen=True)
class RunResult:
    """One run.

    Attributes:
        id, recipe, seed, values: who it is; see :class:`~holdfast.compare.plan.RunSpec`.
        target: the new task.
        retained: what should not be forgotten.
        drift: how far the weights moved.
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
    drift: Moved
    kl: dict[str, float]
    seconds: float
    peak_memory: int
    versions: dict[str, str] = field(default_factory=dict)
    values: dict[str, float | int | str | bool | None] = field(default_factory=dict)
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
        return " ".join(
            [
                self.recipe,
                *(
                    f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}"
                    for k, v in self.values.items()
                ),
            ]
        )


@dataclass(frozen=True)
class Summary:
    """A recipe over its seeds.

    Attributes:
        label: its name.
        seeds: how many.
        target, retained: medians over the seeds; the intervals are the lowest and highest change
            of any seed's own value.
        best: the best target value of any seed.
        loss: the mean over the retained tests of how much was lost, as a share of the value before
            (a gain counts as no loss).
        seconds: the median.
    """

    label: str
    seeds: int
    target: Measured
    retained: tuple[Measured, ...]
    best: float
    loss: float
    relative_drift: float
    kl: dict[str, float]
    seconds: float
    peak_memory: int


def result_of(spec: Any, report: ForgettingReport, seconds: float, peak_memory: int) -> RunResult:
    """A run's result from its forgetting report."""
    targets = [_measured(s) for s in report.scores if s.role == "target"]
    if not targets:
        raise ValueError("the target was not tested")
    moved = report.drift.total if report.drift else None
    return RunResult(
        id=spec.id,
        recipe=spec.recipe,
        seed=spec.seed,
        target=targets[0],
        retained=tuple(_measured(s) for s in report.scores if s.role != "target"),
        drift=Moved(moved.distance, moved.relative) if moved else Moved(0.0, 0.0),
        kl={d.name: d.kl.value for d in report.divergences},
        seconds=round(seconds, 3),
        peak_memory=peak_memory,
        versions=dict(report.versions),
        values=dict(spec.values),
        curves=report.curves,
    )


def summarise(runs: Iterable[RunResult]) -> list[Summary]:
    """Each recipe's medians over its seeds, in the order in which they first come."""
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return [_summary(label, some) for label, some in groups.items()]


def _summary(label: str, runs: Sequence[RunResult]) -> Summary:
    target = _median([run.target for run in runs])
    retained = tuple(
        _median(list(column)) for column in zip(*(r.retained for r in runs), strict=True)
    )
    values = [run.target.after for run in runs]
    lost = [max(0.0, -m.gain) / abs(m.before) if m.before else 0.0 for m in retained]
    names = runs[0].kl
    return Summary(
        label=label,
        seeds=len(runs),
        target=target,
        retained=retained,
        best=min(values) if target.lower_is_better else max(values),
        loss=statistics.fmean(lost) if lost else 0.0,
        relative_drift=statistics.median(run.drift.relative for run in runs),
        kl={name: statistics.median(run.kl.get(name, 0.0) for run in runs) for name in names},
        seconds=statistics.median(run.seconds for run in runs),
        peak_memory=max(run.peak_memory for run in runs),
    )


def _median(rows: Sequence[Measured]) -> Measured:
    first = rows[0]
    changes = [row.change for row in rows]
    return Measured(
        name=first.name,
        metric=first.metric,
        lower_is_better=first.lower_is_better,
        before=first.before,
        after=statistics.median(row.after for row in rows),
        low=min(changes),
        high=max(changes),
        n=first.n,
    )


def _measured(score: Score) -> Measured:
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


@dataclass(frozen=True)
class Results:
    """All runs of a plan: ``results.json``."""

    runs: tuple[RunResult, ...]
    failed: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """As text."""
        return json.dumps(_codec.encode(self), indent=1, ensure_ascii=False, allow_nan=False)
