"""The page of the proof: bases of one shape, pretrained for longer and longer."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _markdown import number, table
from _measures import PLAIN, REHEARSAL, Point, Setting, at_target
from _proof_details import source_of
from _proof_text import folded, percent

RESULTS = Path(__file__).resolve().parent / "results"
REPLAY, SEEN = "self-replay", "seen"  # the losses on the pretraining text
Record = dict[str, Any]
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
    bases = {tokens: settings_of(record, tokens) for tokens in tokens_of(record)}
    if not bases:
        return ""
    about = next(iter(bases.values())).pretrained
    seeds = min(point.seeds for setting in bases.values() for point in setting.points())
    text = (
        f"Models of one shape ({about['parameters']:,} parameters, whose tokens are bytes) were "
        f"pretrained on WikiText-2 and GSM8K for longer and longer, and learn Shakespeare in "
        f"{record['protocol']['updates']} updates. Learned / kept, in percent, each method at the "
        f"learning rate that is best for the target (medians of at least {seeds} seeds of "
        "fine-tuning; one base per row). Losses are those of the base, in nats per byte, and in "
        "parentheses those on the text that it was pretrained on:"
    )
    heads = ["tokens per parameter", "WikiText-2", "GSM8K", *ROWS.values()]
    source = source_of("capacity", record, {"capacity": record["missing"]})
    rest = folded("All learning rates", f"{_all(bases)}\n\n{source}")
    seen = {run["base"]: run["points"]["base"] for run in record["runs"] if run["plan"] == SEEN}
    rows = [_row(tokens, setting, seen.get(tokens, {})) for tokens, setting in bases.items()]
    return "\n\n".join(
        ["### Bases of known saturation", text, table(heads, rows), _equal_target(bases), rest]
    )


def tokens_of(record: Record) -> list[float]:
    """The bases that all methods have tuned."""
    rows: dict[float, set[str]] = {}
    for run in record["runs"]:
        rows.setdefault(run["base"], set()).add(run["plan"].partition("-x")[0])
    return [tokens for tokens, found in rows.items() if found >= {"pretrained", *ROWS}]


def settings_of(record: Record, tokens: float) -> Setting:
    return Setting(r for r in record["runs"] if r["base"] == tokens and r["plan"] != SEEN)


def _row(tokens: float, setting: Setting, seen: Mapping[str, float]) -> list[str]:
    """A base, and what each method does with it at its best learning rate."""
    losses = (
        f"{number(setting.base[name], 3)} ({number(seen.get(name), 3)})"
        for name in ("wikitext_nll", "gsm8k_nll")
    )
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
            f"{title} {_kept_at(setting, row, own.target)}"
            for row, title in ROWS.items()
            if row != REPLAY
        )
        told = f"self-replay {percent(own.mean_kept)} %, {', '.join(kept)}"
        each.append(f"{tokens:g} tokens per parameter: {told}")
    return f"Kept where a method learns as much as self-replay: {'; '.join(each)}."


def _kept_at(setting: Setting, row: str, target: float) -> str:
    share = at_target(map(setting.point, _plans(setting, row)), target)
    return "does not learn as much" if math.isnan(share) else f"{percent(share)} %"


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
