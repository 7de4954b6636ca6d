"""What the results say: medians over seeds, matched targets, correlations."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from scipy import stats

RESULTS = Path(__file__).resolve().parent / "results"
Run = dict[str, Any]


class Results:
    """The runs of a table."""

    def __init__(self, name: str, folder: Path = RESULTS) -> None:
        self.name = name
        self.text = (folder / f"{name}.json").read_text(encoding="utf-8")
        record = json.loads(self.text)
        self.protocol, self.made = record["protocol"], record["made"]
        self.runs: list[Run] = record["runs"]
        self.missing: list[str] = record["missing"]

    def where(self, **wanted: Any) -> list[Run]:
        return [r for r in self.runs if all(r.get(k) == v for k, v in wanted.items())]


@dataclass(frozen=True)
class Point:
    """A recipe's figures at one α of WiSE-FT, the median of each over the seeds."""

    recipe: str
    alpha: float
    seeds: int
    figures: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.figures[name]


class Table:
    """Recipes, and the points on the way of each from α = 1 down."""

    def __init__(self, runs: Iterable[Run], key: str) -> None:
        self.runs, self.key = list(runs), key

    @cached_property
    def recipes(self) -> list[str]:
        return list(dict.fromkeys(run["recipe"] for run in self.runs))

    def point(self, recipe: str, alpha: float = 1.0) -> Point:
        of_recipe = [run for run in self.runs if run["recipe"] == recipe]
        found = [run[self.key][f"{alpha:g}"] for run in of_recipe if f"{alpha:g}" in run[self.key]]
        if not found:
            raise KeyError(f"{recipe} at α = {alpha:g}")
        names = set.intersection(*(set(figures) for figures in found))
        medians = {name: statistics.median(f[name] for f in found) for name in sorted(names)}
        return Point(recipe, alpha, len(found), medians)

    def path(self, recipe: str) -> list[Point]:
        """From α = 1 down."""
        alphas = {float(a) for run in self.runs if run["recipe"] == recipe for a in run[self.key]}
        return [self.point(recipe, alpha) for alpha in sorted(alphas, reverse=True)]


def kept_at(path: Sequence[Point], target: str, wanted: float, kept: str) -> float | None:
    """The most that is kept anywhere on a path where the target is at least so good.

    Between two points of the path all figures are taken to go in straight lines. Of losses (their
    names end in ``_nll``) less is better.
    """
    x, y = (-1 if name.endswith("_nll") else 1 for name in (target, kept))
    found = [p[kept] for p in path if x * p[target] >= x * wanted]
    for a, b in itertools.pairwise(path):
        if min(a[target], b[target]) < wanted < max(a[target], b[target]):
            share = (wanted - a[target]) / (b[target] - a[target])
            found.append(a[kept] + share * (b[kept] - a[kept]))
    return y * max(y * value for value in found) if found else None


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Rank correlation."""
    return float(stats.spearmanr(x, y).statistic)
