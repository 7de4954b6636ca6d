"""Draw the pictures of docs/results-papers.md as SVG; benchmarks/pages.py calls this."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import _drawing
import numpy as np
from _drawing import BOTH, FLOW, FOLDER, OTHER, OURS, PLAIN, drawing, shows
from _summary import RESULTS, Medians, read, runs_of

#: Pictures, and the results that each shows.
SOURCES = {
    "recadam-figure-2": RESULTS / "glue.json",
    "frontier-vision": RESULTS / "vision.json",
    "frontier-language": RESULTS / "language.json",
    "measured": RESULTS.parents[1] / "results" / "gate_h200.json",
}


def digest(picture: str) -> str:
    """A checksum of a picture's results, stored in the picture."""
    if picture not in SOURCES:
        return "no results"
    return hashlib.sha256(SOURCES[picture].read_bytes()).hexdigest()[:16]


def stale() -> list[str]:
    """Pictures that are missing or show other results."""
    files = {name: FOLDER / f"{name}.svg" for name in SOURCES}
    return [file.name for name, file in files.items() if not shows(file, digest(name))]


def save(figure: Any, picture: str) -> None:
    _drawing.save(figure, FOLDER / f"{picture}.svg", digest(picture))


class Label:
    """The label of a point: text, colour, offset; whether WiSE-FT's path is drawn."""

    def __init__(
        self, text: str, color: str, x: float = 7, y: float = -3, *, way: bool = True
    ) -> None:
        self.text, self.color, self.x, self.y, self.way = text, color, x, y, way


def frontier(plt: Any, found: Medians, labels: Mapping[str, Label]) -> tuple[Any, Any]:
    """The retained figure against the learned one, with WiSE-FT's paths to the base."""
    figure, axes = plt.subplots(figsize=(7.6, 4.4))
    for recipe, label in labels.items():
        path = found.path(recipe)
        xs, ys = [p[found.learned] for p in path], [p[found.kept] for p in path]
        if label.way:
            axes.plot(xs, ys, color=label.color, alpha=0.4, linewidth=1.2, marker="o", markersize=3)
        axes.plot(xs[:1], ys[:1], "o", color=label.color, markersize=7, zorder=3)
        side = "left" if label.x >= 0 else "right"
        axes.annotate(
            label.text, (xs[0], ys[0]), (label.x, label.y), textcoords="offset points",
            color=label.color, ha=side, fontsize=10, zorder=4,
        )  # fmt: skip
    return figure, axes


def vision(plt: Any) -> None:
    labels = {
        "standard": Label("plain fine-tuning (SGD)", PLAIN, -8, 4),
        "standard-adamw": Label("AdamW", PLAIN, -9, 0),
        "l2-sp": Label("L2-SP (SGD)", OTHER, -2, 10, way=False),
        "l2-sp-adamw": Label("L2-SP", OTHER, 10, -13),
        "flow": Label("FLOW (SGD)", FLOW, 8, 0),
        "mofo": Label("MoFO", OTHER, -9, 2, way=False),
        "hft-adamw": Label("HFT", OTHER, 8, 2, way=False),
        "ewc-adamw": Label("EWC", OTHER, 8, -4, way=False),
        "standard-adamw-0.2lr": Label("AdamW, one fifth of the rate", PLAIN, 8, 3),
        "recadam-30-10": Label("RecAdam", OURS, -8, -4),
        "recadam-50-15": Label("RecAdam, wide shift", OURS, 8, 2),
        "recadam+flow-50-15": Label("wide shift + FLOW", BOTH, -2, -16, way=False),
    }
    found = Medians("mobilenet-v2")
    figure, axes = frontier(plt, found, labels)
    probe = found.point("probe")
    axes.plot(probe["target"], probe["imagenet"], "s", color="black", markersize=7)
    axes.annotate(
        "pretrained, new head", (probe["target"], probe["imagenet"]), (-4, 9),
        textcoords="offset points", fontsize=10,
    )  # fmt: skip
    axes.set_xlabel("learned: Flowers102 accuracy, %")
    axes.set_ylabel("kept: ImageNet accuracy, %")
    axes.set_ylim(-3, 78)
    axes.text(90, 3, "thin lines: WiSE-FT, α from 1 to ¼", fontsize=9, color=PLAIN)
    save(figure, "frontier-vision")


def language(plt: Any) -> None:
    labels = {
        "standard": Label("plain fine-tuning, 1e-3", PLAIN, 8, -4),
        "standard-0.5lr": Label("5e-4", PLAIN, 8, -4),
        "standard-0.2lr": Label("2e-4", PLAIN, 8, -4),
        "standard-0.1lr": Label("1e-4", PLAIN, -8, 6),
        "flow": Label("FLOW", FLOW, -8, 2, way=False),
        "l2-sp": Label("L2-SP", OTHER, 8, 3, way=False),
        "mofo": Label("MoFO", OTHER, 8, -2, way=False),
        "hft": Label("HFT", OTHER, -8, 4, way=False),
        "ewc": Label("EWC", OTHER, 8, -6, way=False),
        "lora": Label("LoRA", OTHER, -3, -16),
        "lora-mid": Label("LoRA, 5e-3", OTHER, 7, -5, way=False),
        "lora-high": Label("LoRA, 9e-3", OTHER, -8, -4, way=False),
        "recadam-0.3-0.1": Label("RecAdam", BOTH, -9, -4, way=False),
        "recadam-0.5-0.15": Label("RecAdam, wide shift", BOTH, -8, -14, way=False),
        "spd-0.5lr": Label("SPD, 5e-4", OTHER, -6, 7),
        "holdfast": Label("holdfast", OURS, 9, -3),
    }
    found = Medians("language")
    figure, axes = frontier(plt, found, labels)
    axes.texts[-1].set(weight="bold", fontsize=12)
    axes.plot(*(found.point("holdfast")[f] for f in (found.learned, found.kept)), "o", color=OURS,
              markersize=11, zorder=5)  # fmt: skip
    base = found.point("pretrained")["wikitext_nll"]
    axes.axhline(base, color="black", linewidth=1, dashes=(4, 3))
    axes.text(0.735, base - 0.015, "pretrained", fontsize=10)
    axes.set_xlim(0.74, 0.565)
    axes.invert_yaxis()
    axes.set_xlabel("learned: GSM8K, nats per token (less is better, to the right)")
    axes.set_ylabel("kept: WikiText-2, nats per token")
    axes.text(0.735, 3.67, "thin lines: WiSE-FT, α from 1 down", fontsize=9, color=PLAIN)
    save(figure, "frontier-language")


def measured(plt: Any) -> None:
    """How much the perplexity rose on each test, after plain fine-tuning and after ``holdfast``."""
    rows = {row["name"]: row for row in json.loads(SOURCES["measured"].read_text())["rows"]}
    shown = {"holdfast": ("holdfast", OURS), "standard, lr 5e-4": ("plain fine-tuning", PLAIN)}
    figure, axes = plt.subplots(figsize=(7.6, 3.6))
    for number, (name, (label, color)) in enumerate(shown.items()):
        checks = [c for c in rows[name]["checks"] if c["limit"].endswith("rise")]
        rises = [100 * c["value"] for c in checks]
        places = [i + 0.38 * (0.5 - number) for i in range(len(checks))]
        bars = axes.barh(places, rises, height=0.34, color=color, label=label)
        axes.bar_label(bars, [f"{rise:+.0f} %" for rise in rises], padding=4, fontsize=9)
    tests = [c["name"].replace("wikitext2-test", "WikiText-2") for c in checks]
    axes.set_yticks(range(len(tests)), tests)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel("rise of the perplexity, % (less is better)")
    handles, names = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], names[::-1], frameon=False, ncols=2, loc="lower right",
        bbox_to_anchor=(1, 1),
    )  # fmt: skip
    save(figure, "measured")


def figure_1(plt: Any) -> None:
    """λ(t): from recalling to learning."""
    figure, axes = plt.subplots(figsize=(6.2, 2.6))
    t = np.arange(0, 1001)
    for k, color in ((0.5, PLAIN), (0.05, FLOW), (0.01, OURS), (0.0, OTHER)):
        name = f"k = {k:g}" + (" (equal weights throughout)" if k == 0 else "")
        axes.plot(t, 1 / (1 + np.exp(-k * (t - 300))), color=color, label=name)
    axes.set_xlabel("update t, with t0 = 300")
    axes.set_ylabel("λ(t)")
    axes.legend(frameon=False, fontsize=9)
    save(figure, "recadam-figure-1")


def figure_2(plt: Any, tasks: Sequence[str]) -> None:
    """Training loss and distance to θ* over the updates."""
    figure, grid = plt.subplots(2, len(tasks), figsize=(4.4 * len(tasks), 5.2), sharex=True)
    ways: list[tuple[str, float | None, str, str]] = [("vanilla", None, "plain Adam", PLAIN)]
    ways += [
        ("pi", k, f"RecAdam, k = {k:g}", color)
        for k, color in zip(read("glue")["protocol"]["grid"]["k"], (OURS, FLOW, OTHER), strict=True)
    ]
    for column, task in enumerate(tasks):
        for method, k, name, color in ways:
            found = [r for r in runs_of("glue", task=task, method=method, seed=0) if "curve" in r]
            for run in (r for r in found if k is None or r["k"] == k):
                updates, losses, distances = zip(*run["curve"], strict=True)
                grid[0][column].plot(updates, losses, color=color, label=name, linewidth=1.3)
                grid[1][column].plot(updates, distances, color=color, linewidth=1.3)
        grid[0][column].set_title({"stsb": "STS-B", "cola": "CoLA"}.get(task, task), fontsize=11)
        grid[1][column].set_xlabel("update")
    grid[0][0].set_ylabel("training loss")
    grid[1][0].set_ylabel("‖θ − θ*‖")
    grid[0][0].legend(frameon=False, fontsize=9)
    save(figure, "recadam-figure-2")


def draw() -> None:
    """Draw all pictures."""
    with drawing() as plt:
        figure_1(plt)
        figure_2(plt, ("stsb", "cola"))
        vision(plt)
        language(plt)
        measured(plt)
