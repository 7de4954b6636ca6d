"""The block of docs/results.md about the settings that miss 99/99; see _proof_tables.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verdict
from _markdown import table
from _measures import GOALS
from _proof_text import TITLES, folded, name_of, percent
from verdict import ours_of, plain_of

GOAL = GOALS[0]
SHOWN = 3  # tests of a setting
Setting = dict[str, Any]


def proof_misses() -> str:
    """What is missing in each setting, the tests that lose the most, and the cause."""
    settings = verdict.read()["settings"]
    missed = {n: one for n, one in settings.items() if one["reached"][str(GOAL)] == "no"}
    if not missed:
        return ""
    target, kept = (
        {name for name, one in missed.items() if ours_of(one)[field] < GOAL}
        for field in ("target", "mean_kept")
    )
    told = (
        f"In {len(missed)} of {len(settings)} settings `holdfast` misses {GOAL}/{GOAL}: in "
        f"{len(target - kept)} it learns less, in {len(kept - target)} it keeps less, in "
        f"{len(target & kept)} both."
    )
    rows = [[name_of(name), *_missing(one), TITLES["causes"].get(name, "Not known.")]
            for name, one in missed.items()]  # fmt: skip
    heads = ["setting", "learned / kept, %",
             f"tests kept least, % (in parentheses plain; at most {SHOWN})", "cause"]  # fmt: skip
    return f"## Why the claim is missed\n\n{told}\n\n" + folded(
        "What is missing in each setting, and why", table(heads, rows)
    )


def _missing(setting: Setting) -> list[str]:
    """What is learned and kept, and the tests that are kept least."""
    ours, plain = ours_of(setting), plain_of(setting)
    lost = sorted((share, test) for test, share in ours["kept"].items() if share < GOAL)
    tests = (
        f"{TITLES['tests'][test]} {percent(share)} ({percent(plain['kept'][test])})"
        for share, test in lost[:SHOWN]
    )
    return [f"{percent(ours['target'])} / {percent(ours['mean_kept'])}", ", ".join(tests) or "—"]
