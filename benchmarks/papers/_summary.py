"""Medians and means over seeds, comparisons at equal target, and better points, of results."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = {"mobilenet-v2": "MobileNetV2", "efficientnet-lite0": "EfficientNet-Lite0"}
#: The target at which recipes are compared, chosen after the runs. For images it is at least two
#: standard errors above the linear probe.
TARGETS = {"mobilenet-v2": 92.5, "efficientnet-lite0": 91.5, "language": 0.65}
Run = dict[str, Any]


@cache
def read(name: str) -> dict[str, Any]:
    """The record of one script: protocol, machines and runs."""
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def runs_of(name: str, **wanted: Any) -> list[Run]:
    """The runs with these values."""
    return [r for r in read(name)["runs"] if all(r.get(k) == v for k, v in wanted.items())]


@dataclass(frozen=True)
class Point:
    """The figures of a recipe at one α of WiSE-FT: medians over the seeds."""

    recipe: str
    seeds: int
    figures: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.figures[name]


class Medians:
    """All recipes of one model: ``mobilenet-v2``, ``efficientnet-lite0`` or ``language``.

    Attributes:
        recipes: their names.
        base: the recipe that all others start from.
        learned, kept: the fields of the target task and of the retained one.
    """

    def __init__(self, model: str) -> None:
        language = model == "language"
        self.model, self.key = model, "points" if language else "alpha"
        self.runs = runs_of("language") if language else runs_of("vision", model=model)
        self.recipes = list(dict.fromkeys(run["recipe"] for run in self.runs))
        self.base, self.learned, self.kept = (
            ("pretrained", "gsm8k_nll", "wikitext_nll")
            if language
            else ("probe", "target", "imagenet")
        )

    def point(self, recipe: str, alpha: float = 1.0) -> Point:
        """A recipe at one α; ``recipe@α`` is accepted as well."""
        recipe, _, given = recipe.partition("@")
        key = f"{float(given or alpha):g}"
        some = [run for run in self.runs if run["recipe"] == recipe]
        found = [run[self.key][key] for run in some if key in run[self.key]]
        if not found:
            raise KeyError(f"{recipe} at α = {key}")
        names = set.intersection(*(set(figures) for figures in found))
        medians = {name: statistics.median(f[name] for f in found) for name in sorted(names)}
        return Point(recipe, len(found), medians)

    def path(self, recipe: str) -> list[Point]:
        """The points of a recipe, from α = 1 down."""
        alphas = {float(a) for run in self.runs if run["recipe"] == recipe for a in run[self.key]}
        return [self.point(recipe, alpha) for alpha in sorted(alphas, reverse=True)]

    def matched(
        self, recipe: str, kept: str | None = None, at: float | None = None
    ) -> float | None:
        """The retained figure at equal target, anywhere on WiSE-FT's path to the base."""
        if recipe == self.base:
            return None
        path = [*self.path(recipe), self.point(self.base)]
        target = TARGETS[self.model] if at is None else at
        return kept_at(path, self.learned, target, kept or self.kept)

    def diverged(self, recipe: str) -> bool:
        """Whether an image model learned nothing and lost what its new head had."""
        if self.model == "language":
            return False
        return self.point(recipe)["target"] < self.point("probe")["target"] / 2


def kept_at(path: Sequence[Point], target: str, wanted: float, kept: str) -> float | None:
    """The best retained figure on a path where the target figure is at least as good as wanted.

    Figures are interpolated linearly between the points of the path. Fields whose names end in
    ``_nll`` are losses, so smaller is better.
    """
    x, y = (-1 if name.endswith("_nll") else 1 for name in (target, kept))
    found = [p[kept] for p in path if x * p[target] >= x * wanted]
    for a, b in itertools.pairwise(path):
        if min(a[target], b[target]) < wanted < max(a[target], b[target]):
            share = (wanted - a[target]) / (b[target] - a[target])
            found.append(a[kept] + share * (b[kept] - a[kept]))
    return y * max(y * value for value in found) if found else None


def is_loss(name: str) -> bool:
    """Whether smaller is better."""
    return name.endswith(("_nll", "loss"))


@dataclass(frozen=True)
class Mean:
    """The means of figures over seeds, and their standard errors (0 with one seed)."""

    seeds: int
    means: dict[str, float]
    errors: dict[str, float]

    @classmethod
    def of(cls, found: Sequence[Mapping[str, float]]) -> Mean:
        names = [name for name in found[0] if all(name in figures for figures in found)]
        columns = {name: [figures[name] for figures in found] for name in names}
        root = math.sqrt(len(found))
        return cls(
            len(found),
            {name: statistics.mean(values) for name, values in columns.items()},
            {
                name: statistics.stdev(values) / root if len(values) > 1 else 0.0
                for name, values in columns.items()
            },
        )


Points = dict[tuple[str, str], Mean]  # by recipe and α


def mean_points(runs: Iterable[Run], key: str = "points") -> Points:
    """Every recipe at every α of WiSE-FT."""
    found: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for run in runs:
        for alpha, figures in run[key].items():
            found.setdefault((run["recipe"], alpha), []).append(figures)
    return {point: Mean.of(some) for point, some in found.items()}


def over_tasks(runs: Sequence[Run], fields: Sequence[str]) -> list[Run]:
    """Means over tasks of the recipes and seeds that were run on all of them."""
    found: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        if "task" in run:
            found.setdefault((run["recipe"], run["seed"]), []).append(run)
    tasks = {run["task"] for some in found.values() for run in some}

    def mean(some: list[Run], alpha: str) -> dict[str, float]:
        return {f: statistics.mean(run["points"][alpha][f] for run in some) for f in fields}

    return [
        {"recipe": recipe, "points": {alpha: mean(some, alpha) for alpha in some[0]["points"]}}
        for (recipe, _), some in found.items()
        if len(some) == len(tasks)
    ]


def better_points(points: Points, ours: tuple[str, str], fields: Sequence[str]) -> list[str]:
    """The points of other recipes that are better than ours in all fields, as ``recipe@α``."""
    mine = points[ours].means
    signs = {name: -1 if is_loss(name) else 1 for name in fields}
    return [
        f"{recipe}@{alpha}"
        for (recipe, alpha), point in points.items()
        if recipe != ours[0]
        and all(sign * point.means[name] > sign * mine[name] for name, sign in signs.items())
    ]


def comparison(points: Points, fields: Sequence[str], ours: str = "holdfast") -> str:
    """All figures of all points as a table, and what is better than each point of ours.

    The first fields are those that are compared; the table has them first.
    """
    names = list(dict.fromkeys([*fields, *(n for p in points.values() for n in p.means)]))
    names = [name for name in names if not name.endswith("_se")]
    lines = [["", "α", "seeds", *names], ["---"] * (3 + len(names))]
    for (recipe, alpha), point in points.items():
        lines.append([recipe, alpha, str(point.seeds), *(_shown(point, name) for name in names)])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    for recipe, alpha in points:
        if recipe == ours:
            better = better_points(points, (recipe, alpha), fields)
            text += f"\n\n{ours} at α = {alpha}: {len(better)} points are better in "
            text += f"{', '.join(fields)}{': ' if better else ''}{', '.join(better)}."
    return text


def _shown(point: Mean, name: str) -> str:
    if name not in point.means:
        return ""
    digits = 4 if abs(point.means[name]) < 10 else 2
    error = f" ± {point.errors[name]:.{digits}f}" if point.seeds > 1 else ""
    return f"{point.means[name]:.{digits}f}{error}"
