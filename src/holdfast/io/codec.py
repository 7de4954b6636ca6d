"""Dataclasses to plain JSON values and back, and the JSON Schema of what they become.

Their types decide everything: a field is a dataclass, a tuple of one type, a dictionary with text
keys, a union, ``Any``, or ``str``, ``int``, ``float``, ``bool`` and ``None``. JSON has no NaN
and no infinity, so floats that are not finite are the texts ``"NaN"``, ``"Infinity"`` and
``"-Infinity"``.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NAMES: dict[Any, str] = {str: "string", int: "integer", bool: "boolean", type(None): "null"}
_UNIONS = (Union, types.UnionType)

T = TypeVar("T")


def encode(value: Any, at: str = "the report") -> Any:
    """The JSON value of a dataclass or of a part of it; ``at`` names the part in errors.

    >>> encode((1.5, float("inf"), None))
    [1.5, 'Infinity', None]
    """
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {f.name: encode(getattr(value, f.name), f"{at}.{f.name}") for f in fields}
    if isinstance(value, Mapping):
        return {encode(str(key)): encode(item, f"{at}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item, f"{at}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # file names may hold bad bytes
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):  # numpy's too
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else _name_of(number)
    raise TypeError(f"{at} is a {type(value).__name__}, which JSON cannot hold")


def decode(kind: type[T], value: Any, at: str = "the report") -> T:
    """The dataclass that :func:`encode` made ``value`` of; ValueError where it does not fit."""
    found: T = _decode(kind, value, at)
    return found


def schema(kind: type[Any]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of what :func:`encode` makes of a dataclass."""
    definitions: dict[str, Any] = {}
    top = _schema(kind, definitions)["$ref"].rpartition("/")[2]
    own = definitions.pop(top)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **own, "$defs": definitions}


def _decode(kind: Any, value: Any, at: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, value, at)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(args[0], item, f"{at}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _decode(args[1], item, f"{at}.{key}") for key, item in value.items()}
    if origin in _UNIONS:
        fits = [option for option in args if _fits(option, value)]
        if fits:
            return _decode(fits[0], value, at)
    elif kind is float and _fits(kind, value):
        return NOT_FINITE[value] if isinstance(value, str) else float(value)
    elif kind in _NAMES and _fits(kind, value):
        return value
    raise ValueError(f"{at} must be {_said(kind)}, got {_short(value)}")


def _decode_fields(kind: Any, value: Any, at: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{at} must be an object, got {_short(value)}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(value.keys() - fields.keys()):
        raise ValueError(
            f"{at} has an unknown key {unknown[0]!r}; its keys are {', '.join(fields)}"
        )
    if missing := [name for name, f in fields.items() if _required(f) and name not in value]:
        raise ValueError(f"{at} lacks {missing[0]!r}")
    hints = get_type_hints(kind)
    given = {name: _decode(hints[name], item, f"{at}.{name}") for name, item in value.items()}
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from None


def _fits(kind: Any, value: Any) -> bool:
    """Whether a JSON value may be one of a plain type; 1 is a float, True is no number."""
    if dataclasses.is_dataclass(kind):
        return isinstance(value, dict)
    if kind is float and isinstance(value, str):
        return value in NOT_FINITE
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        name = kind.__name__  # type: ignore[union-attr]
        if name not in definitions:
            definitions[name] = {}  # its place, before those that it needs
            hints = get_type_hints(kind)
            fields = dataclasses.fields(kind)
            definitions[name] = {
                "title": name,
                "description": (kind.__doc__ or "").partition("\n")[0],
                "type": "object",
                "properties": {f.name: _schema(hints[f.name], definitions) for f in fields},
                "required": [f.name for f in fields if _required(f)],
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{name}"}
    if origin is tuple:
        return {"type": "array", "items": _schema(args[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(args[1], definitions)}
    if origin in _UNIONS:
        return {"anyOf": [_schema(option, definitions) for option in args]}
    if kind is Any:
        return {}
    if kind is float:
        return {"anyOf": [{"type": "number"}, {"enum": list(NOT_FINITE)}]}
    return {"type": _NAMES[kind]}


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _name_of(number: float) -> str:
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _said(kind: Any) -> str:
    """A type in words, for an error."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in _UNIONS:
        return " or ".join(_said(option) for option in args)
    words = {
        tuple: "a list",
        str: "text",
        int: "a whole number",
        float: "a number",
        bool: "a truth value",
    }
    return "null" if kind is type(None) else words.get(origin or kind, "an object")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
