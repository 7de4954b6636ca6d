"""The block of docs/results.md about learning rates of ``holdfast``; see _proof_tables.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verdict
from _markdown import table
from _measures import GOALS, OURS
from _proof_text import TITLES, folded, listed, name_of, percent
from verdict import ours_of

#: The multiples of the default, with the names of their runs.
PLANS: dict[str, str] = TITLES["ablations"]["learning rate"] | {"× 1": OURS}
DEFAULT = "× 1"
GOAL = GOALS[0]
FIELDS = {"target": "target_ahead", "mean_kept": "kept_ahead"}
Row = Mapping[str, Any]
Rows = dict[str, Row]  # by the multiple of the default


def proof_rates() -> str:
    """What ``holdfast`` learns and keeps at other learning rates than its default."""
    whole = verdict.read()
    settings = whole["settings"]
    found = {name: by_multiple(whole["rates"][name]) for name in settings if name in whole["rates"]}
    if not found:
        return ""
    body = [_row(name, settings[name], rows) for name, rows in found.items()]
    heads = ["setting", "default", *(f"{times}: learned / kept, %" for times in PLANS),
             "× 1, all seeds"]  # fmt: skip
    return (
        f"## Is it the method or its learning rate?\n\n{_told(found, len(settings))}\n\n"
        + folded("All multiples of the default learning rate", table(heads, body))
    )


def by_multiple(rows: verdict.Rows) -> Rows:
    """The rows in the order of ``PLANS``."""
    found = {row["plan"]: row for row in rows}
    return {times: found[plan] for times, plan in PLANS.items() if plan in found}


def _row(name: str, setting: Row, rows: Rows) -> list[str]:
    """What is learned and kept in a setting, by the multiple."""
    cells = [_both(rows[times]) if times in rows else "—" for times in PLANS]
    default = "—" if setting["lr"] is None else f"{setting['lr']:g}"
    return [name_of(name), default, *cells, _both(ours_of(setting))]


def _both(row: Row) -> str:
    return f"{percent(row['target'])} / {percent(row['mean_kept'])}"


def _told(found: Mapping[str, Rows], settings: int) -> str:
    """Where another learning rate is better than the default."""
    factors = listed([times.removeprefix("× ") for times in PLANS if times != DEFAULT])
    reach = {name: times for name, rows in found.items() if (times := only_others_reach(rows))}
    names = "; ".join(f"{name_of(name)} ({listed(times)})" for name, times in reach.items())
    nearer = {name: best for name, rows in found.items() if (best := nearest(rows)) != DEFAULT}
    each = "; ".join(
        f"{name_of(name)}, {best}: {_both(found[name][best])} instead of "
        f"{_both(found[name][DEFAULT])}"
        for name, best in nearer.items()
    )
    return (
        f"`holdfast` also ran at {factors} times its default learning rate, in {len(found)} of "
        f"{settings} settings. The runs that are compared here all have seed 0. "
        + (
            f"In {len(reach)} of {len(found)}, one of these multiples reaches {GOAL}/{GOAL} where "
            f"the default does not: {names}."
            if reach
            else f"None of these multiples reaches {GOAL}/{GOAL} where the default does not."
        )
        + (
            f" In {len(nearer)}, one of them is nearer to it, and the 95 % interval of the "
            "difference excludes 0 for the lower one of the default's two figures (learned / kept, "
            f"in percent): {each}."
            if nearer
            else " None is nearer to it with a 95 % interval of the difference that excludes 0."
        )
        + " The multiples are chosen on the rows that are reported."
    )


def only_others_reach(rows: Rows) -> list[str]:
    """The multiples that reach the goal, if the default does not."""
    there = [times for times, row in rows.items() if nearness(row) >= GOAL]
    return [] if DEFAULT in there else there


def nearness(row: Row) -> float:
    """How near a point is to the goal: the lower one of learned and kept."""
    return float(min(GOAL, *(row[field] for field in FIELDS)))


def nearest(rows: Rows) -> str:
    """The multiple that is nearest to the goal, if it is surely ahead where the default lacks most.

    Otherwise the default.
    """
    lacking = min(FIELDS, key=lambda field: float(rows[DEFAULT][field]))
    surely = [
        times
        for times, row in rows.items()
        if times != DEFAULT
        if row[FIELDS[lacking]][0] > 0 and nearness(row) > nearness(rows[DEFAULT])
    ]
    return max(surely, key=lambda times: nearness(rows[times]), default=DEFAULT)
