"""Medians and means over seeds, comparisons at equal target, better points, goals, of results."""

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

from _markdown import table

from holdfast import Recipe

RESULTS = Path(__file__).resolve().parent / "results"
#: The target at which recipes are compared, chosen after the runs. For images it is at least two
#: standard errors above the linear probe.
TARGETS = {"mobilenet-v2": 92.5, "efficientnet-lite0": 91.5, "language": 0.65}
OURS = "holdfast"
#: What a language model learns, and what it should keep.
LOSSES = {"gsm8k_nll": "GSM8K", "wikitext_nll": "WikiText-2", "mbpp_nll": "MBPP"}
LANGUAGE = tuple(LOSSES)
CONTEXT_FREE = "kl_context_free"  # no evidence for a recipe that was trained on such texts
Run = dict[str, Any]


@cache
def read(name: str) -> dict[str, Any]:
    """The record of one script: protocol, machines and runs."""
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def runs_of(name: str, **wanted: Any) -> list[Run]:
    """The runs with these values."""
    return [r for r in read(name)["runs"] if all(r.get(k) == v for k, v in wanted.items())]


def recall_of(settings: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The recall of a recorded recipe; records without one were made before recalls."""
    found: Mapping[str, Any] = (settings or {}).get("recall", {"name": "no-recall"})
    return found


def rehearses(settings: Mapping[str, Any] | None) -> bool:
    """Whether a recorded recipe was trained on texts drawn from the base."""
    return Recipe.from_dict({"recall": recall_of(settings)}).recall.trains_on_drawn_texts


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
        """The points of a recipe that all its seeds have, from α = 1 down."""
        runs = [run for run in self.runs if run["recipe"] == recipe]
        alphas = set.intersection(*(set(run[self.key]) for run in runs))
        return [self.point(recipe, alpha) for alpha in sorted(map(float, alphas), reverse=True)]

    def rehearses(self, recipe: str) -> bool:
        """Whether a recipe was trained on texts drawn from the base."""
        return any(rehearses(r.get("settings")) for r in self.runs if r["recipe"] == recipe)

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
    """The means of figures over seeds, and their standard errors.

    Attributes:
        seeds: how many.
        means: of the figures.
        errors: standard errors over seeds. If a figure has a sampling error (``_se``), it is added
            in quadrature; it does not fall with the seeds, which share the test's rows.
        settings: what the recipe changes; None if nothing was trained.
    """

    seeds: int
    means: dict[str, float]
    errors: dict[str, float]
    settings: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls, found: Sequence[Mapping[str, float]], settings: Mapping[str, Any] | None = None
    ) -> Mean:
        names = [name for name in found[0] if all(name in figures for figures in found)]
        columns = {name: [figures[name] for figures in found] for name in names}
        means = {name: statistics.mean(values) for name, values in columns.items()}
        errors = {}
        for name, values in columns.items():
            between = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
            errors[name] = math.hypot(between, means.get(f"{name}_se", 0.0))
        return cls(len(found), means, errors, settings)

    @property
    def recall(self) -> str:
        name: str = recall_of(self.settings)["name"]
        return name


Points = dict[tuple[str, str], Mean]  # by recipe and α


def mean_points(runs: Iterable[Run], key: str = "points") -> Points:
    """Every recipe at every α of WiSE-FT, over the seeds that have it."""
    found: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    settings: dict[str, Mapping[str, Any] | None] = {}
    for run in runs:
        settings[run["recipe"]] = run.get("settings")
        for alpha, figures in run[key].items():
            found.setdefault((run["recipe"], alpha), []).append(figures)
    return {point: Mean.of(some, settings[point[0]]) for point, some in found.items()}


def over_tasks(runs: Sequence[Run], fields: Sequence[str]) -> list[Run]:
    """Means over tasks of the recipes and seeds that were run on all of them.

    Runs that belong to no task, such as the pretrained model's, stay as they are.
    """
    found: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        if "task" in run:
            found.setdefault((run["recipe"], run["seed"]), []).append(run)
    tasks = {run["task"] for some in found.values() for run in some}

    def points(some: list[Run]) -> dict[str, dict[str, float]]:
        of_task = [run["points"] for run in some]
        return {
            alpha: {f: statistics.mean(points[alpha][f] for points in of_task) for f in fields}
            for alpha in of_task[0]
            if all(alpha in points for points in of_task)
        }

    means = [
        {"recipe": recipe, "settings": some[0].get("settings"), "points": points(some)}
        for (recipe, _), some in found.items()
        if len(some) == len(tasks)
    ]
    return [*(run for run in runs if "task" not in run), *means]


def better_points(
    points: Points, ours: tuple[str, str], fields: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The points of other recipes that are better than ours in all fields, as ``recipe@α``.

    Those of other methods, and those of recipes with our recall.
    """
    mine = points[ours]
    signs = {name: -1 if is_loss(name) else 1 for name in fields}
    others, kin = list[str](), list[str]()
    for (recipe, alpha), point in points.items():
        if recipe != ours[0] and all(
            name in point.means and sign * point.means[name] > sign * mine.means[name]
            for name, sign in signs.items()
        ):
            name = f"{recipe}@{alpha}" + (" (one seed)" if point.seeds == 1 else "")
            (kin if point.recall == mine.recall else others).append(name)
    return others, kin


def comparison(points: Points, fields: Sequence[str], ours: str = OURS) -> str:
    """All figures of all points as a table, and what is better than each point of ours.

    The first fields are those that are compared; the table has them first.
    """
    names = list(dict.fromkeys([*fields, *(n for p in points.values() for n in p.means)]))
    sampled = any(name.endswith("_se") for name in names)
    names = [name for name in names if not name.endswith("_se")]
    rows = [
        [recipe, alpha, str(point.seeds), *(_shown(point, name) for name in names)]
        for (recipe, alpha), point in points.items()
    ]
    text = table(["", "α", "seeds", *names], rows)
    if sampled:
        text += (
            "\n\n±: the standard errors over seeds and over the rows of a test. All points share "
        )
        text += "these rows, so that differences between points are more certain than ± says."
    if "†" in text:
        text += f"\n\n† These recipes were trained on such texts: {CONTEXT_FREE} is a training "
        text += "signal, no evidence."
    for recipe, alpha in points:
        if recipe == ours:
            text += f"\n\n{ours} at α = {alpha}: {_told(points, (recipe, alpha), fields)}"
    return text


def _told(points: Points, ours: tuple[str, str], fields: Sequence[str]) -> str:
    """How many points are better, and which."""
    others, kin = better_points(points, ours, fields)
    count = "1 point is" if len(others) == 1 else f"{len(others)} points are"
    text = f"{count} better in {', '.join(fields)}{': ' if others else ''}{', '.join(others)}."
    return text + (f" With the same recall: {', '.join(kin)}." if kin else "")


def goals(points: Points, tests: Sequence[str], ours: str = OURS) -> str:
    """What ``holdfast`` should reach on language, and what it reaches, one row per goal.

    The target loss is at most that of plain fine-tuning at its best learning rate. The retained
    losses are at most 1 % above the pretrained model's. No accuracy of the tests is below the
    pretrained model's by more than its error. No point of another method is better in the target
    and in both retained losses.
    """
    target, *kept = fields = LANGUAGE
    plain = {
        recipe: point.means[target]
        for (recipe, alpha), point in points.items()
        if point.settings == {} and alpha == "1"
    }
    if not plain or not {(ours, "1"), ("pretrained", "1")} <= points.keys():
        return f"The goals need runs of {ours}, of plain fine-tuning, and the pretrained model."
    mine, before = points[ours, "1"], points["pretrained", "1"]
    best = min(plain, key=plain.__getitem__)
    what = (
        f"{LOSSES[target]} at most {plain[best]:.4f}, plain fine-tuning's at its best learning rate"
    )
    rows = [[what, _shown(mine, target), _verdict(mine.means[target] <= plain[best])]]
    for name in kept:
        above = mine.means[name] / before.means[name] - 1
        what = f"{LOSSES[name]} at most 1 % above {before.means[name]:.4f}, the pretrained model's"
        rows.append([what, f"{_shown(mine, name)} ({100 * above:+.1f} %)", _verdict(above <= 0.01)])
    lower = [
        f"{name} {100 * (mine.means[name] - before.means[name]):+.1f} points "
        f"(± {100 * mine.errors[name]:.1f})"
        for name in tests
        if mine.means[name] < before.means[name] - mine.errors[name]
    ]
    what = "no accuracy below the pretrained model's by more than its error"
    rows.append([what, ", ".join(lower) or "none is", _verdict(not lower)])
    others, _ = better_points(points, (ours, "1"), fields)
    what = f"no point of another method that is better in all of {', '.join(LOSSES.values())}"
    rows.append([what, ", ".join(others) or "none is", _verdict(not others)])
    return table([f"goal of {ours}", "measured", ""], rows)


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def _shown(point: Mean, name: str) -> str:
    if name not in point.means:
        return ""
    digits = 4 if abs(point.means[name]) < 10 else 2
    error = f" ± {point.errors[name]:.{digits}f}" if point.errors[name] else ""
    mark = " †" if name == CONTEXT_FREE and rehearses(point.settings) else ""
    return f"{point.means[name]:.{digits}f}{error}{mark}"
