"""Subcommands with typed settings: YAML, overrides on the command line, a config to run again."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["make_parser", "parsed"]


def make_parser(name: str, description: str, examples: str) -> Any:
    """A parser of jsonargparse, whose help begins with what it is for and how it is used."""
    try:
        from jsonargparse import ArgumentParser
    except ImportError as error:
        raise ImportError(
            f'holdfast {name} reads its settings with jsonargparse: pip install "holdfast[cli]"'
        ) from error
    import argparse

    parser = ArgumentParser(
        prog=f"holdfast {name}",
        description=f"{description}\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="a YAML file of these settings")
    return parser


def parsed(parser: Any, arguments: Sequence[str]) -> Any:
    """What the user said. A name that is not known is answered with the nearest one."""
    import argparse

    try:
        return parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        text = " ".join(str(error).split())
        names = [s[2:] for a in parser._actions for s in a.option_strings if s.startswith("--")]
        if (wrong := _unknown(text)) is not None:
            near = difflib.get_close_matches(wrong, names, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"there is no setting {wrong!r}{hint}") from None
        text = re.sub(r'Parser key "([^"]+)":', r"\1:", text)
        text = re.sub(r"<class '(\w+)'>", r"\1", text)
        raise ValueError(f"{text} ({parser.prog} --help tells more)") from None


def _unknown(text: str) -> str | None:
    """The name that jsonargparse does not know, by its way of saying so.

    >>> _unknown("Group 'training' does not accept option 'lrr'")
    'training.lrr'
    """
    if found := re.search(r"unrecognized arguments: --([\w.-]+)", text):
        return found[1]
    if found := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", text):
        return f"{found[1]}.{found[2]}"
    found = re.search(r"Option '([\w.]+)' is not accepted", text)
    return found[1] if found else None
