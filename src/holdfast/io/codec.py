"""Dataclasses as plain JSON values, and back.

cattrs does the conversion. The rules set here: types are strict, unknown keys are errors, and
floats that JSON cannot hold are the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

import dataclasses
import json
import math
import numbers
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TypeVar, get_origin

from holdfast._torch.imports import require

_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as float() reads them and json writes them
_WORDS = {
    str: "text",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return the JSON value of a dataclass, or of a part of it. Numbers of numpy are accepted.

    >>> encode((1.5, float("inf"), None))
    [1.5, 'Infinity', None]
    """
    return _converter().unstructure(value)


def to_json(value: Any) -> str:
    return json.dumps(encode(value), ensure_ascii=False, allow_nan=False, indent=1)


def decode(kind: type[T], value: Any, name: str = "the report") -> T:
    """Return the dataclass that :func:`encode` made ``value`` from.

    A ValueError names the first place that does not fit; the place begins with ``name``.
    """
    found: T
    try:
        found = _converter().structure(value, kind)
    except Exception as error:  # a tree of errors, which cattrs flattens
        transform = require("cattrs", extra="eval", what="JSON").transform_error
        first = transform(error, name, lambda error, _: _message(error))[0]
        message, _, place = first.rpartition(" @ ")
        raise ValueError(f"{place}: {message}") from None
    return found


@lru_cache(maxsize=1)
def _converter() -> Any:
    cattrs = require("cattrs", extra="eval", what="JSON")
    lists = require("cattrs.cols", extra="eval", what="JSON")
    strategies = require("cattrs.strategies", extra="eval", what="JSON")
    made = cattrs.Converter(forbid_extra_keys=True, unstructure_fallback_factory=_refuse)
    made.register_unstructure_hook_func(_is_number, _encode_number)
    made.register_unstructure_hook_func(_is(tuple, list), lambda given: [*map(encode, given)])
    made.register_unstructure_hook(str, _encode_text)
    made.register_unstructure_hook(type(None), lambda given: given)
    made.register_unstructure_hook_func(_is(Literal), lambda given: given)
    for plain in (str, int, bool):
        made.register_structure_hook(plain, _exactly)
    made.register_structure_hook(float, _decode_number)
    strategies.configure_union_passthrough(str | int | float | bool | None, made)
    for predicate, factory, kind in (
        (dataclasses.is_dataclass, cattrs.gen.make_dict_structure_fn, dict),
        (_is(tuple, list), lists.homogenous_tuple_structure_factory, list),
        (_is(dict), lists.mapping_structure_factory, dict),
    ):
        made.register_structure_hook_factory(predicate, _checked(made, factory, kind))
    return made


def _checked(converter: Any, factory: Any, json_kind: type) -> Callable[..., Any]:
    """Return a factory of hooks that check the JSON type before they convert the parts."""

    def checked_factory(cls: Any) -> Callable[[Any, Any], Any]:
        convert = factory(cls, converter)
        return lambda given, kind: convert(_exactly(given, json_kind), kind)

    return checked_factory


def _exactly(given: Any, kind: type) -> Any:
    if type(given) is not kind:  # True is an int for isinstance
        raise ValueError(f"must be {_WORDS[kind]}, got {_short(given)}")
    return given


def _decode_number(given: Any, _: Any) -> float:
    if given not in _NOT_FINITE and type(given) not in (int, float):
        raise ValueError(f"must be a number, got {_short(given)}")
    return float(given)


def _is_number(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, numbers.Real)  # numpy's too


def _is(*kinds: Any) -> Callable[[Any], bool]:
    return lambda cls: (get_origin(cls) or cls) in kinds


def _encode_number(given: Any) -> bool | int | float | str:
    if isinstance(given, bool):
        return given
    if isinstance(given, numbers.Integral):
        return int(given)
    number = float(given)
    return number if math.isfinite(number) else json.dumps(number)


def _encode_text(given: str) -> str:
    return given.encode("utf-8", "backslashreplace").decode()  # file names may hold invalid bytes


def _refuse(cls: Any) -> Any:
    raise TypeError(f"a {getattr(cls, '__name__', cls)} cannot be written as JSON")


def _message(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    if extra := getattr(error, "extra_fields", None):
        keys = ", ".join(f.name for f in dataclasses.fields(error.cl))  # type: ignore[attr-defined]
        return f"unknown key {min(extra)!r}; its keys are {keys}"
    return str(error)


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:57]}..."
