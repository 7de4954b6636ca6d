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
from _measures import PLAIN, REHEARSAL, Point, Setting, at_target, rate_of
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
    bases = {tokens: setting_of(record, tokens) for tokens in tokens_of(record)}
    if not bases:
        return ""
    about = next(iter(bases.values())).pretrained
    target = math.floor(min(_best(setting, REPLAY).target for setting in bases.values()))
    seeds = min(point.seeds for setting in bases.values() for point in setting.points())
    text = (
        f"Models of one shape ({about['parameters']:,} parameters, whose tokens are bytes) were "
        f"pretrained on WikiText-2 and GSM8K for longer and longer, and learn Shakespeare in "
        f"{record['protocol']['updates']} updates (medians of {seeds} seeds of fine-tuning; one "
        f"base per number of tokens). Where {target} % is learned, as much as self-replay learns "
        f"on all of them, the methods keep:"
    )
    heads = ["tokens per parameter", "WikiText-2", "GSM8K", *ROWS.values()]
    source = source_of("capacity", record, {"capacity": record["missing"]})
    seen = {run["base"]: run["points"]["base"] for run in record["runs"] if run["plan"] == SEEN}
    rows = [_row(tokens, setting, seen.get(tokens, {})) for tokens, setting in bases.items()]
    each = "\n".join(
        f"- {tokens:g} tokens per parameter: "
        + ", ".join(f"{title} {_kept_at(setting, row, target)}" for row, title in ROWS.items())
        for tokens, setting in bases.items()
    )
    rest = folded(
        "All bases and learning rates",
        "Losses are those of the base, in nats per byte, and in parentheses those on the text that "
        "it was pretrained on. The rest is learned / kept, in percent, at the learning rate that "
        f"is best for the target. {_edge(bases)}\n\n{table(heads, rows)}\n\n{_all(bases)}\n\n"
        f"{source}",
    )
    return "\n\n".join(["### Bases of known saturation", text, each, rest])


def tokens_of(record: Record) -> list[float]:
    """The bases that all methods have tuned."""
    rows: dict[float, set[str]] = {}
    for run in record["runs"]:
        rows.setdefault(run["base"], set()).add(run["plan"].partition("-x")[0])
    return [tokens for tokens, found in rows.items() if found >= {"pretrained", *ROWS}]


def setting_of(record: Record, tokens: float) -> Setting:
    """The runs of a base."""
    return Setting(r for r in record["runs"] if r["base"] == tokens and r["plan"] != SEEN)


def _row(tokens: float, setting: Setting, seen: Mapping[str, float]) -> list[str]:
    """A base, and what each method does with it at its best learning rate."""
    losses = (
        f"{number(setting.base[name], 3)} ({number(seen.get(name), 3)})"
        for name in ("wikitext_nll", "gsm8k_nll")
    )
    best = (_best(setting, row) for row in ROWS)
    return [f"{tokens:g}", *losses, *(f"{_both(point)} ({_rate(point)})" for point in best)]


def _edge(bases: Mapping[float, Setting]) -> str:
    """How often the best learning rate is the highest that was run."""
    at_edge = [
        _best(setting, row).plan == max(_plans(setting, row), key=lambda plan: rate_of(plan, row))
        for setting in bases.values()
        for row in ROWS
    ]
    return f"In {sum(at_edge)} of {len(at_edge)} cases it is the highest that was run."


def _best(setting: Setting, row: str) -> Point:
    """The point of a method at the learning rate that is best for the target."""
    return setting.point(setting.best(_plans(setting, row)))


def _both(point: Point) -> str:
    return f"{percent(point.target)} / {percent(point.mean_kept)}"


def _kept_at(setting: Setting, row: str, target: float) -> str:
    """What a method keeps at a target, or where it learns the most."""
    share = at_target(map(setting.point, _plans(setting, row)), target)
    if not math.isnan(share):
        return f"{percent(share)} %"
    best = _best(setting, row)
    return f"{percent(best.mean_kept)} % (where it learns {percent(best.target)} %, its most)"


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
