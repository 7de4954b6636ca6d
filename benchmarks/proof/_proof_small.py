"""The page of the proof: self-replay on a small model, whose texts are poor."""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _markdown import number, table
from _proof_text import TITLES, folded, percent

RESULTS = Path(__file__).resolve().parent / "results"
Run = dict[str, Any]


def proof_small() -> str:
    """What self-replay keeps of a small model, with one setting changed at a time."""
    file = RESULTS / "small_model.json"
    if not file.exists():
        return ""
    record = json.loads(file.read_text(encoding="utf-8"))
    runs: dict[str, list[Run]] = {}
    for run in record["runs"]:
        runs.setdefault(run["recipe"], []).append(run)
    plain = [name for name in runs if name.startswith("plain-")]
    best = max(plain, key=lambda name: middle(learned, runs[name]))
    most = middle(learned, runs[best])
    found = {
        name: (100 * middle(learned, some) / most, middle(kept, some))
        for name, some in runs.items()
    }
    rows = [
        [factor, str(value), *(percent(share) for share in found[name]), *losses(runs[name])]
        for factor, values in TITLES["small"].items()
        for value, name in values.items()
        if name in found
    ]
    tests = [test["name"] for test in record["runs"][0]["retained"]]
    heads = [
        "changed",
        "value",
        "learned, %",
        "kept, %",
        "target loss",
        *(f"{t} loss" for t in tests),
    ]
    cells = {name: f"{percent(a)} % and keeps {percent(b)} %" for name, (a, b) in found.items()}
    text = (
        f"The model that comes with holdfast has 2 million parameters and writes poor texts. It "
        f"learns GSM8K, which is far from its prose, verse and code: its loss falls from "
        f"{number(runs[best][0]['target']['before'], 2)} to {number(middle(after, runs[best]), 2)} "
        f"nats. Plain fine-tuning learns 100 % at its best learning rate ({_rate(best)}) and keeps "
        f"{percent(found[best][1])} %. Self-replay with its defaults learns {cells['default']}. "
        f"With texts of an untrained model it learns {cells['texts-untrained']}; with texts of its "
        f"own that were drawn alike, {cells['texts']}. The most that any setting below keeps is "
        f"{percent(max(share for _, share in found.values()))} %. Medians of "
        f"{len(runs['default'])} seeds; the learning rate of plain is chosen on the rows that are "
        f"reported."
    )
    source = (
        f"[small_model.json](../benchmarks/proof/results/small_model.json): "
        f"`benchmarks/proof/small_model.py`; {record['device']}; torch "
        f"{record['versions']['torch']}; {record['date']}."
    )
    return f"## A base that writes poor texts\n\n{text}\n\n" + folded(
        "One setting of self-replay changed at a time, on this model",
        f"{table(heads, rows)}\n\n{source}",
    )


def _rate(plan: str) -> str:
    return plan.replace("plain-x", "× ")


def middle(figure: Any, runs: list[Run]) -> float:
    return float(statistics.median(map(figure, runs)))


def after(run: Run) -> float:
    """The loss on the target."""
    return float(run["target"]["after"])


def learned(run: Run) -> float:
    """The gain on the target, in nats."""
    return float(run["target"]["before"] - run["target"]["after"])


def kept(run: Run) -> float:
    """The mean of the losses before and after, in percent; each test counts as 100 at most.

    >>> kept({"retained": [{"before": math.e, "after": math.e**2}, {"before": 9.0, "after": 8.0}]})
    75.0
    """
    shares = (math.log(test["before"]) / math.log(test["after"]) for test in run["retained"])
    return statistics.mean(min(100.0, 100 * share) for share in shares)


def losses(runs: list[Run]) -> list[str]:
    """The losses on the target and on the retained texts."""
    texts = zip(*(run["retained"] for run in runs), strict=True)
    logs = [statistics.median(math.log(test["after"]) for test in text) for text in texts]
    return [number(value, 3) for value in (middle(after, runs), *logs)]
