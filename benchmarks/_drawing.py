"""How pictures of the documentation look, and whether one shows the present results."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "img"
PLAIN, OURS, BOTH, OTHER, FLOW = "#6b7280", "#0f766e", "#7c3aed", "#b45309", "#2563eb"
STYLE = {
    "svg.hashsalt": "holdfast", "svg.fonttype": "none", "font.family": "sans-serif",
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af", "axes.labelcolor": "#374151", "text.color": "#111827",
    "xtick.color": "#6b7280", "ytick.color": "#6b7280", "axes.grid": True,
    "grid.color": "#e5e7eb", "figure.facecolor": "white",
}  # fmt: skip


@contextmanager
def drawing() -> Iterator[Any]:
    """matplotlib.pyplot with the style of the documentation."""
    importlib.import_module("matplotlib").use("svg")
    plt: Any = importlib.import_module("matplotlib.pyplot")
    with plt.rc_context(STYLE):
        yield plt
    plt.close("all")


def save(figure: Any, file: Path, digest: str) -> None:
    """Write a picture, with the checksum of its results in it."""
    about = {"Date": None, "Creator": None, "Description": f"results {digest}"}
    figure.savefig(file, metadata=about, bbox_inches="tight")
    # The repository allows no blanks at line ends.
    text = "\n".join(line.rstrip() for line in file.read_text(encoding="utf-8").splitlines())
    file.write_text(text + "\n", encoding="utf-8")


def shows(file: Path, digest: str) -> bool:
    """Whether a picture was drawn from the results with this checksum."""
    return file.exists() and digest in file.read_text(encoding="utf-8")
