"""What subcommands are told: options, typed settings and YAML; what is wrong with them, in a line.

``Parser`` is argparse's, for a few options. ``make_parser`` is jsonargparse's, for settings that
come from YAML, are overridden on the command line and go into a config to run again.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

__all__ = ["Parser", "make_parser", "parsed"]

_KINDS = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "str": "text",
    "tuple": "a list, such as [a, b]",
    "list": "a list, such as [a, b]",
    "dict": "names and values, such as {a: 1}",
}
#: How argparse and jsonargparse say that a value is of the wrong kind: name, kind, value.
_WRONG_KINDS = (
    r"(\S+): Expected an? (.+?)\. Got value: (.*)",
    r"(\S+): Does not validate against any of the Union subtypes Subtypes: "
    r"\[(.*)\] Errors: .* Given value: (.*)",
    r"(\S+): invalid (\w+) value: (.*)",
)


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose complaints are ValueErrors of one sentence.

    Example:
        >>> Parser("holdfast demo").parse_args(["--jsn"])
        Traceback (most recent call last):
        ...
        ValueError: there is no option --jsn; holdfast demo --help lists them
    """

    def error(self, message: str) -> NoReturn:
        """Raise it, rather than print the usage and leave."""
        raise ValueError(_sentence(message, self, "option"))


def make_parser(name: str, description: str, examples: str, *, example: bool = False) -> Any:
    """A parser of jsonargparse, whose help begins with what it is for and how it is used.

    Args:
        name, description, examples: of the subcommand.
        example: whether what must be given has defaults, of the model in the package.
    """
    try:
        from jsonargparse import ArgumentParser, DefaultHelpFormatter
    except ImportError as error:
        raise ImportError(
            f'holdfast {name} reads its settings with jsonargparse: pip install "holdfast[cli]"'
        ) from error

    class Formatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
        """With defaults, examples as they are written, and docstrings as plain text."""

        def _get_help_string(self, action: argparse.Action) -> str:
            text, default = (action.help or "").replace("``", "").rstrip("."), action.default
            if action.required:
                shown = "(default: the small one in holdfast)" if example else "(required)"
                return f"{text} {shown}"
            nothing = default is None or default is False or default in ("", (), [], {})
            if nothing or default == argparse.SUPPRESS or "default" in text:
                return text
            shown = ", ".join(map(str, default)) if isinstance(default, tuple | list) else default
            return f"{text} (default: {shown})".strip()

    parser = ArgumentParser(
        prog=f"holdfast {name}",
        usage=f"holdfast {name} [options]",
        description=f"{description}\n{examples}",
        formatter_class=Formatter,
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="a YAML file of these settings")
    return parser


def parsed(parser: Any, arguments: Sequence[str]) -> Any:
    """What the user said. A name that is not known is answered with the nearest one."""
    arguments = _with_lists(parser, arguments)
    try:
        return parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        text, config = str(error), _config_in(arguments)
        if found := re.search(r"Problems parsing config:(.*)", text, re.DOTALL):
            raise ValueError(f"{config} is not YAML: {_of_yaml(found[1])}") from None
        if "Unexpected config" in text:
            raise ValueError(
                f"{config} holds no settings: it must have lines such as 'model: DIR'"
            ) from None
        raise ValueError(_sentence(text, parser, "setting")) from None


def _with_lists(parser: Any, arguments: Sequence[str]) -> list[str]:
    """``--recipes a,b`` as ``--recipes [a, b]``."""
    lists = {
        option
        for action in parser._actions
        if str(getattr(action, "_typehint", "")).startswith("tuple")
        for option in action.option_strings
    }
    given, values = [], False
    for word in arguments:
        name, equals, value = word.partition("=")
        if values or (name in lists and equals):
            value = word if values else value
            listed = value if value.startswith(("[", "(")) else f"[{value}]"
            word = listed if values else f"{name}={listed}"
        values = word in lists
        given.append(word)
    return given


def _sentence(message: str, parser: argparse.ArgumentParser, what: str) -> str:
    """What argparse or jsonargparse complains of, in plain words."""
    text = " ".join(message.split())
    text = re.sub(r'^Parser key "([^"]+)":', r"\1:", text)
    text = re.sub(r"<class '(\w+)'>", r"\1", text)
    text = re.sub(r"^argument (-\S+?)(/\S+)*: ", r"\1: ", text)
    more = f"; {parser.prog} --help lists them"
    if (wrong := _unknown(text)) is not None:
        names = [s for a in parser._actions for s in a.option_strings if s.startswith("--")]
        dashes = "--" if what == "option" else ""
        near = difflib.get_close_matches(f"--{wrong}", names, n=1, cutoff=0.5)
        hint = f"; did you mean {dashes}{near[0][2:]}?" if near else more
        shown = f"--{wrong}" if dashes else repr(wrong)
        return f"there is no {what} {shown}{hint}"
    if found := re.search(r"unrecognized arguments: (.*)", text):
        return f"nobody asks for {found[1]!r}: is a -- or a quotation mark missing?"
    if found := re.search(r"arguments are required: (.*)", text):
        needed = [_as_typed(name, parser) for name in found[1].split(", ")]
        return f"{' and '.join(needed)} must be given; {parser.prog} --help tells more"
    for form in _WRONG_KINDS:
        if found := re.match(form, text):
            return f"{found[1]} must be {_kinds(found[2])}, got {found[3]}"
    if found := re.match(r"(\S+): invalid choice: (.*?) \(choose from (.*)\)", text):
        return f"{found[1]} must be one of {found[3]}, got {found[2]}"
    return f"{text} ({parser.prog} --help tells more)"


def _unknown(text: str) -> str | None:
    """The name that a parser does not know, by its way of saying so.

    >>> _unknown("Group 'training' does not accept option 'lrr'")
    'training.lrr'
    """
    if found := re.search(r"unrecognized arguments: --([\w.-]+)", text):
        return found[1]
    if found := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", text):
        return f"{found[1]}.{found[2]}"
    found = re.search(r"Option '([\w.]+)' is not accepted", text)
    return found[1] if found else None


def _kinds(text: str) -> str:
    """The types that jsonargparse names, in words.

    >>> _kinds("float, typing.Literal['median', 'mean']")
    "a number, 'median' or 'mean'"
    """
    names = text.replace("<class ", "").replace("NoneType", "null")
    found = re.findall(r"'[^']*'|[A-Za-z_]\w*(?:\[.*\])?", re.sub(r"[\w.]*Literal", "", names))
    words = [_KINDS.get(name.partition("[")[0], name) for name in found] or [text]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _as_typed(name: str, parser: argparse.ArgumentParser) -> str:
    """An argument by the name that is typed: jsonargparse names options without dashes."""
    known = {s for action in parser._actions for s in action.option_strings}
    return f"--{name}" if f"--{name}" in known else name


def _config_in(arguments: Iterable[str]) -> str:
    """The config that is read: the last one there is."""
    words = list(arguments)
    given = [w.partition("=")[2] for w in words if w.startswith("--config=")]
    given += [after for word, after in itertools.pairwise(words) if word == "--config"]
    return given[-1] if given else "the config"


def _of_yaml(text: str) -> str:
    """PyYAML's complaint with the place of its end, without the name of a text that has none.

    >>> _of_yaml('while scanning a thing in "<unicode string>", line 1, column 8 did not find x')
    'while scanning a thing in line 1, column 8 did not find x'
    """
    return " ".join(text.split()).replace('"<unicode string>", ', "")
