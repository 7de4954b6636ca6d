"""What came of the runs of a plan: one JSON a run, all of them together, medians over seeds.

results = Results.load("comparison/results.json")
print(results.recommendation())
results.save("report.html")  # or .md, or .json
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.comparison.result import SCHEMA_VERSION, Measured, Moved, RunResult, result_of
from holdfast.io import codec as _codec
from holdfast.io.saved import Saved

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.report.comparison_recommend import Recommendation

__all__ = ["Measured", "Moved", "Results", "RunResult", "Summary", "result_of", "summarise"]


@dataclass(frozen=True)
class Summary:
    """A recipe over its seeds.

    Attributes:
        label: its name.
        recipe: the same without the values that set it apart.
        seeds: how many.
        target, retained: medians over the seeds; the intervals are the lowest and highest change
            of any seed's own value.
        best: the best target value of any seed.
        kept, loss, relative_drift, kl, seconds: medians of what each run has.
        peak_memory: the largest.
        runs: one a seed.
    """

    label: str
    recipe: str
    seeds: int
    target: Measured
    retained: tuple[Measured, ...]
    best: float
    kept: float
    loss: float
    relative_drift: float | None
    kl: dict[str, float]
    seconds: float
    peak_memory: int
    runs: tuple[RunResult, ...]


def summarise(runs: Iterable[RunResult]) -> list[Summary]:
    """Each recipe's medians over its seeds, in the order in which they first come."""
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return [_summary(label, some) for label, some in groups.items()]


def _summary(label: str, runs: Sequence[RunResult]) -> Summary:
    target = _median([run.target for run in runs])
    tests: dict[tuple[str, str], list[Measured]] = {}
    for run in runs:
        for test in run.retained:
            tests.setdefault((test.name, test.metric), []).append(test)
    drifts = [run.drift.relative for run in runs if run.drift is not None]
    names = dict.fromkeys(name for run in runs for name in run.kl)
    return Summary(
        label=label,
        recipe=runs[0].recipe,
        seeds=len(runs),
        target=target,
        retained=tuple(map(_median, tests.values())),
        best=target.best,
        kept=statistics.median(run.kept for run in runs),
        loss=statistics.median(run.loss for run in runs),
        relative_drift=statistics.median(drifts) if drifts else None,
        kl={n: statistics.median(run.kl[n] for run in runs if n in run.kl) for n in names},
        seconds=statistics.median(run.seconds for run in runs),
        peak_memory=max(run.peak_memory for run in runs),
        runs=tuple(runs),
    )


def _median(rows: Sequence[Measured]) -> Measured:
    """Over seeds; a value that is no number is the worst there is."""
    first = rows[0]
    worst = math.inf if first.lower_is_better else -math.inf
    values = [worst if math.isnan(row.after) else row.after for row in rows]
    return replace(
        first,
        after=statistics.median(values),
        low=min(values) - first.before,
        high=max(values) - first.before,
    )


@dataclass(frozen=True)
class Results(Saved):
    """All runs of a plan: ``results.json``.

    Attributes:
        runs: those that are done.
        failed: the last line of the error of those that failed, by their id.
        plan: what was compared, as plain values.
        taken: the recipe to take, where it was chosen on other data; None chooses it on these.
    """

    runs: tuple[RunResult, ...]
    failed: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    taken: str | None = None
    schema_version: int = SCHEMA_VERSION

    def summaries(self) -> list[Summary]:
        """Each recipe over its seeds, in the order of the plan."""
        return summarise(self.runs)

    def recommendation(self) -> Recommendation:
        """Which recipe to take, and why."""
        from holdfast.report.comparison_recommend import recommend

        return recommend(self)

    def to_json(self) -> str:
        """As text."""
        return json.dumps(_codec.encode(self), indent=1, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Results:
        """From its text; ValueError says what does not fit."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"this is not the JSON of a comparison: {error}") from None
        if not isinstance(value, dict) or not isinstance(plan := value.pop("plan", {}), dict):
            raise ValueError("this is not a comparison: it must be an object with runs and a plan")
        version = value.get("schema_version", SCHEMA_VERSION)
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise ValueError(
                f"this comparison has schema_version {version}, and this holdfast reads up to "
                f"{SCHEMA_VERSION}: update holdfast to read it"
            )
        return replace(_codec.decode(cls, value, "the comparison"), plan=plan)

    def to_markdown(self) -> str:
        """The recommendation and the table, for a pull request or a model card."""
        from holdfast.report.comparison_table import to_markdown

        return to_markdown(self)

    def to_html(self) -> str:
        """One page with everything in it. Needs plotly."""
        from holdfast.report.comparison_page import to_html

        return to_html(self)

    def to_terminal(self, console: Console | None = None) -> None:
        """Print the table and the recommendation, with rich where it is installed."""
        from holdfast.report.comparison_table import to_terminal

        to_terminal(self, console)
