"""Draw the pictures of README.md and docs/ as SVG, from the committed results.

python benchmarks/pictures.py [NAME ...]    # all of them, or these; benchmarks/pages.py calls this

Each picture holds a checksum of the results that it shows.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / folder) for folder in ("papers", "proof")]

import verdict  # noqa: E402
from _markdown import SPEC  # noqa: E402
from _summary import Medians, runs_of  # noqa: E402
from verdict import frugal_plain_of, ours_of  # noqa: E402

FOLDER = HERE.parent / "docs" / "img"
PLAIN, OURS, BOTH, OTHER, FLOW = "#6b7280", "#0f766e", "#7c3aed", "#b45309", "#2563eb"
STYLE = {
    "svg.hashsalt": "holdfast", "svg.fonttype": "none", "font.family": "sans-serif",
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af", "axes.labelcolor": "#374151", "text.color": "#111827",
    "xtick.color": "#374151", "ytick.color": "#374151", "axes.grid": True,
    "grid.color": "#e5e7eb", "axes.axisbelow": True, "figure.facecolor": "white",
}  # fmt: skip
GOAL = 99  # percent
Data = Any


def gate() -> Data:
    return json.loads((HERE / "results/gate_h200.json").read_text(encoding="utf-8"))["rows"]


def measured(plt: Any, rows: Data) -> Any:
    """How much the perplexity rose on each text, after plain fine-tuning and after ``holdfast``."""
    tests = {
        "WikiText-2": ["wikitext2-test"], "English": ["English"],
        "French, German,\nSpanish (mean)": ["French", "German", "Spanish"], "code": ["code"],
        "chats": ["chats"],
    }  # fmt: skip
    ways = {"standard, lr 5e-4": ("plain fine-tuning, same learning rate", PLAIN),
            "holdfast": ("holdfast", OURS)}  # fmt: skip
    heights = [0.3, 1.9, 2.9, 3.9, 4.9]  # with room for the two headings
    figure, axes = plt.subplots(figsize=(8, 4))
    for number, (name, (label, color)) in enumerate(ways.items()):
        checks = next(row["checks"] for row in rows if row["name"] == name)
        found = {check["name"]: 100 * check["value"] for check in checks}
        rises = [statistics.mean(found[text] for text in texts) for texts in tests.values()]
        places = [height + 0.38 * (number - 0.5) for height in heights]
        bars = axes.barh(places, rises, height=0.34, color=color, label=label)
        axes.bar_label(bars, [f"{rise:+.0f} %" for rise in rises], padding=4, fontsize=10)
    axes.set_yticks(heights, tests)
    for height, text in ((-0.35, "a text that others wrote"),
                         (1.25, "texts that the model wrote before the training")):  # fmt: skip
        axes.text(1, height, text, va="center", fontsize=10, style="italic", color="#374151")
    axes.axhline(0.9, color="#9ca3af", linewidth=0.8)
    axes.set(ylim=(5.4, -0.65), xlim=(0, 138))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("forgotten: rise of the perplexity, %")
    axes.set_title("SmolLM2-135M after learning math problems (GSM8K) equally well", fontsize=11,
                   loc="left", pad=30)  # fmt: skip
    axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(-0.01, 0.99))
    return figure


def name_of(setting: str) -> str:
    return ", ".join(SPEC["proof"]["settings"][setting][:2])


def headline(plt: Any, settings: Data) -> Any:
    """What ``holdfast`` and a cautious plain run kept and learned, sorted by the gap."""
    rows = {name: (ours_of(one), frugal_plain_of(one)) for name, one in settings.items()}
    names = sorted(rows, key=lambda name: rows[name][1]["mean_kept"] - rows[name][0]["mean_kept"])
    figure, panels = plt.subplots(1, 2, figsize=(8.6, 5.2), sharey=True, layout="constrained",
                                  width_ratios=(3, 2))  # fmt: skip
    for axes, field, title in zip(
        panels, ("mean_kept", "target"), ("kept, %", "learned, %"), strict=True
    ):
        for place, name in enumerate(names):
            ours, plain = (row[field] for row in rows[name])
            axes.plot([ours, plain], [place, place], color=PLAIN, alpha=0.4, linewidth=1.5)
            axes.plot(plain, place, "o", color=PLAIN, markersize=7)
            axes.plot(ours, place, "o", color=OURS, markersize=9)
        axes.axvline(100, color="#9ca3af", linewidth=0.8)
        axes.set_title(title, fontsize=11, loc="left")
        axes.grid(visible=False, axis="y")
    panels[0].set_yticks(range(len(names)), map(name_of, names))
    panels[0].set(ylim=(len(names) - 0.5, -0.5), xlim=(50, 103))
    panels[1].set(xlim=(60, 108))
    points = [plt.Line2D([], [], marker="o", linestyle="", color=color, markersize=size)
              for color, size in ((OURS, 9), (PLAIN, 7))]  # fmt: skip
    labels = [
        "holdfast, one run",
        "plain, lowest learning rate that learns 99 % (on rows to choose on)",
    ]
    figure.legend(points, labels, loc="outside upper center", frameon=False, ncols=2)
    return figure


def ablations(plt: Any, rows: Data) -> Any:
    """Learned and kept, one factor at a time."""
    found = {row["plan"]: row for row in rows}
    factors = {
        factor: {value: plan for value, plan in values.items() if plan in found}
        for factor, values in SPEC["proof"]["ablations"].items()
        if factor != "others"
    }
    lines = -(-len(factors) // 4)
    figure, grid = plt.subplots(lines, 4, figsize=(9.2, 2.4 * lines), sharey=True, squeeze=False,
                                layout="constrained")  # fmt: skip
    for axes in grid.flat[len(factors) :]:
        axes.set_axis_off()
    for axes, (factor, values) in zip(grid.flat, factors.items(), strict=False):
        for field, color, label in (("target", PLAIN, "learned"), ("mean_kept", OURS, "kept")):
            axes.plot([*values], [found[plan][field] for plan in values.values()], "o-",
                      color=color, markersize=4, linewidth=1.3, label=label)  # fmt: skip
        axes.axhline(GOAL, color="black", linewidth=0.8, dashes=(4, 3))
        standard = [value for value, plan in values.items() if plan in ("default", "texts")]
        axes.set_title(factor + (f" (default {standard[0]})" if standard else ""), fontsize=9)
        axes.tick_params(labelsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel("%")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=10, loc="lower right")
    return figure


def continual(plt: Any, rows: Data) -> Any:
    """What is left of the base and of the first task after each stage."""
    looks = {
        "plain-x0.2": ("plain fine-tuning, low learning rate", PLAIN),
        "holdfast": ("holdfast", OURS),
    }
    tasks = {name.partition("_")[2]: title for name, (_, title, _) in
             SPEC["proof"]["settings"].items()}  # fmt: skip
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.3), layout="constrained")
    found, first = {row["plan"]: row["stages"] for row in rows}, rows[0]["stages"][0]["task"]
    for plan, (label, color) in looks.items():
        stages = [tasks[stage["task"]] for stage in found[plan]]
        kept = [stage["mean_kept"] for stage in found[plan]]
        of_first = [stage["tasks"][first] for stage in found[plan]]
        for axes, names, shares in ((left, ["before", *stages], [100, *kept]),
                                    (right, stages, of_first)):  # fmt: skip
            axes.plot(names, shares, "o-", color=color, linewidth=2, markersize=6, label=label)
            axes.annotate(f"{shares[-1]:.1f} %".replace("-", "−"), (names[-1], shares[-1]), (7, -4),
                          textcoords="offset points", color=color)  # fmt: skip
            axes.margins(x=0.14, y=0.12)
            axes.set_xlabel("after learning")
    left.set_title("kept of the pretrained model, %", fontsize=11, loc="left")
    right.set_title(f"kept of what was learned of {tasks[first]}, %", fontsize=11, loc="left")
    left.legend(frameon=False, loc="lower left")
    return figure


def frontier(plt: Any, found: Medians) -> Any:
    """WikiText-2 against GSM8K, with WiSE-FT's paths to the base."""
    labels: dict[str, tuple[str, str, float, float, bool]] = {
        "standard": ("plain fine-tuning, 1e-3", PLAIN, 8, -4, True),
        "standard-0.5lr": ("5e-4", PLAIN, 8, -4, True),
        "standard-0.2lr": ("2e-4", PLAIN, 8, -4, True),
        "standard-0.1lr": ("1e-4", PLAIN, -8, 6, True),
        "flow": ("FLOW", FLOW, -8, 2, False),
        "l2-sp": ("L2-SP", OTHER, 8, 3, False),
        "mofo": ("MoFO", OTHER, 8, -2, False),
        "hft": ("HFT", OTHER, -8, 4, False),
        "ewc": ("EWC", OTHER, 8, -6, False),
        "lora": ("LoRA", OTHER, -3, -16, True),
        "lora-mid": ("LoRA, 5e-3", OTHER, 7, -5, False),
        "lora-high": ("LoRA, 9e-3", OTHER, -8, -4, False),
        "recadam-0.3-0.1": ("RecAdam", BOTH, -9, -4, False),
        "recadam-0.5-0.15": ("RecAdam, wide shift", BOTH, -8, -14, False),
        "spd-0.5lr": ("SPD, 5e-4", OTHER, -6, 7, True),
        "holdfast": ("holdfast", OURS, 9, -3, True),
    }
    figure, axes = plt.subplots(figsize=(7.6, 4.4))
    for recipe, (text, color, x, y, way) in labels.items():
        own, path = recipe == "holdfast", found.path(recipe)
        xs, ys = [p[found.learned] for p in path], [p[found.kept] for p in path]
        if way:
            axes.plot(xs, ys, color=color, alpha=0.4, linewidth=1.2, marker="o", markersize=3)
        axes.plot(xs[0], ys[0], "o", color=color, markersize=11 if own else 7, zorder=3)
        axes.annotate(text, (xs[0], ys[0]), (x, y), textcoords="offset points", color=color,
                      ha="left" if x >= 0 else "right", fontsize=12 if own else 10, zorder=4,
                      weight="bold" if own else "normal")  # fmt: skip
    base = found.point("pretrained")[found.kept]
    axes.axhline(base, color="black", linewidth=1, dashes=(4, 3))
    axes.text(0.735, base - 0.015, "pretrained", fontsize=10)
    axes.set_xlim(0.74, 0.565)
    axes.invert_yaxis()
    axes.set_xlabel("learned: GSM8K, nats per token (less is better, to the right)")
    axes.set_ylabel("kept: WikiText-2, nats per token")
    axes.text(0.735, 3.67, "thin lines: WiSE-FT, α from 1 down", fontsize=9, color=PLAIN)
    return figure


def recadam(plt: Any, runs: Data) -> Any:
    """Training loss and distance to θ* over the updates, as in the paper's second figure."""
    tasks = {"stsb": "STS-B", "cola": "CoLA"}
    figure, grid = plt.subplots(2, len(tasks), figsize=(8.8, 5.2), sharex=True)
    looks = {None: ("plain Adam", PLAIN)} | {
        k: (f"RecAdam, k = {k:g}", color)
        for k, color in zip(
            sorted({r["k"] for r in runs if r["k"]}), (OTHER, FLOW, OURS), strict=True
        )
    }
    for column, (task, title) in enumerate(tasks.items()):
        for run in (run for run in runs if run["task"] == task):
            label, color = looks[run["k"]]
            updates, losses, distances = zip(*run["curve"], strict=True)
            grid[0][column].plot(updates, losses, color=color, label=label, linewidth=1.3)
            grid[1][column].plot(updates, distances, color=color, linewidth=1.3)
        grid[0][column].set_title(title, fontsize=11)
        grid[1][column].set_xlabel("update")
    grid[0][0].set_ylabel("training loss")
    grid[1][0].set_ylabel("‖θ − θ*‖")
    grid[0][0].legend(frameon=False, fontsize=9)
    return figure


def curves() -> Data:
    runs = [r for way in ("vanilla", "pi") for r in runs_of("glue", method=way, seed=0)]
    return [{"task": r["task"], "k": r.get("k"), "curve": r["curve"]} for r in runs if "curve" in r]


#: How each picture is drawn, and what it shows.
PICTURES: Mapping[str, tuple[Callable[[Any, Any], Any], Callable[[], Data]]] = {
    "measured": (measured, gate),
    "proof-headline": (headline, lambda: verdict.read()["settings"]),
    "proof-ablations": (ablations, lambda: verdict.read()["ablations"]),
    "proof-continual": (continual, lambda: verdict.read()["continual"]),
    "frontier-language": (frontier, lambda: Medians("language")),
    "recadam-figure-2": (recadam, curves),
}


def digest(name: str) -> str:
    """A checksum of what a picture shows."""
    data = PICTURES[name][1]()
    shown = data.runs if isinstance(data, Medians) else data
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def stale(folder: Path = FOLDER) -> list[str]:
    """The pictures that are missing or show other results."""
    files = {name: folder / f"{name}.svg" for name in PICTURES}
    return [
        n for n, file in files.items() if not file.exists() or digest(n) not in file.read_text()
    ]


def draw(names: Iterable[str], folder: Path = FOLDER) -> None:
    """Draw these pictures."""
    importlib.import_module("matplotlib").use("svg")
    plt: Any = importlib.import_module("matplotlib.pyplot")
    for name in names:
        make, read = PICTURES[name]
        with plt.rc_context(STYLE):
            figure = make(plt, read())
            about = {"Date": None, "Creator": None, "Description": f"results {digest(name)}"}
            figure.savefig(folder / f"{name}.svg", metadata=about, bbox_inches="tight")
        plt.close(figure)
        # The repository allows no blanks at line ends.
        text = (folder / f"{name}.svg").read_text(encoding="utf-8")
        lines = "\n".join(line.rstrip() for line in text.splitlines())
        (folder / f"{name}.svg").write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    draw(sys.argv[1:] or PICTURES)
