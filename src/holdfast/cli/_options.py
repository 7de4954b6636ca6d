"""Options of all commands: generated from dataclasses, read from the command line and from YAML.

An option has one name and one meaning in every command. Options that several commands share are
in ``SHARED``. Options of a dataclass come from :func:`add_settings`: the field gives the type and
the default, the docstring gives the help text.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from holdfast._torch.checks import hint_at_setting, meant_by
from holdfast._torch.imports import require
from holdfast.io.untrusted import parse_yaml
from holdfast.report import LEARN_AT_LEAST

T = TypeVar("T")
Names = Collection[str]

#: Options whose name differs from the name of their field, because another option has that name.
RENAMED = {
    ("Measuring", "data"): "retained",
    ("Measuring", "max_length"): "test_max_length",
    ("Plan", "options"): "set",
}
#: Options that the config.yaml of a run does not contain.
NOT_SAVED = ("config", "json", "print_config")


class UsageError(ValueError):
    """The command line is wrong; the message is one sentence."""


@dataclass(frozen=True)
class Convert:
    """Convert a word of the command line to a value of one of several types.

    >>> convert = Convert.to(float | Literal["median"])
    >>> convert("0.5"), convert("median")
    (0.5, 'median')
    >>> convert("hot")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: must be 'median' or a number, got 'hot'
    """

    kinds: tuple[Any, ...]  # types and literal values, in the order in which they are tried

    @classmethod
    def to(cls, kind: Any) -> Convert:
        parts: list[Any] = []
        for part in get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind]:
            parts += get_args(part) if get_origin(part) is Literal else [part]
        return cls(tuple(sorted(parts, key=lambda p: [*_KINDS].index(p) if p in _KINDS else -1)))

    def __call__(self, word: str) -> Any:
        for kind in self.kinds:
            with contextlib.suppress(KeyError, ValueError):
                if kind in _WORDS:
                    return _WORDS[kind][word.lower()]
                return kind(word) if isinstance(kind, type) else {str(kind): kind}[word]
        last = sorted(self.kinds, key=lambda kind: kind is NoneType)
        allowed = [_KINDS[kind][0] if kind in _KINDS else repr(kind) for kind in last]
        shown = " or ".join(filter(None, (", ".join(allowed[:-1]), allowed[-1])))
        raise argparse.ArgumentTypeError(f"must be {shown}, got {word!r}")

    @property
    def help(self) -> dict[str, Any]:
        """argparse's ``choices``, or the ``metavar`` of a number."""
        if not any(kind in _KINDS for kind in self.kinds):
            return {"choices": self.kinds}
        metavar = _KINDS.get(self.kinds[-1], ("", None))[1]
        return {"metavar": metavar} if metavar else {}


#: Types in the order in which they are tried, in words and in the help.
_KINDS: dict[Any, tuple[str, str | None]] = {
    NoneType: ("none", None),
    bool: ("true or false", None),
    int: ("a whole number", "N"),
    float: ("a number", "X"),
    str: ("text", None),
}
_WORDS: dict[Any, dict[str, Any]] = {NoneType: {"none": None}, bool: {"true": True, "false": False}}

WHOLE, NUMBER = Convert((int,)), Convert((float,))


def share(word: str) -> float:
    """A share above 0, as ``99%`` or ``0.99``."""
    number = float(NUMBER(word.removesuffix("%"))) / (100 if word.endswith("%") else 1)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], such as 0.95 or 95%, got {word!r}")
    return number


def one_of(*words: str) -> dict[str, Any]:
    """Return the arguments of an option that takes one of several words."""
    return {"type": Convert(words), "choices": words}


class Assigned(argparse.Action):
    """Collect words such as ``text=body`` in a dictionary."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        found = dict(word.partition("=")[::2] for word in values)
        if "" in found or "" in found.values():
            raise argparse.ArgumentError(self, f"must be NAME=COLUMN, got {' '.join(values)!r}")
        setattr(namespace, self.dest, found)


class OneOrSeveral(argparse.Action):
    """Store one word as it is, and several as a list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


class Only(argparse.Action):
    """Store one word as the only one of an option that takes several."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, [values])


class Pairs(argparse.Action):
    """Collect ``--grid NAME VALUE…`` in a dictionary; a repeated name replaces its values."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        name, *found = values
        if not found:
            raise argparse.ArgumentError(self, f"expected a value after {name!r}")
        value = found if self.nargs == "+" else found[0]
        before = getattr(namespace, self.dest) or {}
        setattr(namespace, self.dest, {**before, str(name): value})


#: What options of a dataclass take, where their own name says less.
METAVARS = {
    "text": "FILE", "retained": "FILE", "similarity": "FILE", "include_path": "DIR",
    "tasks": "TASK", "validation": "FILE", "recipes": "RECIPE", "seeds": "SEED", "alphas": "ALPHA",
    "report_to": "TRACKER", "project": "NAME",
}  # fmt: skip
#: Options of several commands.
SHARED: dict[str, dict[str, Any]] = {
    "config": {"metavar": "FILE", "help": "YAML file of options; the command line overrides it"},
    "print_config": {"action": "store_true", "help": "print all options as YAML, and exit"},
    "model": {"help": "pretrained model: a directory, a hub name, or builtin, a small one"},
    "data": {
        "action": OneOrSeveral, "nargs": "+",
        "help": "training data: files of rows or text, a directory of datasets.save_to_disk, "
        "a folder of images, a hub dataset, or builtin, problems of GSM8K",
    },
    "columns": {
        "action": Assigned, "nargs": "+", "default": {}, "metavar": "NAME=COLUMN",
        "help": "read columns under names that holdfast knows: question=problem answer=solution",
    },
    "old_data": {
        "metavar": "DATA", "help": "data of an old task, for recipes that train on it as well",
    },
    "target": {"metavar": "FILE", "help": "test data of the new task (compare, tune: one file)"},
    "recipe": {"metavar": "RECIPE", "help": "preset names joined by +, or a YAML file"},
    "head": {
        **one_of("auto", "classification", "regression", "none"), "default": "auto",
        "help": "new head of the model; auto adds one if the data has labels that the model has "
        "no head for (a causal language model keeps its own)",
    },
    "new": {
        "nargs": "+", "default": [], "metavar": "PART",
        "help": "parts of the model without pretrained weights, such as classifier",
    },
    "set": {
        "action": Pairs, "nargs": 2, "type": Convert((NoneType, bool, int, float, str)),
        "default": {},
        "metavar": ("NAME", "VALUE"),
        "help": "give a setting of the recipe's methods another value: --set merging.alpha 0.3",
    },
    "seed": {"type": WHOLE, "default": 0, "metavar": "N", "help": "random seed"},
    "gpus": {"type": NUMBER, "metavar": "N", "help": "GPUs per run (compare: on Ray)"},
    "jobs": {
        "type": WHOLE, "metavar": "N",
        "help": "trainings at a time (default: as --per-gpu says, or one per CPU core; 1 on a "
        "device such as xpu)",
    },
    "per_gpu": {
        "type": Convert(("auto", int)), "default": "auto", "metavar": "N",
        "help": "trainings at a time on each GPU; auto follows --jobs, or chooses by the size of "
        "the model, the free memory and the CPU cores",
    },
    "device": {
        "help": "device of the model, such as cuda:1 or cpu (default: a GPU if there is one)",
    },
    "learn_at_least": {
        "type": share, "default": LEARN_AT_LEAST, "metavar": "X%",
        "help": "of the models with at least this share of the best gain on the target, recommend "
        "the one that forgot least",
    },
    "out": {"metavar": "DIR", "help": "output directory"},
    "json": {"action": "store_true", "help": "print the result as JSON"},
    "model_card": {
        "metavar": "FILE",
        "help": "add the result to a model card (README.md), as a section and as metadata",
    },
    "allow_pickle": {
        "action": "store_true", "help": "also read pickled weights (.bin, .pt), as plain tensors",
    },
    "trust_remote_code": {
        "action": "store_true", "help": "run Python code that comes with a model (default: never)",
    },
}  # fmt: skip

#: The shared options about a model and its training data.
DATA = ("model", "data", "columns", "old_data", "head", "new", "trust_remote_code")


class Help(argparse.RawDescriptionHelpFormatter):
    """Help with the defaults of options that are not off or empty by default."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)
        self._action_max_length = 16  # argparse forgets the indentation of subcommands

    def _expand_help(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default in (None, False, argparse.SUPPRESS) or default in ("", (), [], {}):
            return text
        shown = " ".join(map(str, default)) if isinstance(default, tuple | list) else default
        return f"{text} (default: {shown})"


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors are a :class:`UsageError` with one sentence."""

    needed: Sequence[str] = ()  # options that must be given
    demo: Callable[[], Mapping[str, Any]] | None = None  # defaults without --model and --config
    hints: Mapping[str, str] = {}  # by a setting of other commands: what to give instead

    def __init__(self, **options: Any) -> None:
        ours = {"formatter_class": Help, "allow_abbrev": False, "exit_on_error": False}
        super().__init__(**{**ours, **options})

    def describe(
        self, text: str | None, usage: str = "[options]", needed: Sequence[str] = ()
    ) -> None:
        """Set the texts around the options: the first paragraph of a docstring, and the rest."""
        self.description, _, self.epilog = (text or "").partition("\n\n")
        self.usage, self.needed = f"{self.prog} {usage}", needed

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `{self.prog} --help` lists the options")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the command line; a config, or the demo, gives the defaults."""
        if empty := next((word for word in words if re.fullmatch("--.+=--", word)), None):
            self.error(f"{empty[:-3]} expected a value")  # which argparse reads as an empty list
        try:
            self.set_defaults(**self._given_before(words))
            options, unknown = self.parse_known_args(words)
        except argparse.ArgumentError as error:
            # Newer versions of Python raise this for missing arguments too, without a name.
            raise UsageError(" ".join(filter(None, (error.argument_name, error.message)))) from None
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                is_first = unknown[0] == words[0]  # a later one may be a value too many
                is_model = is_first and "model" in self.needed and options.model is None
                hint = f": a model is given as --model {name}" if is_model else ""
                self.error(f"unexpected argument {name!r}{hint}")
            known = [name for name in self._option_string_actions if name.startswith("--")]
            raise UsageError(f"unknown option {name}{self._hint(name, known)}")
        if missing := [f"--{name}" for name in self.needed if getattr(options, name) is None]:
            self.error(f"{' and '.join(missing)} must be given")
        return options

    def _hint(self, name: str, known: Collection[str]) -> str:
        return self.hints.get(meant_by(name)) or hint_at_setting(name, known, cutoff=0.7)

    def _given_before(self, words: Sequence[str]) -> Mapping[str, Any]:
        if "--config" not in self._option_string_actions or {"-h", "--help"} & {*words}:
            return {}
        first = Parser(prog=self.prog, add_help=False)
        first.add_argument("--config"), first.add_argument("--model")
        given, _ = first.parse_known_args(words)
        if given.config is not None:
            return dict(self._read_config(Path(given.config)))
        return self.demo() if self.demo is not None and given.model is None else {}

    def _read_config(self, file: Path) -> Iterator[tuple[str, Any]]:
        try:
            given = parse_yaml(file.read_text(encoding="utf-8"), str(file))
        except UnicodeDecodeError as error:
            raise UsageError(f"{file} is not valid YAML: {error}") from None
        if not isinstance(given, dict):
            what = type(given).__name__
            raise UsageError(f"{file} must contain options such as 'model: DIR', got a {what}")
        known = [action for action in self._actions if action.dest not in ("help", "config")]
        actions = {a.dest: a for a in known} | {
            name.lstrip("-").replace("-", "_"): action
            for action in known
            for name in action.option_strings[:1]
        }
        for key, value in given.items():
            name = str(key).replace("-", "_")
            if name not in actions:
                raise UsageError(f"{file}: unknown option {key!r}{self._hint(name, actions)}")
            try:
                yield actions[name].dest, _from_yaml(actions[name], value)
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"{file}: {key} {error}") from None


def _from_yaml(action: argparse.Action, value: Any) -> Any:
    """Convert the value of an option in a config as argparse would convert its words."""
    convert: Any = Convert((bool,)) if action.nargs == 0 else action.type or str

    def one(item: Any) -> Any:
        if isinstance(item, list | dict):
            raise argparse.ArgumentTypeError(f"must be one value, got {str(item)[:60]}")
        return convert("none" if item is None else str(item))

    def many(items: Any) -> list[Any]:
        return [one(item) for item in (items if isinstance(items, list) else [items])]

    single = isinstance(action, Assigned) or (
        isinstance(action, OneOrSeveral) and not isinstance(value, list)
    )
    some = many if action.nargs == "+" and not single else one
    if isinstance(action, Pairs | Assigned):
        if not isinstance(value, dict):
            raise argparse.ArgumentTypeError(f"must be names and values, got {value!r}")
        if empty := [name for name, item in value.items() if item == []]:
            raise argparse.ArgumentTypeError(f"must have at least one value of {empty[0]}")
        return {str(name): some(item) for name, item in value.items()}
    return None if value is None and action.default is None else some(value)


def config_text(options: argparse.Namespace) -> str:
    """Write options as the YAML that ``--config`` reads."""
    yaml = require("yaml", extra="cli", what="config.yaml")
    saved = {name: value for name, value in vars(options).items() if name not in NOT_SAVED}
    return str(yaml.safe_dump(saved, sort_keys=False, allow_unicode=True))


def config_input(options: argparse.Namespace) -> list[str]:
    """The file of --config, as an input that must not be written over.

    A file with exactly these options, such as that of a stopped run, is not written again.
    """
    if options.config is None:
        return []
    given = parse_yaml(Path(options.config).read_text(encoding="utf-8"), options.config)
    return [] if given == parse_yaml(config_text(options), "the options") else [options.config]


def add(group: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Add options of ``SHARED``, with changes, to a parser or a group of one."""
    for name in names:
        group.add_argument(f"--{name.replace('_', '-')}", **{**SHARED[name], **changes})


def add_settings(
    group: argparse._ActionsContainer,
    cls: type,
    *,
    only: Names | None = None,
    skip: Names = (),
    **defaults: Any,
) -> None:
    """Add an option for each field of a dataclass (or ``only`` some), except for dataclasses.

    ``defaults`` are others than those of the fields.
    """
    kinds, texts = get_type_hints(cls), attribute_texts(cls)
    for field in fields(cls):
        kind, name = kinds[field.name], RENAMED.get((cls.__name__, field.name), field.name)
        wanted = field.name in (kinds if only is None else only) and field.name not in skip
        if not (wanted and field.init) or is_dataclass(kind):
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        default = defaults.get(field.name, None if default is MISSING else default)
        given: dict[str, Any] = {"default": default}
        origin, args = get_origin(kind), get_args(kind)
        if kind is bool:
            given |= {"action": argparse.BooleanOptionalAction}
        elif origin is dict:
            several = {"nargs": "+"} if get_origin(args[1]) is tuple else {}
            given |= {**SHARED["set"], **several, "default": default}
        else:
            convert = Convert.to(args[0] if origin is tuple else kind)
            given |= {"type": convert, "nargs": "+" if origin is tuple else None, **convert.help}
            given |= {"metavar": METAVARS[name]} if name in METAVARS else {}
        action = group.add_argument(f"--{name.replace('_', '-')}", **given)
        action.help = texts.get(field.name, "")  # not given: BooleanOptionalAction would extend it


def settings_from(cls: type[T], options: argparse.Namespace, **given: Any) -> T:
    """Build a dataclass, and the dataclasses in it; ``given`` are fields without an option."""
    kinds, values = get_type_hints(cls), {}
    for field in fields(cls):  # type: ignore[arg-type]
        name = RENAMED.get((cls.__name__, field.name), field.name)
        if is_dataclass(kinds[field.name]):
            values[field.name] = settings_from(kinds[field.name], options)
        elif hasattr(options, name):
            values[field.name] = _frozen(getattr(options, name))
    try:
        return cls(**{**values, **given})
    except TypeError as error:  # a value of the wrong type, for which the class has its sentence
        raise UsageError(str(error)) from error


def _frozen(value: Any) -> Any:
    """Turn lists into tuples, as dataclasses hold them."""
    if isinstance(value, dict):
        return {name: _frozen(item) for name, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


def attribute_texts(cls: type) -> dict[str, str]:
    """Read the descriptions of the attributes from a docstring.

    >>> from holdfast.comparison.plan import Measuring
    >>> attribute_texts(Measuring)["tasks"]
    'names of tasks of lm-evaluation-harness'
    """
    found: dict[str, str] = {}
    entry = re.compile(r"^    (\w[\w, ]*): (.+(?:\n {8}.+)*)", re.MULTILINE)
    for names, text in entry.findall(inspect.cleandoc(cls.__doc__ or "")):
        plain = " ".join(re.sub(r'``"?|"?``', "", text).split()).rstrip(".")
        found |= dict.fromkeys(names.split(", "), plain)
    return found
