"""The one place that prints: text of others never controls the terminal."""

import json
import re
import sys
from typing import TextIO

#: Spaces of other scripts are not printable for Python, but do nothing to a terminal.
_CHECKED = re.compile(r"[^\n\t\x20-\x7e\u00a0\u2000-\u200a\u202f\u205f\u3000]")


def printable(text: object) -> str:
    r"""Return text with every control character as a JSON escape, so that JSON stays the same.

    >>> print(printable('{"name": "a\x9b31mb"}\n\x1b[2J'))
    {"name": "a\u009b31mb"}
    \u001b[2J
    """
    return _CHECKED.sub(lambda found: _escaped(found[0]), str(text))


def tell(text: object, *, file: TextIO | None = None, end: str = "\n") -> None:
    """Print text that may hold anything, on stdout if no other file is given."""
    print(printable(text), end=end, file=file or sys.stdout)


def tell_line(text: object, *, file: TextIO | None = None) -> None:
    """Print text on one line, so that it cannot look like several messages."""
    tell(plain(str(text)), file=file)


def plain(name: str) -> str:
    """A name on one line, without control characters.

    >>> plain("a\\n\\x1b[31mb")
    'a ␛[31mb'
    """
    shown = "".join(c if c.isprintable() else "␛" if c == "\x1b" else " " for c in name)
    return " ".join(shown.split()) or "(no name)"


def _escaped(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]
