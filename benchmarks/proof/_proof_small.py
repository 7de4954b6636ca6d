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
    text = (
        f"The model that comes with holdfast has 2 million parameters and writes poor texts. It "
        f"learns 1,000 problems of GSM8K, far from its prose, verse and code: its loss falls from "
        f"{number(runs[best][0]['target']['before'], 2)} to {number(middle(after, runs[best]), 2)} "
        f"nats. Learned / kept, in percent, at multiples of the default learning rate (medians of "
        f"{len(runs['default'])} seeds): "
    )
    ways = {
        "plain fine-tuning, × 1": "plain-x1", f"plain fine-tuning, {_rate(best)}, its best": best,
        "self-replay, × 1, its default": "default", "self-replay, × 2": "rate-x2",
        "texts of the base in a file": "texts", "texts of an untrained model": "texts-untrained",
        "64 texts": "texts-64",
    }  # fmt: skip
    few = [
        f"{way} {' / '.join(map(percent, found[name]))}"
        for way, name in ways.items()
        if name in found
    ]
    more = f"Plain fine-tuning is best at {_rate(best)}, chosen on the rows that are reported."
    source = (
        f"[small_model.json](../benchmarks/proof/results/small_model.json): "
        f"`benchmarks/proof/small_model.py`; {record['device']}; torch "
        f"{record['versions']['torch']}; {record['date']}."
    )
    rest = folded(
        "One setting of self-replay changed at a time, on this model",
        f"{table(heads, rows)}\n\n{source}",
    )
    return f"## A base that writes poor texts\n\n{text}{'; '.join(few)}.\n\n{more}\n\n{rest}"


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
