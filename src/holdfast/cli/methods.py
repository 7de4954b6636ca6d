"""``holdfast methods``: every method, by stage."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from holdfast import registry
from holdfast.cli._config import Parser


def main(arguments: Sequence[str]) -> None:
    """Run the subcommand."""
    parser = Parser(
        "holdfast methods",
        description="List every method with its stage, paper and what it does. Names joined by + "
        'are a recipe: Recipe.preset("recadam+flow+wise-ft").',
    )
    parser.add_argument("--json", action="store_true", help="for machines: a list of objects")
    run(parser.parse_args(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Print the list."""
    if arguments.json:
        rows = [
            {"name": e.name, "stage": e.stage, "paper": e.url, "summary": e.summary}
            for e in registry.methods()
        ]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    last = None
    for entry in registry.methods():
        if entry.stage != last:
            print(entry.stage if last is None else f"\n{entry.stage}")
            last = entry.stage
        print(f"  {entry.name:<20}{entry.summary}" + (f"  [{entry.url}]" if entry.url else ""))
