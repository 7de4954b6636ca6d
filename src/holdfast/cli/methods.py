"""List all methods with their stage, paper and a summary, or show one with its settings.

examples:
  holdfast methods
  holdfast methods NAME
  holdfast methods --json

Names joined by + are a recipe: holdfast finetune --recipe recadam+flow+wise-ft. The preset standard
is plain fine-tuning; the other presets stand for methods with settings of their own. NAME shows the
settings with their values: --set STAGE.SETTING VALUE gives one another value.
"""

import argparse
import json
from typing import Any

from holdfast import registry
from holdfast.cli._options import Parser, add
from holdfast.recipe import methods_of, preset_words, settings_of
from holdfast.report.printing import tell


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, "[NAME] [options]")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a method or preset (default: all)")
    add(parser, "json")


def run(options: argparse.Namespace) -> None:
    chosen = None if options.name is None else methods_of(options.name)
    if options.json:
        rows = [_about(entry) for entry in registry.methods()]
        if chosen is not None:
            rows = [
                {**_about(registry.entry_of(one)), "settings": settings_of(one)} for one in chosen
            ]
        tell(json.dumps(rows, indent=2, ensure_ascii=False, default=str))
    elif chosen is None:
        for stage in registry.STAGES:
            tell("\n".join([stage, *map(_line, registry.methods(stage)), ""]))
        tell("\n".join(["presets", *map(_preset_line, registry.PRESETS)]))
    else:
        if (preset := options.name.strip().lower()) in registry.PRESETS:
            tell(f"preset\n{_preset_line(preset)}")
        for one in chosen:
            entry = registry.entry_of(one)
            tell(f"{entry.stage}\n{_line(entry)}")
            for name, value in settings_of(one).items():
                shown = str(value).lower() if value is None or isinstance(value, bool) else value
                tell(f"    {f'{entry.stage}.{name}':<28}{shown}")


def _about(entry: registry.Entry) -> dict[str, Any]:
    return {
        "name": entry.name, "stage": entry.stage, "paper": entry.url, "summary": entry.summary
    }  # fmt: skip


def _line(entry: registry.Entry) -> str:
    return f"  {entry.name:<20}{entry.summary}{f'  [{entry.url}]' if entry.url else ''}"


def _preset_line(preset: str) -> str:
    return f"  {preset:<20}{preset_words(preset)}"
