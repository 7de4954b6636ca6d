"""All figures of the proof, in folded tables: per setting every test and every point."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verdict
from _markdown import number, table
from _measures import OURS
from _proof_text import TITLES, folded, least, name_of, notes, percent, without
from verdict import ours_of, plain_of


def proof_details() -> str:
    """Everything else, folded."""
    found = verdict.read()
    settings = found["settings"] | found["unfinished"]
    if not settings:
        return ""
    parts = [folded("At equal target: all methods", _equal_targets(settings))]
    for name, setting in settings.items():
        note = " (not finished)" if name in found["unfinished"] else ""
        parts.append(details(name, setting, found["missing"], note))
    return "## All figures\n\n" + "\n\n".join(parts)


def details(
    name: str, setting: dict[str, Any], missing: dict[str, list[str]], note: str = ""
) -> str:
    """A folded part with every test and every point of a setting."""
    source = source_of(name, setting, missing)
    parts = [_single_tests(setting), _points(setting), source]
    return folded(f"{name_of(name)}{note}: all tests and all points", "\n\n".join(parts))


def _equal_targets(settings: dict[str, Any]) -> str:
    rows = [row for row in TITLES["rows"]
            if any(row in setting["equal_target"] for setting in settings.values())]  # fmt: skip
    body = []
    for name, setting in settings.items():
        ours, found = ours_of(setting), setting["equal_target"]
        cells = {row: "not reached" if kept is None else percent(kept)
                 for row, kept in found.items()}  # fmt: skip
        body.append([name_of(name), percent(ours["target"]), percent(ours["mean_kept"]),
                     *(cells.get(row, "—") for row in rows)])  # fmt: skip
    heads = ["", "target, %", "`holdfast` keeps, %", *(TITLES["rows"][row] for row in rows)]
    return _noted(table(heads, body), rows)


def _single_tests(setting: dict[str, Any]) -> str:
    """Every figure of the base, of the best of plain and of ``holdfast``."""
    base, both = setting["base"], (plain_of(setting), ours_of(setting))
    rows = []
    for field, title in (("report_nll", "target, nats per token"), ("target_report", "target, %"),
                         ("written", "target, generated answers, %")):  # fmt: skip
        if field in both[1]["figures"]:
            cells = [figure(field, figures.get(field)) for figures in
                     (base, *(row["figures"] for row in both))]  # fmt: skip
            shares = [percent(row["target"]) if field != "written" else "" for row in both]
            rows.append([title, *cells, *shares, "", ""])
    for test in both[1]["kept"]:
        cells = [figure(test, figures[test]) for figures in (base, *(r["figures"] for r in both))]
        shares = [percent(row["kept"][test]) for row in both]
        ratios = [percent(row["perplexity"][test]) if test in row["perplexity"] else ""
                  for row in both]  # fmt: skip
        unit = "nats per token" if test.endswith("_nll") else "%"
        rows.append([f"{TITLES['tests'][test]}, {unit}", *cells, *shares, *ratios])
    heads = ["", "pretrained", f"plain (`{setting['best_plain']}`)", "`holdfast`",
             "plain: share, %", "`holdfast`: share, %", "plain: perplexity before / after, %",
             "`holdfast`: perplexity before / after, %"]  # fmt: skip
    return table(heads, rows)


def figure(name: str, value: float | None) -> str:
    """A loss in nats, or a share in percent."""
    if value is None:
        return "—"
    return number(value, 3) if name.endswith("_nll") else number(100 * value, 1)


def _points(setting: dict[str, Any]) -> str:
    """Every point, with the differences to ``holdfast``."""
    body = []
    for row in sorted(setting["points"], key=lambda row: -row["target"]):
        family = row["row"].partition("+")[0]
        rate = row["plan"].removeprefix(family).removeprefix("-").replace("x", "× ")
        merge, _, alpha = row["merged"].rpartition("-")
        title = TITLES["rows"][row["row"]]
        cells = [title, rate, f"α = {alpha}" if merge else "", str(row["seeds"])]
        cells += [percent(row["target"]), percent(row["mean_kept"]), least(row)]
        if family == OURS:
            ahead = ["", "", ""]
        else:
            ahead = [_between(row[field]) for field in ("target_ahead", "kept_ahead")]
            ahead.append({"no": "", "yes": "dominates"}.get(row["dominates"], "clearly dominates"))
        body.append([*cells, *ahead])
    heads = ["", "learning rate; ×: times the one of the protocol", "merged", "seeds", "learned, %",
             "kept, %", "kept least, %", "learned more than `holdfast`, points",
             "kept more, points", ""]  # fmt: skip
    return _noted(table(heads, body), [row["row"] for row in setting["points"]])


def _noted(text: str, rows: Iterable[str]) -> str:
    """A table, and below it the notes to its rows."""
    return "\n\n".join(filter(None, [text, notes(rows)]))


def _between(interval: Sequence[float]) -> str:
    low, high = (f"{value:+.1f}".replace("-", "−") for value in interval)
    return f"{low} to {high}"


def source_of(name: str, setting: dict[str, Any], missing: dict[str, list[str]]) -> str:
    """Where a file of results was made, and which runs are missing."""
    machines: Iterable[dict[str, Any]] = setting["made"]

    def every(values: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    where = [
        every(made["device"] for made in machines),
        "torch " + every(made["versions"]["torch"] for made in machines),
        every(made["date"] for made in machines),
        "commit " + every(made["versions"].get("commit", "unknown") for made in machines),
    ]
    link = f"[{name}.json](../benchmarks/proof/results/{name}.json)"
    return f"{link}: {'; '.join(where)}.{without(missing, name)}"
