"""Comparisons from several places: runs of an unfinished one, and several put together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from holdfast.comparison.plan import Plan
from holdfast.comparison.results import Results, RunResult
from holdfast.io import codec


def finished_in(folder: Path, plan: Plan | None = None) -> Results | None:
    """Collect the finished runs of a comparison that is running, or was stopped.

    Args:
        folder: the output folder of the comparison.
        plan: its plan, which gives the order of the runs; None keeps the order of their names.

    Returns:
        The runs so far; None if there are none.
    """
    runs = {}
    for file in sorted(folder.glob("runs/*/result.json")):
        try:
            run = RunResult.from_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} cannot be read: {error}") from None
        runs[run.id] = run
    order = {spec.id: i for i, spec in enumerate(plan.runs())} if plan else {}
    notes = {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("failed/*.txt")}
    if not runs:
        return None
    return Results(
        runs=tuple(sorted(runs.values(), key=lambda run: order.get(run.id, len(order)))),
        failed={n: t.strip().rpartition("\n")[2] for n, t in notes.items() if n not in runs},
        plan=codec.encode(plan) if plan else {},
    )


def together(found: Mapping[str, object]) -> Results:
    """Put comparisons of one base and one target together; the last of two equal runs counts.

    Args:
        found: results by the name of their source, for errors.
    """
    every: dict[str, Results] = {}
    for source, results in found.items():
        if not isinstance(results, Results):
            raise ValueError(f"{source} is not a comparison: show it alone")
        every[source] = results
    filled = [(source, results) for source, results in every.items() if results.runs]
    for source, results in filled[1:]:
        if differ := _difference(filled[0][1], results):
            raise ValueError(f"{filled[0][0]} and {source} cannot be put together: {differ}")
    runs = {run.id: run for results in every.values() for run in results.runs}
    failed = {name: line for results in every.values() for name, line in results.failed.items()}
    plan = dict(next(iter(every.values())).plan)
    for name in ("recipes", "seeds"):
        items = [item for results in every.values() for item in results.plan.get(name) or []]
        plan[name] = list(dict.fromkeys(items))
    return Results(
        runs=tuple(runs.values()),
        failed={name: line for name, line in failed.items() if name not in runs},
        plan=plan,
    )


def _difference(one: Results, other: Results) -> str | None:
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
