"""Open checkpoints that others wrote: check their files first, and run none of their code."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast._torch.imports import require
from holdfast.io.files import first_line
from holdfast.io.hub import check_hub, is_hub_name

_LARGEST = 1 << 26  # bytes of a JSON file; the largest index of shards has a few million
_MOST_VALUES = 100_000  # in a YAML file
_MOST_LAYERS = 5000  # a model with more of them is not built in any reasonable time


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object; every error names the file."""
    if (size := file.stat().st_size) > _LARGEST:
        raise ValueError(f"{file} has {size:,} bytes, but a JSON file of a model has few")
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object, got {_kind(found)}")
    return found


def parse_yaml(text: str, where: str) -> Any:
    """Return the plain values of a YAML text; ``where`` it is from begins an error.

    >>> parse_yaml("a: [1, 2]", "here")
    {'a': [1, 2]}
    """
    yaml = require("yaml", extra="cli", what="YAML")
    try:
        found = yaml.safe_load(text)
        for count, _ in enumerate(_parts(found)):
            if count > _MOST_VALUES:  # a few aliases (*name) can mean billions
                raise ValueError(f"it has more than {_MOST_VALUES:,} values")
        return found
    except Exception as error:  # values such as !!int "" make PyYAML raise many types
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{where} is not valid YAML: {' '.join(reason.split())[:300]}") from error


def check_model_files(folder: Path) -> None:
    """Check the small JSON files of a local model, which libraries read without checks."""
    names = ("config.json", "generation_config.json", "preprocessor_config.json")
    for file in (folder / name for name in (*names, "tokenizer_config.json")):
        if file.is_file():
            _check_values(file, read_object(file))


def from_pretrained(
    auto: Any, where: str, *, trust_remote_code: bool, what: str = "model", **options: Any
) -> Any:
    """Call a class's ``from_pretrained``, which never asks a question; every error names ``where``.

    Code in the checkpoint runs only with ``trust_remote_code``. Without a network, a cached model
    is read at once, and a missing one is an error at once.
    """
    if Path(where).is_dir():
        check_model_files(Path(where))
    elif Path(where).exists():
        raise ValueError(f"{where} is not a model: it is a file, not a directory")
    elif not is_hub_name(where):
        raise FileNotFoundError(f"no such model directory: {where}")
    elif not check_hub(where, "model"):
        options["local_files_only"] = True
    try:
        return auto.from_pretrained(where, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # damaged files make libraries raise many types
        if isinstance(error, MemoryError):
            raise
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(
                f"the {what} of {where} needs Python code that comes with it, which is not run: "
                "allow it if you trust its authors (--trust-remote-code, trust_remote_code=True)"
            ) from error
        raise ValueError(f"the {what} of {where} cannot be loaded: {first_line(error)}") from error


def _check_values(file: Path, found: dict[str, Any]) -> None:
    named = found.get("architectures")
    is_list = isinstance(named, list) and all(isinstance(name, str) for name in named)
    if named is not None and not is_list:
        raise ValueError(f"{file}: architectures must be a list of names, got {_kind(named)}")
    longest = found.get("model_max_length")
    if longest is not None and type(longest) not in (int, float):
        raise ValueError(f"{file}: model_max_length must be a number, got {_kind(longest)}")
    pairs = (part for part in _parts(found) if isinstance(part, tuple))
    for key, value in pairs:
        if key.endswith("_token_id") and not _is_token(value):
            raise ValueError(f"{file}: {key} must be the id of a token, got {_kind(value)}")
        # LLaVA's vision_feature_layer counts from the end if it is negative.
        is_count = "layer" in key and "feature_layer" not in key and isinstance(value, int | float)
        if is_count and not 0 <= value <= _MOST_LAYERS:
            raise ValueError(f"{file}: {key} must be from 0 to {_MOST_LAYERS}, got {value}")


def _is_token(value: Any) -> bool:
    ids = value if isinstance(value, list) else [value]
    return value is None or all(type(one) is int and 0 <= one < 1 << 31 for one in ids)


def _parts(value: Any) -> Iterator[Any]:
    """Yield all values in lists and objects, and the pairs of objects."""
    yield value
    inside = value.items() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        for part in inside:
            yield from _parts(part)


def _kind(value: Any) -> str:
    words = {bool: "true or false", dict: "an object", list: "a list", str: "text"}
    return words.get(type(value), "null" if value is None else "a number")
