"""Markdown tables, and the titles of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

SPEC = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def number(value: float | None, digits: int | None = 2) -> str:
    """A figure with these digits after the point; None shows three significant digits."""
    if value is None:
        return "—"
    if digits is None:
        digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")
