"""The block of docs/results.md about learning rates of ``holdfast``; see _proof_tables.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verdict
from _markdown import table
from _measures import GOALS, RATES_OF_OURS, Point, dominates, reached
from _proof_text import TITLES, folded, listed, name_of, percent

#: The multiples of the default, with the names of their runs.
PLANS: dict[str, str] = TITLES["ablations"]["learning rate"]
DEFAULT = "× 1"
GOAL = GOALS[0]
Points = dict[str, Point]  # by the multiple of the default


def proof_rates() -> str:
    """What ``holdfast`` learns and keeps at other learning rates than its default."""
    whole = verdict.read()
    settings = whole["settings"]
    found = {name: points_of(name, one, whole["ablations"]) for name, one in settings.items()}
    found = {name: points for name, points in found.items() if len(points) > 1}
    if not found:
        return ""
    rows = [_row(name, settings[name]["lr"], points) for name, points in found.items()]
    heads = ["setting", "default", *(f"{times}: learned / kept, %" for times in PLANS)]
    return (
        f"## Is it the method or its learning rate?\n\n{_told(found, len(settings))}\n\n"
        + folded("All multiples of the default learning rate", table(heads, rows))
    )


def points_of(name: str, setting: Mapping[str, Any], ablations: verdict.Rows) -> Points:
    """The points of ``holdfast`` in a setting, in the order of ``PLANS``.

    The ablations have the other learning rates of the setting that they belong to.
    """
    rows = [*setting["points"], *(ablations if name == verdict.ABLATED else [])]
    found = {row["plan"]: row for row in rows if row["row"] == RATES_OF_OURS}
    found[PLANS[DEFAULT]] = verdict.ours_of(setting)
    return {
        times: Point(*(found[plan][field] for field in Point._fields))
        for times, plan in PLANS.items()
        if plan in found
    }


def _row(name: str, lr: float | None, points: Points) -> list[str]:
    """What is learned and kept in a setting, by the multiple."""
    cells = {
        times: f"{percent(point.target)} / {percent(point.mean_kept)}"
        for times, point in points.items()
    }
    default = "—" if lr is None else f"{lr:g}"
    return [name_of(name), default, *(cells.get(times, "—") for times in PLANS)]


def _told(found: Mapping[str, Points], settings: int) -> str:
    """In how many settings another learning rate would have been better than the default."""
    factors = listed([times.removeprefix("× ") for times in PLANS if times != DEFAULT])
    better = sum(map(is_dominated, found.values()))
    only = {name: times for name, points in found.items() if (times := only_others_reach(points))}
    names = "; ".join(f"{name_of(name)} ({listed(times)})" for name, times in only.items())
    where = f": {names}" if names else ""
    closest = sum(map(default_is_closest, found.values()))
    goal, of = f"{GOAL}/{GOAL}", f"of {len(found)}"
    return (
        f"`holdfast` also ran at {factors} times its default learning rate, with one seed, in "
        f"{len(found)} of {settings} settings. In {better} {of}, another multiple dominates the "
        "default (at least as good in learned and kept, better in one; the figures of the default "
        f"are medians over its seeds). In {len(only)} {of}, another multiple reaches {goal} where "
        f"the default does not{where}. In {closest} {of}, the default is closer to {goal} than "
        "every other multiple: the lower one of learned and kept, each counted as 100 % at most, "
        "is higher. Better multiples are chosen on the rows that are reported, so no claim follows "
        "from them. They only tell the cause of a miss."
    )


def is_dominated(points: Points) -> bool:
    """Whether another multiple dominates the default."""
    return any(dominates(other, points[DEFAULT]) for other in points.values())


def only_others_reach(points: Points) -> list[str]:
    """The multiples that reach the goal, if the default does not."""
    there = [times for times, point in points.items() if reached(point, GOAL) != "no"]
    return [] if DEFAULT in there else there


def default_is_closest(points: Points) -> bool:
    """Whether the default is closer to the goal than every other multiple."""
    close = {times: min(point.target, point.mean_kept, 100.0) for times, point in points.items()}
    default = close.pop(DEFAULT)
    return default > max(close.values())
