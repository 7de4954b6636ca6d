"""A command line to copy. Its words may come from files of others."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from holdfast.report.printing import plain


def command(name: str, *values: Any, **options: Any) -> str:
    """The line ``holdfast NAME VALUE… --OPTION VALUE…``, or "" if it would be read differently.

    That is so if a value begins with "-" or would not be shown as it is. True and False stand for
    ``--option`` and ``--no-option``, a mapping for an option that is repeated. What is None or
    empty is left out.

    >>> command("measure", "base", "my model", text=["a", "b"], limit=None, drift=False)
    "holdfast measure base 'my model' --text a b --no-drift"
    >>> command("finetune", set={"update.lr": 1e-3, "recall.texts": None})
    'holdfast finetune --set update.lr 0.001 --set recall.texts none'
    >>> command("measure", "base", "--trust-remote-code"), command("measure", "a  b", "tuned")
    ('', '')
    """
    words, every = ["holdfast", name, *map(_word, values)], [*values]
    for option, value in options.items():
        flag = f"--{'no-' * (value is False)}{option.replace('_', '-')}"
        several = value.items() if isinstance(value, Mapping) else [_list(value)]
        for given in several if isinstance(value, bool) or _list(value) else ():
            words += [flag, *map(_word, given)]
            every += given
    safe = all(word == plain(word) and not word.startswith("-") for word in map(_word, every))
    return shlex.join(words) if safe else ""


def _list(value: Any) -> list[Any]:
    if isinstance(value, list | tuple | Mapping):
        return [*value]
    return [] if value is None or value == "" or isinstance(value, bool) else [value]


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
