"""List all methods with their stage, paper and a summary.

examples:
  holdfast methods
  holdfast methods --json

Names joined by + are a recipe: holdfast finetune --recipe recadam+flow+wise-ft. The preset standard
is plain fine-tuning; the other presets stand for methods with settings of their own.
"""

import argparse
import json

from holdfast import registry
from holdfast.cli._options import Parser, add
from holdfast.recipe import preset_words
from holdfast.report.printing import tell


def add_options(parser: Parser) -> None:
    parser.describe(__doc__)
    add(parser, "json")


def run(options: argparse.Namespace) -> None:
    entries = list(registry.methods())
    if options.json:
        rows = [
            {"name": e.name, "stage": e.stage, "paper": e.url, "summary": e.summary}
            for e in entries
        ]
        tell(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for stage in dict.fromkeys(entry.stage for entry in entries):
        tell(stage if stage == entries[0].stage else f"\n{stage}")
        for entry in registry.methods(stage):
            paper = f"  [{entry.url}]" if entry.url else ""
            tell(f"  {entry.name:<20}{entry.summary}{paper}")
    tell("\npresets")
    for preset in registry.PRESETS:
        tell(f"  {preset:<20}{preset_words(preset)}")
