"""List all methods with their stage, paper and a summary, or show one with its settings.

examples:
  holdfast methods
  holdfast methods NAME
  holdfast methods recadam+flow
  holdfast methods --json

Names joined by + are a recipe: holdfast finetune --recipe recadam+flow+wise-ft. The preset standard
is plain fine-tuning; the other presets stand for methods with settings of their own. NAME shows the
settings with their values: --set STAGE.SETTING VALUE gives one another value. A setting that is not
one word or number gets another value in a recipe file.
"""

import argparse
import json
from typing import Any, get_type_hints

from holdfast import registry
from holdfast.cli._options import Convert, Parser, add
from holdfast.recipe import Recipe, methods_of, preset_words, settings_of
from holdfast.report.printing import tell


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, "[NAME] [options]")
    which = "a method or preset, or several joined by + (default: all)"
    parser.add_argument("name", metavar="NAME", nargs="?", help=which)
    add(parser, "json")


def run(options: argparse.Namespace) -> None:
    chosen = None
    if options.name is not None:
        chosen = methods_of(options.name) or [Recipe().update]  # that of plain fine-tuning
    if options.json:
        rows = [_about(entry) for entry in registry.methods()]
        if chosen is not None:
            rows = [
                {**_about(registry.entry_of(one)), "settings": settings_of(one)} for one in chosen
            ]
        tell(json.dumps(rows, indent=2, ensure_ascii=False))
    elif chosen is None:
        for stage in registry.STAGES:
            tell("\n".join([stage, *map(_line, registry.methods(stage)), ""]))
        tell("\n".join(["presets", *map(_preset_line, registry.PRESETS)]))
    else:
        names = [name.strip().lower() for name in options.name.split("+")]
        for preset in [name for name in names if name in registry.PRESETS]:
            tell(f"preset\n{_preset_line(preset)}")
        for one in chosen:
            entry = registry.entry_of(one)
            tell(f"{entry.stage}\n{_line(entry)}")
            kinds = get_type_hints(entry.cls)
            for name, value in settings_of(one).items():
                shown = str(value).lower() if value is None or isinstance(value, bool) else value
                where = "" if _is_one_word(kinds[name]) else "  (in a recipe file)"
                tell(f"    {f'{entry.stage}.{name}':<28}{shown}{where}")


def _is_one_word(kind: Any) -> bool:
    """Whether --set takes a setting of this type."""
    parts = Convert.to(kind).kinds
    return any(part in (bool, int, float, str) or isinstance(part, str) for part in parts)


def _about(entry: registry.Entry) -> dict[str, Any]:
    return {
        "name": entry.name, "stage": entry.stage, "paper": entry.url, "summary": entry.summary
    }  # fmt: skip


def _line(entry: registry.Entry) -> str:
    return f"  {entry.name:<20}{entry.summary}{f'  [{entry.url}]' if entry.url else ''}"


def _preset_line(preset: str) -> str:
    return f"  {preset:<20}{preset_words(preset)}"
