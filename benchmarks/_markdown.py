"""Markdown tables, and the titles of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

SPEC = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
