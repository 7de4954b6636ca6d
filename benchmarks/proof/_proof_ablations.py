"""The block of docs/results.md about single settings of self-replay; see _proof_tables.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verdict
from _markdown import number, table
from _proof_text import TITLES, folded, least, percent, shown, without

SAME_RATE = ("plain-x1", "tuned")  # plain at the learning rate of the ablations


def proof_ablations() -> str:
    """The picture of changed settings, and all figures."""
    whole = verdict.read()
    found = {row["plan"]: row for row in whole["ablations"]}
    if not found:
        return ""
    rows = []
    for factor, values in TITLES["ablations"].items():
        for value, plan in values.items():
            if row := found.get(plan):
                cells = [percent(row["target"]), percent(row["mean_kept"]), least(row)]
                losses = [number(row["figures"].get(name), 3)
                          for name in ("report_nll", "wikitext_nll", "mbpp_nll")]  # fmt: skip
                rows.append([factor, value, *cells, *losses])
    heads = ["changed", "value", "learned, %", "kept, %", "kept least, %", "target loss",
             "WikiText-2 loss", "MBPP loss"]  # fmt: skip
    low = min(found.values(), key=lambda row: row["target"])
    lost = min(found.values(), key=lambda row: row["mean_kept"])
    text = (
        f"SmolLM2 learns GSM8K with one setting of self-replay changed at a time (one seed). "
        f"The least learned is {percent(low['target'])} % ({_changed(low['plan'])}), the least "
        f"kept {percent(lost['mean_kept'])} % ({_changed(lost['plan'])})."
        + _plain_at_the_same_rate(whole)
        + _others(found)
        + " The number of texts, the temperature and the model that writes were changed by a file "
        "of texts; in all others `holdfast` drew the texts itself."
        + without(whole["missing"], "ablations")
    )
    picture = shown("proof-ablations", "Learned and kept for changed settings", text)
    return f"## One setting changed at a time\n\n{picture}\n\n" + folded(
        "All changed settings", table(heads, rows)
    )


def _plain_at_the_same_rate(whole: dict[str, Any]) -> str:
    """A sentence about training without self-replay."""
    setting = whole["settings"].get(verdict.ABLATED)
    if setting is None:
        return ""
    points = [row for row in setting["points"] if (row["plan"], row["merged"]) == SAME_RATE]
    return "".join(
        f" Plain fine-tuning at the same learning rate learns {percent(row['target'])} % and keeps "
        f"{percent(row['mean_kept'])} %."
        for row in points
    )


def _others(found: dict[str, Any]) -> str:
    """A sentence about the changes that are not numbers, such as texts of another model."""
    each = [
        f"{value} {percent(found[plan]['target'])} / {percent(found[plan]['mean_kept'])}"
        for value, plan in TITLES["ablations"]["others"].items()
        if plan in found
    ]
    return f" Learned / kept, in percent: {', '.join(each)}." if each else ""


def _changed(plan: str) -> str:
    """How the table of ablations calls a run."""
    for factor, values in TITLES["ablations"].items():
        for value, name in values.items():
            if name == plan and plan != "default":
                return value if factor == "others" else f"{factor} {value}"
    return plan
