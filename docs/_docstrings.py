"""Translate docstrings for mkdocstrings: Sphinx roles become links, examples become sections.

A griffe extension, named in ``mkdocs.yml``. Docstrings are written for ``help()``.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`(~?)(?:([^`<]+?) *<([^`>]+)>|([^`]+))`")


class Docstrings(griffe.Extension):
    """Rewrite every docstring of the package after it is loaded."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Walk over all objects."""
        for obj in _walk(pkg):
            if obj.docstring is not None:
                text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
                text = re.sub(r"^>>> .+(?:\n.+)*", _as_section, text, flags=re.M)
                obj.docstring.value = _ROLE.sub(lambda role, o=obj: _reference(role, o), text)


def _walk(obj: Any) -> Any:
    yield obj
    for member in obj.members.values():
        if not member.is_alias:
            yield from _walk(member)


def _as_section(example: re.Match[str]) -> str:
    """An example without a title, as an ``Examples`` section."""
    return "Examples:\n" + "\n".join(f"    {line}" for line in example[0].split("\n"))


def _reference(role: re.Match[str], obj: Any) -> str:
    """A link if a page documents the target, else its name."""
    short, title, there, alone = role.groups()
    target = there or alone
    text = title or (target.rpartition(".")[2] if short else target.removeprefix("holdfast."))
    return f'<autoref optional identifier="{_resolved(target, obj)}">`{text}`</autoref>'


def _resolved(name: str, obj: Any) -> str:
    """The full path of a name as the docstring's scope knows it."""
    if name.startswith("holdfast"):
        return name
    for scope in (obj, obj.parent):
        if scope is not None and name in scope.members:
            return f"{scope.path}.{name}"
    try:
        return str(obj.resolve(name))
    except griffe.NameResolutionError:
        return name
