"""The block of docs/results.md about learning rates of ``holdfast``; see _proof_tables.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verdict
from _markdown import table
from _measures import GOALS, RATES_OF_OURS, Point, reached
from _proof_text import TITLES, folded, listed, name_of, percent

#: The multiples of the default, with the names of their runs.
PLANS: dict[str, str] = TITLES["ablations"]["learning rate"]
DEFAULT = "× 1"
GOAL = GOALS[0]
MUCH = 1.0  # percentage points
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
    """Where another learning rate would have been better than the default."""
    factors = listed([times.removeprefix("× ") for times in PLANS if times != DEFAULT])
    reach = {name: times for name, points in found.items() if (times := only_others_reach(points))}
    names = "; ".join(f"{name_of(name)} ({listed(times)})" for name, times in reach.items())
    closer = {name: better for name, points in found.items() if (better := much_closer(points))}
    each = "; ".join(
        f"{name_of(name)} at {times} {percent(closeness(found[name][times]))} instead of "
        f"{percent(closeness(found[name][DEFAULT]))}"
        for name, times in closer.items()
    )
    of = f"of {len(found)}"
    cause = (
        f": {each}. There the default learning rate is a part of the cause, within the intervals "
        "of the first table."
        if closer
        else "."
    )
    return (
        f"`holdfast` also ran at {factors} times its default learning rate, with one seed, in "
        f"{len(found)} of {settings} settings. In {len(reach)} {of}, one of these multiples "
        f"reaches {GOAL}/{GOAL} where the default does not{f': {names}' if names else ''}. In "
        f"{len(closer)} {of}, another multiple is more than a point closer to it, by the lower one "
        f"of learned and kept (in percent, 100 at most){cause} The multiples are chosen on the "
        "rows that are reported, so no claim follows from them."
    )


def only_others_reach(points: Points) -> list[str]:
    """The multiples that reach the goal, if the default does not."""
    there = [times for times, point in points.items() if reached(point, GOAL) != "no"]
    return [] if DEFAULT in there else there


def closeness(point: Point) -> float:
    """How close a point is to the goal: the lower one of learned and kept."""
    return min(point.target, point.mean_kept, 100.0)


def much_closer(points: Points) -> str:
    """The multiple that is closest to the goal, if it is a point closer than the default."""
    best = max(points, key=lambda times: closeness(points[times]))
    gain = closeness(points[best]) - closeness(points[DEFAULT])
    return best if gain > MUCH else ""
