"""Regular expressions that others wrote: matched in a process of its own, with a time limit.

A short expression can take longer than the age of the universe, and Python cannot stop it.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable

from holdfast._torch.names import shorten

_LIMIT = 10.0  # seconds
_HARMLESS = re.compile(r"\^?[\w.-]*\$?")  # nothing is repeated: most patterns are names
_CODE = """
import json, re, sys
patterns, names = json.load(sys.stdin)
found = {p: [n for n in names if re.match(rf"(.*\\.)?({p})$", n)] for p in patterns}
json.dump(found, sys.stdout)
"""


def matching(patterns: Iterable[str], names: Iterable[str], where: str) -> dict[str, list[str]]:
    """Return the names whose end matches each pattern, as PEFT matches them.

    ``where`` is the file of the patterns, for errors.

    >>> matching(["q_proj", "layers.[01].mlp"], ["a.q_proj", "layers.1.mlp"], "a.json")
    {'q_proj': ['a.q_proj'], 'layers.[01].mlp': ['layers.1.mlp']}
    """
    patterns, names = list(patterns), list(names)
    for pattern in patterns:
        try:
            re.compile(f"({pattern})")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{where}: {pattern!r} is not a regular expression: {error}") from None
    if all(map(_HARMLESS.fullmatch, patterns)):
        return {p: [n for n in names if re.match(rf"(.*\.)?({p})$", n)] for p in patterns}
    command, given = [sys.executable, "-I", "-S", "-c", _CODE], json.dumps([patterns, names])
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=_LIMIT, check=True
        )
    except subprocess.SubprocessError:
        raise ValueError(
            f"{where}: the regular expression {shorten(list(map(repr, patterns)), ' or ', 3)} "
            f"takes longer than {_LIMIT:g} seconds: replace it by the names of the modules"
        ) from None
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found
