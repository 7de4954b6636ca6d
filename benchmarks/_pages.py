"""What the scripts share that fill pages from benchmarks/results/*.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
#: Fields of rows by the heads of their columns, with the digits to show; None is three in all.
Columns = Mapping[str, tuple[str, int | None]]

GPU, CPU = "recadam_step_h200", "recadam_step_cpu"
GPU_BF16, EIGHT_BIT = "recadam_step_h200_bf16", "eight_bit_h200"
#: Records of one subject that are measured one after the other.
TOGETHER = {GPU: (GPU, GPU_BF16)}
MOFO_GPU, PENALTY_GPU = "mofo_step_h200", "penalty_step_h200"
PLACEMENT, GROWTH, WHOLE = "anchor_placement_h200", "step_growth_h200", "end_to_end_h200"
SCORING, DISK = ("flow_score_h200", "flow_score_cpu"), "merge_and_drift"

ADAMW = {"torch_fused_adamw": "`torch.optim.AdamW(fused=True)`"}
RECADAM = {
    **ADAMW,
    "recadam_fused": "`RecAdam(fused=True)`",
    "recadam_fused_bf16_anchor": "– with bfloat16 anchors",
    "recadam_fp32_state": "– with moments in float32",
    "recadam_fp32_state_stochastic": "– with moments in float32, `stochastic_rounding=True`",
    "recadam_8bit": "– with moments of 8 bits, bfloat16 anchors",
    "recadam_after_annealing": "– after annealing, `release=True`",
    "recadam_foreach": "`RecAdam(foreach=True)`",
    "torch_foreach_adamw": "`torch.optim.AdamW(foreach=True)`",
    "torchao_adamw_8bit": "torchao's `AdamW8bit`",
    "plain_loop": "RecAdam as a plain loop over the tensors",
}
MOFO = {
    **ADAMW,
    "mofo_fused": "`MoFO(fused=True)`",
    "mofo_foreach": "`MoFO(foreach=True)`",
    "plain_loop": "MoFO as a plain loop with `torch.topk`",
}
PENALTIES = {
    **ADAMW,
    "l2sp": "`L2SP`",
    "ewc": "`EWC`",
    "l2sp_coupled": "`L2SP(coupled=True)`",
    "ewc_coupled": "`EWC(coupled=True)`",
    "plain_loop": "L2-SP as a plain loop over the tensors",
}


class Results:
    """The records in a folder. What is not there is empty."""

    def __init__(self, folder: Path = ROOT / "benchmarks" / "results") -> None:
        self.folder = folder

    def read(self, name: str) -> Row:
        record: Row = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        return record

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.json").exists()

    def rows(self, name: str) -> list[Row]:
        found = [self.read(part) for part in TOGETHER.get(name, (name,)) if self.has(part)]
        return [row for record in found for row in record.get("rows", [])]

    def row(self, name: str, case: str, impl: str) -> Row:
        rows = self.rows(name)
        return next((r for r in rows if (r["case"], r["impl"]) == (case, impl)), {})

    def figure(self, name: str, case: str, impl: str, field: str = "x_fused_adamw") -> float | None:
        value: float | None = self.row(name, case, impl).get(field)
        return value


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    return "—" if value is None else f"{value:.{digits}f}"


def prose(text: str) -> str:
    return " ".join(text.split())


def ms(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return "—"
    return number(value, 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3)


def measured(results: Results, name: str) -> str:
    """Where the figures of a table come from."""
    if not results.has(name):
        return f"Not measured yet: `benchmarks/results/{name}.json` is missing."
    record = results.read(name)
    versions = record["versions"]
    torch, triton = versions["torch"], versions.get("triton")
    what = record["protocol"]
    if isinstance(what, dict):
        what = "; ".join(f"{key}: {value}" for key, value in what.items())
    with_triton = f", Triton {triton}" if triton and "CPU" not in record["device"] else ""
    return (
        f"[{name}.json](../benchmarks/results/{name}.json): {record['device']}, torch {torch}"
        f"{with_triton}, {record['date']}; {what}."
    )


def in_order(rows: Iterable[Row], titles: Mapping[str, str]) -> list[Row]:
    """By case, and as the titles are in each."""
    rows, places = list(rows), list(titles)
    cases = list(dict.fromkeys(row["case"] for row in rows))

    def place(row: Row) -> tuple[int, int]:
        known = row["impl"] in titles
        return cases.index(row["case"]), places.index(row["impl"]) if known else len(places)

    return sorted(rows, key=place)


def by_case(
    rows: Iterable[Row], titles: Mapping[str, str], columns: Columns, first: str = "shapes"
) -> str:
    """A line for each row, with its case where another begins."""
    rows = list(rows)
    columns = {
        head: column for head, column in columns.items() if any(column[0] in row for row in rows)
    }
    lines, last = [], ""
    for row in in_order(rows, titles):
        title = titles.get(row["impl"], f"`{row['impl']}`")
        cells = [
            ms(row.get(field)) if digits is None else number(row.get(field), digits)
            for field, digits in columns.values()
        ]
        lines.append([row["case"] if row["case"] != last else "", title, *cells])
        last = row["case"]
    return table([first, "", *columns], lines)


def scoring(results: Results, name: str) -> str:
    """A sentence on FLOW's scoring."""
    record = results.read(name)
    s = {row["impl"]: row["seconds"] for row in record["rows"]}
    return (
        f"Scoring ({record['rows'][0]['case']}, {record['device'].split(',')[0]}) is "
        f"{s['naive_two_pass'] / s['score']:.1f} × as fast as a naive two-pass version with the "
        f"same memory and takes {s['score'] / s['train_epoch']:.2f} of a training epoch; a second "
        f"call reads the cache in {100 * s['score_cached'] / s['score']:.1f} % of the time."
    )
