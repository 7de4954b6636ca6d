"""The block of docs/results.md about three tasks in a row; see _proof_tables.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verdict
from _markdown import number, table
from _proof_text import TASKS, folded, listed, percent, plan_title, shown, without


def proof_continual() -> str:
    """The picture of three tasks in a row, and all figures."""
    whole = verdict.read()
    found = whole["continual"]
    if not found:
        return ""
    tasks = [stage["task"] for stage in found[0]["stages"]]
    rows, ends = [], []
    for row in found:
        cells = [percent(stage["mean_kept"]) for stage in row["stages"]]
        cells += [number(stage["loss"], 3) for stage in row["stages"]]
        cells += [
            percent(stage["tasks"][task])
            for i, task in enumerate(tasks)
            for stage in row["stages"][i + 1 :]
        ]
        title, last = plan_title(row["plan"]), row["stages"][-1]
        rows.append([title, str(row["seeds"]), *cells])
        left = [last["tasks"][task] for task in tasks[:-1]]
        shares = [f"{percent(share)} %" if share >= 0 else "nothing" for share in left]
        ends.append(f"{title} {percent(last['mean_kept'])} % ({' and '.join(shares)})")
    names = [TASKS[task] for task in tasks]
    heads = [f"pretrained kept after {name}, %" for name in names]
    heads += [f"{name} loss" for name in names]
    heads += [
        f"{one} kept after {other}, %" for i, one in enumerate(names) for other in names[i + 1 :]
    ]
    text = (
        f"SmolLM2 learns {listed(names)}, one after the other. At the end the methods have kept so "
        f"much of the pretrained model, and in parentheses of what they had learned of "
        f"{listed(names[:-1])} (medians over seeds): {'; '.join(ends)}. Nothing means that the "
        "loss is as high as before the task was learned, or higher."
        + without(whole["missing"], "continual")
    )
    picture = shown(
        "proof-continual", "Kept of the base and of the first task after each task", text
    )
    return f"## Three tasks in a row\n\n{picture}\n\n" + folded(
        "All stages", table(["", "seeds", *heads], rows)
    )
