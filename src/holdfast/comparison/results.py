"""Results of a plan: one JSON per run, all runs together, and medians over seeds.

results = Results.load("comparison/results.json")
print(results.recommendation())
results.save("report.html")  # or .md, or .json
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from holdfast._torch.checks import positive_share
from holdfast._torch.layers import within
from holdfast.comparison.command import finetune_command
from holdfast.comparison.plan import Plan, RunSpec, label_of
from holdfast.comparison.processes import at_a_time, reason
from holdfast.evaluate.report import Curve, Drift, DriftRow, ForgettingReport, Score
from holdfast.io import codec as _codec
from holdfast.io.storage import Place
from holdfast.recipe import Recipe, difference
from holdfast.report import LEARN_AT_LEAST
from holdfast.report import comparison as _shown
from holdfast.report.document import Document
from holdfast.report.recommend import Recommendation, forgotten, recommend
from holdfast.report.shown import Shown
from holdfast.report.words import change_in

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """One test of the pretrained and of the fine-tuned model.

    Attributes:
        name, metric, lower_is_better: as in :class:`~holdfast.evaluate.report.Score`.
        before, after: values of the pretrained and of the fine-tuned model.
        low, high: 95 % interval of the change over the samples, or None.
        n: number of samples.
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
        """The improvement; negative if the model became worse."""
        return -self.change if self.lower_is_better else self.change

    @property
    def best(self) -> float:
        """The better end of the interval: in a summary, the best value of any seed."""
        change = self.low if self.lower_is_better else self.high
        return self.after if change is None else self.before + change


@dataclass(frozen=True)
class Moved:
    """The distance ‖θ − θ*‖ of the weights, without new parts, and the same divided by ‖θ*‖."""

    distance: float
    relative: float


@dataclass(frozen=True)
class RunResult:
    """The result of one run.

    Attributes:
        id, recipe, seed, values, settings: as in :class:`~holdfast.comparison.plan.RunSpec`.
        target, retained: the test of the new task, and those of what should not be forgotten.
        drift: how far the weights moved; None if they cannot be compared.
        kl: KL(base‖tuned) in nats per prediction, by input name.
        trained_on: inputs in ``kl`` whose divergence was a training signal.
        resolved: the recipe as it was trained: ``settings`` with everything resolved that depends
            on the model, and the learning rate.
        seconds: time for training and testing.
        peak_memory: in bytes, of the GPU if there is one, else of the process.
        at_a_time: the most runs that shared the GPU, or the CPU, while this one ran, itself
            included: the more, the longer each takes. None if it is not known.
        shared: labels of all runs that shared the training, this one among them; empty if it was
            trained alone. ``seconds`` of each includes the training.
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
    settings: dict[str, Any] = field(default_factory=dict)
    trained_on: tuple[str, ...] = ()
    resolved: dict[str, Any] = field(default_factory=dict)
    at_a_time: int | None = None
    shared: tuple[str, ...] = ()
    schema_version: int = 1

    def __post_init__(self) -> None:
        for stage, given in (*self.settings.items(), *self.resolved.items()):
            many = isinstance(given, list)
            for method in given if many else [given]:
                if many != (stage == "penalties") or not isinstance(method, dict):
                    raise ValueError(f"{stage} is not a method with its settings")
                if not isinstance(method.get("name"), str):
                    raise ValueError(f"the method of {stage} has no name")

    def to_json(self) -> str:
        """The JSON text, with a digest of everything else in it."""
        value = json.loads(_codec.to_json(self))
        return json.dumps({**value, "digest": _digest(value)}, indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> RunResult:
        """Read the text that :meth:`to_json` wrote. Earlier versions wrote no digest."""
        value = json.loads(text)
        given = value.pop("digest", None) if isinstance(value, dict) else None
        if given not in (None, _digest(value)):
            raise ValueError("the result was changed after it was written")
        return _codec.decode(cls, value, "the result")

    @property
    def label(self) -> str:
        """The name of the recipe, and the values in which it differs from the plan."""
        return label_of(self.recipe, self.values)

    @property
    def figures(self) -> dict[str, float]:
        """The figures after the training by name, for trackers."""
        found = {f"target/{self.target.name}/{self.target.metric}": self.target.after}
        found |= {f"retained/{test.name}/{test.metric}": test.after for test in self.retained}
        found |= {"retained_loss": self.loss} if self.retained else {}
        found |= {"distance": self.drift.distance} if self.drift else {}
        return found | {f"kl/{name}": value for name, value in self.kl.items()}

    @property
    def loss(self) -> float:
        """What was forgotten, as the recommendation counts it; 0 without retained tests."""
        return loss_of(self.retained)


def loss_of(tests: Iterable[Measured]) -> float:
    """The mean loss on the scale of the verdict: 1 is where a loss stops being little."""
    return forgotten(map(change_in, tests)) or 0.0


def result_of(
    spec: RunSpec,
    trained: Recipe,
    report: ForgettingReport,
    new: Sequence[str],
    seconds: float,
    peak_memory: int,
    shared: tuple[str, ...] = (),
) -> RunResult:
    """The result of a run; ``new`` parts of the model, which must move, do not count as drift."""
    targets = [measured(s) for s in report.scores if s.role == "target"]
    if not targets:
        raise ValueError("the report has no test of the target")
    return RunResult(
        id=spec.id,
        recipe=spec.recipe,
        seed=spec.seed,
        target=targets[0],
        retained=tuple(measured(s) for s in report.scores if s.role != "target"),
        drift=moved(report.drift, new) if report.drift else None,
        kl={d.name: d.kl.value for d in report.divergences},
        seconds=round(seconds, 3),
        peak_memory=peak_memory,
        versions=dict(report.versions),
        values=dict(spec.values),
        settings=_codec.encode(spec.settings),
        trained_on=tuple(d.name for d in report.divergences if d.trained_on),
        resolved=_codec.encode(trained.to_dict()),
        curves=report.curves,
        at_a_time=at_a_time(),
        shared=shared,
    )


def moved(drift: Drift, new: Sequence[str]) -> Moved:
    """How far the weights moved, without those of new parts."""
    rows = [row for row in drift.tensors if not within(row.name, new)]
    distance, norm = (
        math.hypot(*(getattr(r, name) for r in rows)) for name in ("distance", "norm")
    )
    return Moved(distance, DriftRow("total", distance, norm, len(rows)).relative)


def measured(score: Score) -> Measured:
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


def read_result(file: Place, spec: RunSpec) -> RunResult | None:
    """Read the result of a finished run; None if there is none, or if it is another run's."""
    try:
        text = file.read_text()
        found = RunResult.from_json(text)
        if '"digest"' not in text or not _is_of(spec, found):
            raise ValueError("it is the result of another run")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        logger.warning(f"the run is repeated, because {file.name} cannot be used: {error}")
        return None
    return found


def _is_of(spec: RunSpec, found: RunResult) -> bool:
    asked = spec.id, spec.recipe, spec.seed, _codec.encode(spec.settings)
    same = (found.id, found.recipe, found.seed, found.settings) == asked
    return same and found.values == _codec.encode(spec.values)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Summary:
    """The results of one recipe over its seeds.

    Numbers are medians over the seeds; the intervals of ``target`` and ``retained`` hold the lowest
    and the highest change of any seed, and ``peak_memory`` is the maximum.
    """

    label: str
    recipe: str
    seeds: int
    target: Measured
    retained: tuple[Measured, ...]
    loss: float
    relative_drift: float | None
    kl: dict[str, float]
    trained_on: tuple[str, ...]
    resolved: dict[str, Any]
    seconds: float
    peak_memory: int
    runs: tuple[RunResult, ...]


def _summary(label: str, runs: Sequence[RunResult]) -> Summary:
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
        target=_median([run.target for run in runs]),
        retained=tuple(map(_median, tests.values())),
        loss=statistics.median(run.loss for run in runs),
        relative_drift=statistics.median(drifts) if drifts else None,
        kl={n: statistics.median(run.kl[n] for run in runs if n in run.kl) for n in names},
        trained_on=tuple(dict.fromkeys(name for run in runs for name in run.trained_on)),
        resolved=runs[0].resolved,
        seconds=statistics.median(run.seconds for run in runs),
        peak_memory=max(run.peak_memory for run in runs),
        runs=tuple(runs),
    )


def _median(rows: Sequence[Measured]) -> Measured:
    """The median over seeds; NaN counts as the worst value."""
    first = rows[0]
    worst = math.inf if first.lower_is_better else -math.inf
    values = [worst if math.isnan(row.after) else row.after for row in rows]
    return replace(
        first,
        after=statistics.median(values),
        low=min(values) - first.before,
        high=max(values) - first.before,
    )


@dataclass(frozen=True, repr=False)
class Results(Shown):
    """All runs of a plan: ``results.json``.

    Attributes:
        runs: the finished runs.
        failed: the last line of the error of each failed run, by run id.
        plan: the plan, as plain values.
        taken: label of the recipe to recommend, if it was chosen on other data. If None, it is
            chosen from these results.
        learn_at_least: how much of the best gain on the target the recommended recipe has at least.
    """

    runs: tuple[RunResult, ...]
    failed: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    taken: str | None = None
    learn_at_least: float = LEARN_AT_LEAST
    schema_version: int = 1
    what: ClassVar[str] = "comparison"

    def __post_init__(self) -> None:
        positive_share("learn_at_least", self.learn_at_least)
        rates = self.plan.get("rates") or {}
        if not isinstance(rates, dict) or {*map(type, rates.values())} - {int, float}:
            raise ValueError("plan.rates must be numbers by name")

    def summaries(self) -> list[Summary]:
        """Summarize each recipe over its seeds, in the order of the plan."""
        groups: dict[str, list[RunResult]] = {}
        for run in self.runs:
            groups.setdefault(run.label, []).append(run)
        return [_summary(label, runs) for label, runs in groups.items()]

    def recommendation(self, learn_at_least: float | None = None) -> Recommendation:
        """The recipe to take, and why; ``learn_at_least`` replaces that of the results."""
        return recommend(self, learn_at_least)

    def command(self, label: str) -> str:
        """The command line that trains a recipe like its runs; empty if it is not known."""
        run = next(run for run in self.runs if run.label == label)
        return finetune_command(self.plan, run)

    def rows(self) -> list[dict[str, Any]]:
        """One row per run and test."""
        return [
            {
                "recipe": run.recipe, "seed": run.seed, **run.values, "test": test.name,
                "metric": test.metric, "role": "target" if test is run.target else "retained",
                "before": test.before, "after": test.after, "low": test.low, "high": test.high,
                "drift": run.drift.relative if run.drift else None, "seconds": run.seconds,
                "at_a_time": run.at_a_time,
            }
            for run in self.runs
            for test in (run.target, *run.retained)
        ]  # fmt: skip

    def document(self) -> Document:
        return _shown.document(self)


def finished_in(folder: Path, plan: Plan | None = None) -> Results | None:
    """Collect the finished runs in the folder of a comparison that is running, or was stopped.

    They are in the order of the plan, or of their names without a plan. None if there are none.
    """
    runs: dict[str, RunResult] = {}
    for file in sorted(folder.glob("runs/*/result.json")):
        try:
            run = RunResult.from_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} cannot be read: {error}") from None
        runs[run.id] = run
    if not runs:
        return None
    notes = {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("failed/*.txt")}
    return collect(runs, notes, plan)


def collect(runs: Mapping[str, RunResult], notes: Mapping[str, str], plan: Plan | None) -> Results:
    """Put runs in the order of the plan; ``notes`` are the tracebacks of failed ones, by id."""
    # Not by id: it depends on the learning rate, which may depend on the model.
    order = {_place(spec): i for i, spec in enumerate(plan.runs)} if plan else {}
    return Results(
        runs=tuple(sorted(runs.values(), key=lambda run: order.get(_place(run), len(order)))),
        failed={n: reason(t) for n, t in notes.items() if n not in runs},
        plan=_codec.encode(plan) if plan else {},
    )


def _place(run: RunSpec | RunResult) -> tuple[str, int, str]:
    return run.recipe, run.seed, json.dumps(_codec.encode(run.values))


#: What the runs of a plan were trained with, besides their recipes.
_TRAINED_WITH = "data", "old_data", "columns", "training", "options", "new", "head"


def together(found: Mapping[str, Any]) -> Results:
    """Join comparisons of one base and target, by source; the last of two equal runs counts."""
    for source, results in found.items():
        if not isinstance(results, Results):
            raise ValueError(f"{source} is not a comparison: show it alone")
    filled = [(source, results) for source, results in found.items() if results.runs]
    for source, results in filled[1:]:
        if differ := _other_task(filled[0][1], results):
            raise ValueError(f"{filled[0][0]} and {source} cannot be put together: {differ}")
    _refuse_other_settings(found)
    runs = {run.id: run for results in found.values() for run in results.runs}
    failed = {name: line for results in found.values() for name, line in results.failed.items()}
    plan = dict(next(iter(found.values())).plan)
    for key in ("recipes", "seeds"):
        items = [item for results in found.values() for item in results.plan.get(key) or []]
        plan[key] = list(dict.fromkeys(items))
    plan["rates"] = {
        name: rate
        for results in found.values()
        for name, rate in (results.plan.get("rates") or {}).items()
    }
    plans = [results.plan for results in found.values()]
    if unequal := [n for n in _TRAINED_WITH if any(p.get(n) != plan.get(n) for p in plans)]:
        for name in ("data", *unequal):  # without data, no command is shown
            plan.pop(name, None)
    share = next(iter(found.values())).learn_at_least
    return replace(collect(runs, failed, None), plan=plan, learn_at_least=share)


def _refuse_other_settings(found: Mapping[str, Results]) -> None:
    """Raise ValueError if runs of one label were trained with different settings."""
    first: dict[str, tuple[str, RunResult]] = {}
    for source, results in found.items():
        for run in results.runs:
            other, known = first.setdefault(run.label, (source, run))
            if run.resolved and known.resolved and run.resolved != known.resolved:
                raise ValueError(
                    f"{other} and {source} cannot be put together: {run.label} was trained with "
                    f"different settings ({difference(known.resolved, run.resolved)}). Show them "
                    "alone, or rename the recipe"
                )


def _other_task(one: Results, other: Results) -> str | None:
    """Return in which way two comparisons differ in base or target, or None.

    The path of the base and the last digits of its scores differ between machines, so the base is
    identified by its name and, roughly, its score on the target.
    """
    first, second = one.runs[0].target, other.runs[0].target
    tests = [f"{t.name}, {t.metric}, {t.n} samples" for t in (first, second)]
    if tests[0] != tests[1]:
        return f"their targets differ ({tests[0]}; {tests[1]})"
    models = [str(results.plan.get("model", "")) for results in (one, other)]
    same_name = Path(models[0]).name == Path(models[1]).name
    if not math.isclose(first.before, second.before, rel_tol=0.01 if same_name else 1e-9):
        return (
            f"their base models differ ({models[0]} has {first.before:.4g} on {first.name}, "
            f"{models[1]} has {second.before:.4g})"
        )
    return None
