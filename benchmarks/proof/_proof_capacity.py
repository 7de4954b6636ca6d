"""The page of the proof: bases of one shape, pretrained for longer and longer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _markdown import number, table
from _measures import PLAIN, REHEARSAL, Point, Setting, at_target
from _proof_text import folded, percent

RESULTS = Path(__file__).resolve().parent / "results"
REPLAY = "self-replay"
#: Titles of the rows of capacity.py.
ROWS = {
    PLAIN: "plain fine-tuning", REPLAY: "self-replay",
    REHEARSAL: "rehearsal of the pretraining text",
}  # fmt: skip


def proof_capacity() -> str:
    """What is learned and kept, by how much a base was pretrained."""
    file = RESULTS / "capacity.json"
    if not file.exists():
        return ""
    record = json.loads(file.read_text(encoding="utf-8"))
    runs = record["runs"]
    bases = {run["base"]: Setting(r for r in runs if r["base"] == run["base"]) for run in runs}
    about, made = bases[min(bases)].pretrained, record["made"][0]
    seeds = max(point.seeds for setting in bases.values() for point in setting.points())
    text = (
        f"Models of one shape ({about['parameters']:,} parameters, whose tokens are bytes) were "
        f"pretrained on WikiText-2 and GSM8K for longer and longer, and learn Shakespeare in "
        f"{record['protocol']['updates']} updates. Learned / kept, in percent, each method at the "
        f"learning rate that is best for the target (medians of {seeds} seeds):"
    )
    heads = ["tokens per parameter", "WikiText-2, nats per byte", "GSM8K", *ROWS.values()]
    source = (
        f"[capacity.json](../benchmarks/proof/results/capacity.json): "
        f"`benchmarks/proof/capacity.py`; {made['device']}; torch {made['versions']['torch']}; "
        f"{made['date']}; commit {made['versions']['commit']}."
    )
    rest = folded("All learning rates", f"{_all(bases)}\n\n{source}")
    rows = [_row(tokens, setting) for tokens, setting in bases.items()]
    return "\n\n".join(
        ["### Bases of known saturation", text, table(heads, rows), _equal_target(bases), rest]
    )


def _row(tokens: float, setting: Setting) -> list[str]:
    """A base, and what each method does with it at its best learning rate."""
    losses = [number(setting.base[f"{test}_nll"], 3) for test in ("wikitext", "gsm8k")]
    best = (setting.point(setting.best(_plans(setting, row))) for row in ROWS)
    return [
        f"{tokens:g}", *losses,
        *(f"{percent(p.target)} / {percent(p.mean_kept)} ({_rate(p)})" for p in best),
    ]  # fmt: skip


def _equal_target(bases: dict[float, Setting]) -> str:
    """What the others keep where they learn as much as self-replay does at its best."""
    each = []
    for tokens, setting in bases.items():
        own = setting.point(setting.best(_plans(setting, REPLAY)))
        kept = (
            f"{title} {percent(share) + ' %' if share == share else 'does not learn as much'}"
            for row, title in ROWS.items()
            if row != REPLAY
            for share in [at_target(map(setting.point, _plans(setting, row)), own.target)]
        )
        each.append(
            f"{tokens:g} tokens per parameter: self-replay {percent(own.mean_kept)} %, "
            + ", ".join(kept)
        )
    return f"Kept where a method learns as much as self-replay: {'; '.join(each)}."


def _all(bases: dict[float, Setting]) -> str:
    rows = []
    for tokens, setting in bases.items():
        for row, title in ROWS.items():
            for point in map(setting.point, _plans(setting, row)):
                losses = [
                    number(setting.median(point.plan, f"{name}_nll"), 3)
                    for name in ("report", "wikitext", "gsm8k")
                ]
                shares = [percent(point.target), percent(point.mean_kept)]
                rows.append([f"{tokens:g}", title, _rate(point), *shares, *losses])
    heads = ["tokens per parameter", "", "learning rate", "learned, %", "kept, %",
             "target loss", "WikiText-2 loss", "GSM8K loss"]  # fmt: skip
    return f"Learning rates are multiples of that of pretraining.\n\n{table(heads, rows)}"


def _plans(setting: Setting, row: str) -> list[str]:
    return [plan for plan in setting.plans if setting.row(plan) == row]


def _rate(point: Point) -> str:
    return point.plan.replace(f"{point.row}-x", "× ")
