"""The part of docs/results.md on RecAdam and GLUE."""

from __future__ import annotations

import statistics
from typing import Any

from _pages import number, prose, table
from _summary import Results, Run

SEEDS = 5
NAMES = {"cola": "CoLA", "stsb": "STS-B", "mrpc": "MRPC", "rte": "RTE", "sst2": "SST-2"}
METHODS = {"pi": "RecAdam, from θ* (PI)", "ri": "RecAdam, from random weights (RI)"}


def chosen(results: Results, task: str, start: str, by: str) -> list[Run]:
    """The runs of what the grid chose for a task."""
    k, t0 = results.protocol["choice"][f"{task}-{start}"][by]
    return results.where(task=task, method=start, k=k, t0=t0)


def median(runs: list[Run], field: str) -> float:
    return float(statistics.median(run[field] for run in runs))


def row(name: str, by_task: dict[str, list[Run]], field: str, most: bool = False) -> list[str]:
    """Medians by task, and their mean; with ``most`` the largest as well."""
    medians = {task: median(runs, field) for task, runs in by_task.items() if runs}
    cells = []
    for task in NAMES:
        runs = by_task[task]
        cell = number(medians.get(task), 1)
        if most and runs:
            cell += f" / {number(max(run[field] for run in runs), 1)}"
        few = len(runs) not in (0, SEEDS)
        cells.append(f"{cell} ({len(runs)})" if few else cell)
    whole = all(len(runs) == SEEDS for runs in by_task.values())  # or the means would not compare
    mean = statistics.mean(medians.values()) if whole else None
    return [name, *cells, number(mean, 1)]


def every_task(results: Results, **wanted: Any) -> dict[str, list[Run]]:
    return {task: results.where(task=task, **wanted) for task in NAMES}


def tables(results: Results) -> str:
    """Tables 1 and 2 of the paper, by its protocol and by an honest one."""
    vanilla = every_task(results, method="vanilla")
    head = ["", *NAMES.values(), "mean"]

    def picked(by: str, field: str, most: bool) -> str:
        rows = [row("plain Adam", vanilla, field, most)]
        for start, name in METHODS.items():
            by_task = {task: chosen(results, task, start, by) for task in NAMES}
            rows.append(row(name, by_task, field, most))
        return table(head, rows)

    lower = [
        row(f"plain Adam, {part:g} of the rate", by_task, "dev")
        for part in (0.5, 0.2)
        if any((by_task := every_task(results, method=f"vanilla-{part:g}lr")).values())
    ]
    layouts = []
    for t0, width in results.protocol["layouts"].values():
        by_task = every_task(results, method="layout", t0=t0, width=width)
        if any(by_task.values()):
            layouts.append(row(f"RecAdam, t0 {t0:g}, width {width:g}", by_task, "dev"))
    return "\n\n".join(
        [
            "### By the paper's protocol",
            prose("""k and t0 chosen for each task on the dev set with one seed, and five seeds of
            what was chosen on the same dev set: median / largest."""),
            picked("dev", "dev", True),
            "### Chosen on one half, reported on the other",
            prose("""The same runs, chosen on half of dev and reported on the other half: the six
            settings that RecAdam had to choose from are no advantage any more. Medians."""),
            picked("half_a", "half_b", False),
            "### At settings that are the same for all tasks",
            prose("""All of dev, medians. t0 and width (1/k) are shares of the run, as in
            `RecAdamUpdate`."""),
            table(head, [row("plain Adam", vanilla, "dev"), *lower, *layouts]),
            "How far the weights went, ‖θ − θ*‖:",
            table(head, distances(results)),
        ]
    )


def distances(results: Results) -> list[list[str]]:
    rows = [row("plain Adam", every_task(results, method="vanilla"), "distance")]
    for t0, width in results.protocol["layouts"].values():
        by_task = every_task(results, method="layout", t0=t0, width=width)
        if any(by_task.values()):
            rows.append(row(f"RecAdam, t0 {t0:g}, width {width:g}", by_task, "distance"))
    return rows


def coupled(results: Results) -> str:
    """The penalty in the gradient, and beside it."""
    (decoupled,) = {(r["k"], r["t0"]) for r in results.where(method="coupled")}
    k, t0 = decoupled
    head = ["", *NAMES.values(), "mean"]
    rows = [
        row("decoupled", every_task(results, method="pi", k=k, t0=t0), "dev"),
        row("coupled", every_task(results, method="coupled"), "dev"),
    ]
    gone = {
        name: every_task(results, **wanted)
        for name, wanted in {
            "decoupled": {"method": "pi", "k": k, "t0": t0},
            "coupled": {"method": "coupled"},
        }.items()
    }
    rows += [row(f"‖θ − θ*‖, {name}", by_task, "distance") for name, by_task in gone.items()]
    return "\n\n".join(
        [
            prose(f"""The paper's reason for decoupling: a pull inside the gradient, λ·∇L +
            (1−λ)·γ·(θ − θ*), is normalised by Adam together with it. At k = {k:g}, t0 = {t0:g} of
            the run and the same γ:"""),
            table(head, rows),
            prose("""Coupled, little or nothing is learned at this γ, which is the decoupled one's.
            The likely cause: a step of lr away from θ* already gives the pull a gradient of
            lr·γ = 0.1 a coordinate, far above the task's, and it stays in Adam's second moment for
            about 1/(1−β₂) = 1000 updates, the whole run. A weaker γ would couple better; L2-SP has
            its own scale."""),
        ]
    )
