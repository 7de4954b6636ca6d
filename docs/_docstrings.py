"""Docstrings as mkdocstrings reads them: they are written for ``help()``, with Sphinx's roles.

A griffe extension, named in ``mkdocs.yml``. Cross-references, tables, examples and lines for
several arguments at once are put into the form that the parser of Google's style knows.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`(~?)(?:([^`<]+?) *<([^`>]+)>|([^`]+))`")
_RULE = re.compile(r"=+(?: +=+)+")
# Functions that are called as their file is: the public name would be taken for the file's.
_AS_THEIR_FILE = {"holdfast.linear_probe", "holdfast.random_init"}
_SEVERAL = re.compile(r"( +)(\w+(?:, \w+)+): (.*)")


class Docstrings(griffe.Extension):
    """Rewrite every docstring of the package, once it is loaded."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Walk over all objects."""
        for obj in _walk(pkg):
            if obj.docstring is not None:
                text = _tables(obj.docstring.value)
                text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
                text = re.sub(r"^>>> .+(?:\n.+)*", _as_section, text, flags=re.MULTILINE)
                text = _each_by_itself(text)
                obj.docstring.value = _ROLE.sub(lambda role, o=obj: _reference(role, o), text)


def _walk(obj: Any) -> Any:
    yield obj
    for member in obj.members.values():
        if not member.is_alias:
            yield from _walk(member)


def _reference(role: re.Match[str], obj: Any) -> str:
    """A link where the target is on a page, else its name."""
    short, title, there, alone = role.groups()
    target = there or alone
    text = title or (target.rpartition(".")[2] if short else target.removeprefix("holdfast."))
    return f'<autoref optional identifier="{_resolved(target, obj)}">`{text}`</autoref>'


def _resolved(name: str, obj: Any) -> str:
    """A whole path: of a member of the same class, of what the module knows, or as it is."""
    if name in _AS_THEIR_FILE:
        short = name.removeprefix("holdfast.")
        return f"holdfast.trainable.{short}.{short}"
    if name.startswith("holdfast"):
        return name
    for scope in (obj, obj.parent):
        if scope is not None and name in scope.members:
            return f"{scope.path}.{name}"
    try:
        return str(obj.resolve(name))
    except griffe.NameResolutionError:
        return name


def _as_section(example: re.Match[str]) -> str:
    """An example that stands in the text, without a title."""
    return "Examples:\n" + "\n".join(f"    {line}" for line in example[0].split("\n"))


def _tables(text: str) -> str:
    """Tables of the kind ``=== ===`` as Markdown's."""
    lines, out = text.split("\n"), []
    rules = 0
    spans: list[slice] = []
    for line in lines:
        if _RULE.fullmatch(line.strip()):
            rules += 1
            if rules == 1:
                ends = [match.start() for match in re.finditer("=+", line)]
                spans = [slice(a, b) for a, b in zip(ends, [*ends[1:], None], strict=True)]
            elif rules == 2:
                out.append("| " + " | ".join("---" for _ in spans) + " |")
            else:
                rules = 0
        elif rules:
            out.append("| " + " | ".join(line[span].strip() for span in spans) + " |")
        else:
            out.append(line)
    return "\n".join(out)


def _each_by_itself(text: str) -> str:
    """``betas, eps: Adam's.`` as an entry for each, with its own type and default."""
    out: list[str] = []
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if not (found := _SEVERAL.fullmatch(line)):
            out.append(line)
            continue
        indent, names, rest = found.groups()
        more = []
        for below in lines[i + 1 :]:
            if not below.startswith(indent + " "):
                break
            more.append(below)
        *others, last = names.split(", ")
        for name in others:
            out += [f"{indent}{name}: {rest}", *more]
        out.append(f"{indent}{last}: {rest}")
    return "\n".join(out)
