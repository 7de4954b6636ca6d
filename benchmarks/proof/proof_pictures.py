"""Draw the pictures of docs/results.md as SVG, from the verdict; benchmarks/pages.py calls this.

A picture whose results are missing is not drawn, and an old drawing of it is removed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _drawing
import verdict
from _drawing import BOTH, FLOW, OTHER, OURS, PLAIN, drawing, shows
from _proof_text import TASKS, TITLES, name_of, percent, plan_title

CORNER = 99
#: The targets, and the smallest kept share, that the map of all points shows, in percent.
LEFT, RIGHT, BOTTOM = 65, 106, 60
LEAST = 40  # percent kept of a single test
#: Colors and shapes of opponents; other ones are drawn like ``l2-sp``.
LOOKS = {
    "plain": (PLAIN, "o", "plain fine-tuning"),
    "merged": (PLAIN, "x", "plain, merged with the base"),
    "lora": (FLOW, "^", "LoRA"),
    "rehearsal": (BOTH, "D", "rehearsal of real old data"),
    "l2-sp": (OTHER, "s", "other methods"),
}
Verdict = Mapping[str, Any]


def look(row: str) -> tuple[str, str, str]:
    """How points of a row are drawn, and how the legend calls them."""
    kind = "merged" if "+" in row else row.partition("-")[0]
    return LOOKS.get(kind, LOOKS["l2-sp"])


def is_shown(row: Verdict) -> bool:
    """Whether a point is within the map of all points."""
    return bool(LEFT <= row["target"] <= RIGHT and row["mean_kept"] >= BOTTOM)


def legend(figure: Any, axes: Any, **where: Any) -> None:
    """A legend with each label once."""
    found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found.keys(), frameon=False, fontsize=9, **where)


def everything(plt: Any, settings: Verdict) -> Any:
    """The target and the mean kept of all points of all settings."""
    figure, axes = plt.subplots(figsize=(7.6, 5))
    axes.fill_between([CORNER, RIGHT], CORNER, 101, color=OURS, alpha=0.15, linewidth=0)
    for setting in settings.values():
        for row in [*verdict.opponents(setting), *verdict.rehearsals(setting)]:
            color, marker, label = look(row["row"])
            axes.plot(row["target"], row["mean_kept"], marker, color=color, markersize=4,
                      alpha=0.45, label=label, linestyle="")  # fmt: skip
    for setting in settings.values():
        ours = verdict.ours_of(setting)
        axes.plot(ours["target"], ours["mean_kept"], "o", color=OURS, markersize=9,
                  markeredgecolor="white", label="holdfast", linestyle="", zorder=4)  # fmt: skip
    axes.set(xlim=(LEFT, RIGHT), ylim=(BOTTOM, 101))
    axes.annotate("99 / 99", (RIGHT - 0.2, 98.7), ha="right", va="top", color=OURS, fontsize=10)
    axes.set_xlabel("learned, % of the best of plain fine-tuning")
    axes.set_ylabel("kept, % of the pretrained model (mean of all tests)")
    legend(figure, axes, loc="lower center", bbox_to_anchor=(0.5, 0.88), ncols=3)
    return figure


def headline(plt: Any, settings: Verdict) -> Any:
    """What the best of plain and ``holdfast`` keep in each setting, and what the latter learns."""
    figure, axes = plt.subplots(figsize=(7.6, 1.2 + 0.38 * len(settings)))
    axes.axvspan(CORNER, 101, color=OURS, alpha=0.15, linewidth=0)
    for place, setting in enumerate(settings.values()):
        plain, ours = verdict.plain_of(setting), verdict.ours_of(setting)
        enough = ours["target"] >= CORNER
        axes.plot([plain["mean_kept"], ours["mean_kept"]], [place, place], color=PLAIN, alpha=0.4)
        for row, face, edge, label, size, up in (
            (plain, PLAIN, "white", "plain, at the learning rate that is best for the target", 7,
             0),
            (verdict.careful_plain_of(setting), "white", PLAIN,
             "plain, at the one that keeps the most and learns 99 %, or as much as holdfast", 6,
             0.22),
            (ours, OURS, "white", "holdfast, with nothing set", 9, 0) if enough else
            (ours, "white", OURS, "holdfast, where it learned less than 99 %", 8, 0),
        ):  # fmt: skip
            axes.plot(row["mean_kept"], place - up, "o", markerfacecolor=face, markersize=size,
                      markeredgecolor=edge, label=label, linestyle="")  # fmt: skip
        axes.annotate(f"{percent(ours['target'])} %", (1.01, place), va="center", fontsize=9,
                      xycoords=("axes fraction", "data"),
                      color=OURS if enough else OTHER)  # fmt: skip
    axes.annotate("learned", (1.01, -0.75), xycoords=("axes fraction", "data"), va="center",
                  fontsize=9, color=PLAIN)  # fmt: skip
    axes.set_yticks(range(len(settings)), map(name_of, settings))
    axes.set(xlim=(None, 101), ylim=(len(settings) - 0.4, -1))
    axes.set_xlabel("kept of what the pretrained model knew, %")
    legend(figure, axes, loc="lower center", bbox_to_anchor=(0.45, 0.9), ncols=1)
    return figure


def tests(plt: Any, settings: Verdict) -> Any:
    """What is kept per retained test: a point per setting."""
    names = [test for test in TITLES["tests"]
             if any(test in verdict.ours_of(s)["kept"] for s in settings.values())]  # fmt: skip
    figure, axes = plt.subplots(figsize=(7.6, 0.8 + 0.38 * len(names)))
    axes.axvspan(CORNER, 101.5, color=OURS, alpha=0.15, linewidth=0)
    for setting in settings.values():
        ways = ((verdict.plain_of(setting), PLAIN, "plain fine-tuning at its best", 0.14),
                (verdict.ours_of(setting), OURS, "holdfast", -0.14))  # fmt: skip
        for row, color, label, offset in ways:
            xs = [min(max(row["kept"][test], LEAST), 101) for test in names if test in row["kept"]]
            ys = [i + offset for i, test in enumerate(names) if test in row["kept"]]
            axes.plot(xs, ys, "o", color=color, markersize=6, alpha=0.8, label=label)
    axes.set_yticks(range(len(names)), [TITLES["tests"][test] for test in names])
    axes.invert_yaxis()
    axes.set_xlim(right=101.5)
    axes.set_xlabel(f"kept, % (less than {LEAST} and more than 101 are drawn there)")
    legend(figure, axes, loc="lower center", bbox_to_anchor=(0.5, 0.9), ncols=2)
    return figure


def equal_target(plt: Any, settings: Verdict) -> Any:
    """The mean kept of opponents at the target of ``holdfast``."""
    figure, axes = plt.subplots(figsize=(7.6, 0.9 + 0.38 * len(settings)))
    for place, setting in enumerate(settings.values()):
        found = {row: kept for row, kept in setting["equal_target"].items() if kept is not None}
        for row, kept in found.items():
            color, marker, label = look(row)
            axes.plot(kept, place, marker, color=color, markersize=6, alpha=0.7, label=label,
                      linestyle="")  # fmt: skip
        axes.plot(verdict.ours_of(setting)["mean_kept"], place, "o", color=OURS, markersize=9,
                  markeredgecolor="white", label="holdfast", linestyle="", zorder=4)  # fmt: skip
        told = f"{len(found)} of {len(setting['equal_target'])}"
        axes.annotate(told, (1.01, place), xycoords=("axes fraction", "data"), va="center",
                      fontsize=9, color=PLAIN)  # fmt: skip
    axes.annotate("reach it", (1.01, -0.75), xycoords=("axes fraction", "data"), va="center",
                  fontsize=9, color=PLAIN)  # fmt: skip
    axes.set_yticks(range(len(settings)), map(name_of, settings))
    axes.set_ylim(len(settings) - 0.4, -1)
    axes.set_xlabel("kept at the target of holdfast, % (mean of all tests)")
    legend(figure, axes, loc="lower center", bbox_to_anchor=(0.45, 0.9), ncols=3)
    return figure


def ablations(plt: Any, rows: list[Verdict]) -> Any:
    """Learned and kept, one factor at a time."""
    found = {row["plan"]: row for row in rows}
    factors = {name: {value: plan for value, plan in values.items() if plan in found}
               for name, values in TITLES["ablations"].items() if name != "others"}  # fmt: skip
    factors = {name: values for name, values in factors.items() if len(values) > 1}
    columns = 4
    lines = -(-len(factors) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(9.2, 2.4 * lines), sharey=True, squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(factors) :]:
        axes.set_axis_off()
    for axes, (name, values) in zip(grid.flat, factors.items(), strict=False):
        for field, color, label in (("target", PLAIN, "learned"), ("mean_kept", OURS, "kept")):
            axes.plot([*values], [found[plan][field] for plan in values.values()], "o-",
                      color=color, markersize=4, linewidth=1.3, label=label)  # fmt: skip
        axes.axhline(CORNER, color="black", linewidth=0.8, dashes=(4, 3))
        standard = [value for value, plan in values.items() if plan in ("default", "texts")]
        axes.set_title(name + (f" (default {standard[0]})" if standard else ""), fontsize=9)
        axes.tick_params(labelsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel("%")
    legend(figure, grid[0][0], loc="lower right")
    return figure


def continual(plt: Any, rows: list[Verdict]) -> Any:
    """What is left of the base and of the first task after each stage."""
    looks = {"holdfast": OURS, "plain-x1": PLAIN, "plain-x0.2": OTHER, "lora-x6": FLOW}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.2), layout="constrained")
    first = rows[0]["stages"][0]["task"]
    for row in rows:
        after, color = row["stages"], looks[row["plan"]]
        stages = [TASKS[stage["task"]] for stage in after]
        wide = 2.5 if row["plan"] == "holdfast" else 1.3
        left.plot(
            ["before", *stages],
            [100, *(stage["mean_kept"] for stage in after)],
            "o-",
            color=color,
            linewidth=wide,
            markersize=4,
            label=plan_title(row["plan"]),
        )
        right.plot(stages, [max(0, stage["tasks"][first]) for stage in after], "o-", color=color,
                   linewidth=wide, markersize=4)  # fmt: skip
    left.set_title("kept of the pretrained model, %", fontsize=10)
    right.set_title(f"kept of what was learned of {TASKS[first]}, %", fontsize=10)
    right.set_ylabel("less than 0 is drawn at 0", fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("after learning")
    left.legend(frameon=False, fontsize=9)
    return figure


#: The pictures: how each is drawn, and what it shows of the verdict.
PICTURES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "proof-headline": (headline, "settings"),
    "proof-all": (everything, "settings"),
    "proof-tests": (tests, "settings"),
    "proof-equal-target": (equal_target, "settings"),
    "proof-ablations": (ablations, "ablations"),
    "proof-continual": (continual, "continual"),
}


def digest(picture: str, found: Verdict) -> str:
    """A checksum of what a picture shows."""
    _, field = PICTURES[picture]
    return hashlib.sha256(json.dumps(found[field]).encode()).hexdigest()[:16]


def stale(found: Verdict, folder: Path = _drawing.FOLDER) -> list[str]:
    """Pictures that are missing, that show other results, or whose results are gone."""
    names = []
    for name, (_, field) in PICTURES.items():
        file = folder / f"{name}.svg"
        current = shows(file, digest(name, found)) if found[field] else not file.exists()
        names += [] if current else [file.name]
    return names


def draw(found: Verdict, folder: Path = _drawing.FOLDER) -> None:
    """Draw the pictures whose results there are."""
    with drawing() as plt:
        for name, (make, field) in PICTURES.items():
            file = folder / f"{name}.svg"
            if found[field]:
                _drawing.save(make(plt, found[field]), file, digest(name, found))
            else:
                file.unlink(missing_ok=True)
