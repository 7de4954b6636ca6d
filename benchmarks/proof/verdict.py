"""The verdict of PROTOCOL.md, from the records of the runs alone.

    python benchmarks/proof/verdict.py      # write results/verdict.json, and print it

A setting is counted unless runs of the base or of ``holdfast``, or further seeds of plain
fine-tuning, are missing.
``benchmarks/pages.py`` calls this when results or measures have changed.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from _bootstrap import Bootstrap, Interval
from _markdown import SPEC
from _measures import (
    CHANCE,
    GOALS,
    OURS,
    PLAIN,
    RATES_OF_OURS,
    REHEARSAL,
    TUNED,
    Point,
    Record,
    Setting,
    at_target,
    dominates,
    finite,
    is_plain,
    kept_share,
    learned_share,
    mean_kept,
    reached,
    retained,
)

RESULTS = Path(__file__).resolve().parent / "results"
#: The files that compute the verdict.
CODE = [Path(__file__).with_name(f"{name}.py")
        for name in ("_bootstrap", "_measures", "_samples", "verdict")]  # fmt: skip
#: The settings of the protocol: names of results, and titles of their models and targets. The
#: third title says whether the setting was new, seen in development, or chose a default.
SETTINGS: dict[str, tuple[str, str, str]] = SPEC["proof"]["settings"]
#: Further files, with titles as above: the base close to saturation, and the tests of abilities.
SATURATED: dict[str, tuple[str, str]] = SPEC["proof"]["saturated"]
ABILITIES: dict[str, tuple[str, str]] = SPEC["proof"]["abilities"]
ABLATED = "smollm2_gsm8k"  # its plain runs are also those of the ablations
Rows = list[dict[str, Any]]


def records(folder: Path) -> dict[str, Record]:
    """The results that there are, by name."""
    names = (*SETTINGS, *SATURATED, *ABILITIES, "ablations", "continual")
    files = {name: folder / f"{name}.json" for name in names}
    return {
        name: json.loads(file.read_text(encoding="utf-8"))
        for name, file in files.items()
        if file.exists()
    }


def digests(folder: Path) -> dict[str, str]:
    """A checksum of each file of results; if there are some, also of the code of the measures."""
    files = [file for file in sorted(folder.glob("*.json")) if file.stem != "verdict"]
    files += CODE if files else []
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}


def read(folder: Path = RESULTS) -> dict[str, Any]:
    """The verdict that was written; without one, that of no results."""
    file = folder / "verdict.json"
    if not file.exists():
        return {"sources": {}, **verdict_of({})}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def stale(folder: Path = RESULTS) -> bool:
    """Whether results or measures have changed since the verdict was written."""
    return bool(read(folder)["sources"] != digests(folder))


def write(folder: Path = RESULTS) -> None:
    verdict = {"sources": digests(folder), **verdict_of(records(folder))}
    text = json.dumps(verdict, indent=1, ensure_ascii=False)
    (folder / "verdict.json").write_text(text + "\n", encoding="utf-8")


def verdict_of(found: Mapping[str, Record]) -> dict[str, Any]:
    """The measures of all results. Settings with missing runs are ``unfinished``."""
    compared = {n: found[n] for n in (*SETTINGS, *SATURATED, *ABILITIES) if n in found}
    missing = {name: record["missing"] for name, record in found.items()}
    missing |= {name: missing[name] or lacking(record) for name, record in compared.items()}
    whole = {name: record for name, record in compared.items() if not lacking(record)}
    settings = {name: judge(record) for name, record in whole.items() if name in SETTINGS}
    finished = {name for name in settings if is_finished(missing[name])}
    base = found.get(ABLATED, {}).get("runs", ())
    changed = found.get("ablations", {}).get("runs", ())
    return {
        "missing": {name: runs for name, runs in missing.items() if runs},
        "settings": {name: one for name, one in settings.items() if name in finished},
        "unfinished": {name: one for name, one in settings.items() if name not in finished},
        "rates": {
            name: rows
            for name, record in whole.items() if name in SETTINGS
            if (rows := other_rates(record["runs"], changed if name == ABLATED else ()))
        },
        "saturated": {name: judge(whole[name]) for name in SATURATED if name in whole},
        "abilities": {name: abilities(whole[name]) for name in ABILITIES if name in whole},
        "ablations": ablations(changed, base),
        "continual": continual(found.get("continual", {}).get("runs", ())),
    }  # fmt: skip


def is_finished(missing: Iterable[str]) -> bool:
    """Whether the runs that the main figures come from are there.

    Of plain fine-tuning these are the further seeds, as they show which learning rate is the best.

    >>> is_finished(["rte-plain-2e-05-s0", "holdfast-lora-s1"]), is_finished(["plain-x2-s1"])
    (True, False)
    """
    needed = re.compile(rf"(.*-)?(pretrained|{OURS}-s\d+|{PLAIN}-.*-s[1-9]\d*)")
    return not any(map(needed.fullmatch, missing))


def lacking(record: Record) -> list[str]:
    """Of the base, ``holdfast`` and plain fine-tuning those that have not run."""
    plans = {PLAIN if is_plain(run["plan"]) else run["plan"] for run in record["runs"]}
    return [plan for plan in ("pretrained", OURS, PLAIN) if plan not in plans]


def judge(record: Record) -> dict[str, Any]:
    """All measures of a setting."""
    setting = Setting(record["runs"])
    ours, bootstrap = setting.point(OURS), Bootstrap(setting)
    resampled, points = bootstrap.measures(OURS), list(setting.points())
    rows = []
    for point in points:
        own = bootstrap.measures(point.plan, point.merged)
        ahead = [Interval.of(a - b) for a, b in zip(own, resampled, strict=True)]
        counts = point.row != RATES_OF_OURS
        better, worse = counts and dominates(point, ours), counts and dominates(ours, point)
        rows.append(
            row_of(setting, point) | {
                "target_interval": rounded(Interval.of(own.target)),
                "kept_interval": rounded(Interval.of(own.mean_kept)),
                "target_ahead": rounded(ahead[0]), "kept_ahead": rounded(ahead[1]),
                "dominates": how(better, all(interval.low >= 0 for interval in ahead)),
                "is_dominated": how(worse, all(interval.high <= 0 for interval in ahead)),
            }
        )  # fmt: skip
    return {
        "made": record["made"],
        "lr": setting.lr(OURS), "plain_lr": setting.lr(setting.best_plain),
        "best_plain": setting.best_plain, "frugal_plain": setting.frugal_plain,
        "base": figures(setting.base),
        "reached": {str(goal): reached(ours, goal) for goal in GOALS},
        "of_any_seeds": of_any_seeds(setting),
        "equal_target": equal_target(points, ours), "points": rows,
    }  # fmt: skip


def how(dominates: bool, clearly: bool) -> str:
    return ("clearly" if clearly else "yes") if dominates else "no"


def of_any_seeds(setting: Setting) -> dict[str, Any]:
    """The main figures if the best of plain may have fewer seeds than others."""
    best = setting.best_plain_of_any_seeds
    ours = setting.point(OURS, best=best)
    return {
        "best_plain": best, "target": ours.target, "reached": reached(ours, GOALS[0]),
        "plain_kept": setting.point(best).mean_kept,
    }  # fmt: skip


def other_rates(runs: Iterable[Record], changed: Iterable[Record]) -> Rows:
    """``holdfast`` at its default learning rate, and at multiples of it with what they are ahead.

    All of them have seed 0. In the setting of the ablations they are among the ``changed`` ones.
    """
    runs, named = list(runs), {run["plan"]: run for run in changed}
    if "default" in named:
        runs = [run for run in runs if run["plan"] != OURS] + [{**named["default"], "plan": OURS}]
        runs += [run for plan, run in named.items() if plan.startswith(RATES_OF_OURS)]
    ours = (OURS, RATES_OF_OURS)
    setting = Setting(
        run for run in runs if run.get("seed", 0) == 0 or run["plan"].partition("-x")[0] not in ours
    )
    plans = [plan for plan in setting.plans if setting.row(plan) == RATES_OF_OURS]
    if not plans or OURS not in setting.plans:
        return []
    bootstrap = Bootstrap(setting)
    default, rows = bootstrap.measures(OURS), [row_of(setting, setting.point(OURS))]
    for plan in plans:
        target, kept = bootstrap.measures(plan)
        rows.append(
            row_of(setting, setting.point(plan)) | {
                "target_ahead": rounded(Interval.of(target - default.target)),
                "kept_ahead": rounded(Interval.of(kept - default.mean_kept)),
            }
        )  # fmt: skip
    return rows


def abilities(record: Record) -> dict[str, Any]:
    """What each plan keeps of each test, with intervals, and the shares of right answers by part.

    All plans have one seed, so the shares are those of a run.
    """
    setting = Setting(record["runs"])
    bootstrap, about = Bootstrap(setting), setting.pretrained
    rows = []
    for point in setting.points():
        intervals = {test: rounded(found) for test, found in bootstrap.kept(*point[:2]).items()}
        rows.append(row_of(setting, point) | {"kept_intervals": intervals})
    return {
        "made": record["made"], "best_plain": setting.best_plain, "base": figures(setting.base),
        "chance": about["chance"], "left_out": about["left_out"],
        "shares": {run["plan"]: run["shares"] for run in record["runs"]}, "points": rows,
    }  # fmt: skip


def row_of(setting: Setting, point: Point) -> dict[str, Any]:
    """A point, and the figures behind it: medians over its seeds."""
    plan, merged = point.plan, point.merged
    seeds = setting.seeds(plan, merged)
    found = [figures(setting.figures(plan, merged, seed)) for seed in seeds]
    names = dict.fromkeys(name for one in found for name in one)  # some seeds answer in writing
    medians = {
        name: round(float(np.median([one[name] for one in found if name in one])), 6)
        for name in names
    }
    return {**point._asdict(), "worst": point.worst, "figures": medians}


def figures(point: Record) -> dict[str, float]:
    """The figures of a point, without standard errors but that of generated answers.

    Records of generated answers that do not say how many of them ended are not reported: they did
    not stop at the end of an answer.
    """
    written = {"written", "written_se"}
    out = {"samples", "sizes", *(written if "written_ended" not in point else ())}
    return {
        name: value
        for name, value in point.items()
        if name not in out and (name in written or not name.endswith("_se"))
    }


def rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 4) for value in values]


def equal_target(points: Iterable[Point], ours: Point) -> dict[str, float | None]:
    """The mean kept of each opponent at the target of ``holdfast``; None is not reached."""
    rows: dict[str, list[Point]] = {}
    for point in points:
        if point.row not in (OURS, RATES_OF_OURS):
            rows.setdefault(point.row, []).append(point)
    found = {row: at_target(some, ours.target) for row, some in rows.items()}
    return {row: None if np.isnan(kept) else round(kept, 4) for row, kept in found.items()}


def ablations(runs: Iterable[Record], others: Iterable[Record]) -> Rows:
    """The points of changed settings. The best of plain is that of the setting they belong to."""
    runs = list(runs)
    plain = [run for run in others if run["plan"].startswith("plain")]
    if not plain or not any(run["plan"] == "pretrained" for run in runs):
        return []
    setting = Setting([*runs, *plain])
    changed = [run["plan"] for run in runs if run["plan"] != "pretrained"]
    return [row_of(setting, setting.point(plan)) for plan in changed]


def continual(runs: Iterable[Record]) -> Rows:
    """What each plan keeps of the base after each stage, and of the tasks before.

    The share of a task is what is left of the gain that the stage of the task ended with.
    """
    found: dict[str, list[Record]] = {}
    for run in runs:
        found.setdefault(run["plan"], []).append(run)
    base = found.pop("pretrained", [{}])[0].get("points", {}).get("base")
    return [
        {
            "plan": plan, "seeds": len(some),
            "stages": _median_of([after_stages(base, run["points"]) for run in some]),
        }
        for plan, some in found.items() if base
    ]  # fmt: skip


def after_stages(base: Record, points: Mapping[str, Record]) -> Rows:
    """The measures after each stage of a run."""
    tasks = [name.partition("-")[2] for name in points]
    losses = {task: f"learned_{task}_nll" for task in tasks}
    ends = dict(zip(tasks, map(finite, points.values()), strict=True))
    rows: Rows = []
    for number, (task, point) in enumerate(ends.items(), 1):
        kept = {
            test: float(kept_share(base[test], point[test], CHANCE.get(test)))
            for test in base if retained(test) and test in point
        }  # fmt: skip
        gains = {name: base[loss] - point[loss] for name, loss in losses.items()}
        after = {name: base[losses[name]] - ends[name][losses[name]] for name in tasks[:number]}
        rows.append({
            "task": task, "loss": point[losses[task]], "mean_kept": float(mean_kept(kept)),
            "least_kept": min(kept.values()),
            "tasks": {name: float(learned_share(gains[name], after[name])) for name in after},
        })  # fmt: skip
    return rows


def _median_of(alike: list[Any]) -> Any:
    """The medians of numbers that are at the same place of nested lists and dictionaries."""
    first = alike[0]
    if isinstance(first, dict):
        return {key: _median_of([one[key] for one in alike]) for key in first}
    if isinstance(first, list):
        return [_median_of([*some]) for some in zip(*alike, strict=True)]
    return first if isinstance(first, str) else round(float(np.median(alike)), 4)


def ours_of(setting: Record) -> dict[str, Any]:
    return next(row for row in setting["points"] if row["plan"] == OURS)


def plain_of(setting: Record) -> dict[str, Any]:
    """The best of plain fine-tuning."""
    best = setting["best_plain"], TUNED
    return next(row for row in setting["points"] if (row["plan"], row["merged"]) == best)


def frugal_plain_of(setting: Record) -> dict[str, Any]:
    """Plain fine-tuning at the lowest learning rate that learns 99 % on the rows to choose on."""
    frugal = setting["frugal_plain"], TUNED
    return next(row for row in setting["points"] if (row["plan"], row["merged"]) == frugal)


def careful_plain_of(setting: Record) -> dict[str, Any]:
    """Of plain fine-tuning that learns 99 % or as much as ours, the rate that keeps the most."""
    points = (row for row in setting["points"] if is_plain(row["row"]) and row["merged"] == TUNED)
    enough = min(GOALS[0], ours_of(setting)["target"])
    return max((p for p in points if p["target"] >= enough), key=lambda p: float(p["mean_kept"]))


def opponents(setting: Record) -> Rows:
    """The points of methods that need no old data."""
    others = OURS, RATES_OF_OURS, REHEARSAL
    return [row for row in setting["points"] if row["row"] not in others]


def rehearsals(setting: Record) -> Rows:
    """The points of rehearsal, which trains on real old data."""
    return [row for row in setting["points"] if row["row"] == REHEARSAL]


def counts(settings: Mapping[str, Record]) -> dict[str, dict[int, Counter[str]]]:
    """How often each goal is reached, and how, by the kind of settings."""
    kinds = dict.fromkeys(kind for *_, kind in SETTINGS.values())
    return {
        kind: {
            goal: Counter(
                setting["reached"][str(goal)]
                for name, setting in settings.items()
                if SETTINGS[name][2] == kind
            )
            for goal in GOALS
        }
        for kind in kinds
    }


def main() -> None:
    write()
    verdict = read()
    compared = verdict["settings"] | verdict["unfinished"] | verdict["saturated"]
    for name, setting in compared.items():
        said = ", ".join(f"{goal}/{goal}: {how}" for goal, how in setting["reached"].items())
        print(f"\n{name}: best of plain is {setting['best_plain']}; {said}")
        _print_points(setting)
    for name, tested in verdict["abilities"].items():
        print(f"\n{name}: left out are {', '.join(tested['left_out']) or 'none'}")
        _print_points(tested)
    print(f"\n{len(verdict['settings'])} of {len(SETTINGS)} settings are finished")
    for name, runs in verdict["missing"].items():
        print(f"{name}: missing are {', '.join(runs)}")
    left = [name for name in SETTINGS if name not in compared and name not in verdict["missing"]]
    print(f"without results: {', '.join(left) or 'none'}")


def _print_points(setting: Record) -> None:
    notes = {"no": "", "yes": " dominates", "clearly": " clearly dominates"}
    for row in sorted(setting["points"], key=lambda row: -row["target"]):
        note = notes[row.get("dominates", "no")]
        kept = ", ".join(f"{test} {value:.1f}" for test, value in row["kept"].items())
        print(f"{row['plan']:16} {row['merged']:12} {row['seeds']} target {row['target']:6.1f} "
              f"kept {row['mean_kept']:6.1f}{note}  ({kept})")  # fmt: skip


if __name__ == "__main__":
    main()
