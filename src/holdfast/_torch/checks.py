"""Validation of numbers and names, with errors that say what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from typing_extensions import Self

#: Names that other libraries give to settings.
ELSEWHERE = {
    "learning_rate": "lr", "num_train_epochs": "epochs", "num_epochs": "epochs",
    "max_steps": "max_updates", "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size", "gradient_accumulation_steps": "accumulate",
    "max_grad_norm": "clip_norm", "warmup_ratio": "warmup", "cutoff_len": "max_length",
    "max_seq_length": "max_length", "sequence_len": "max_length", "output_dir": "out",
    "model_name_or_path": "model", "base_model": "model", "dataset": "data", "datasets": "data",
    "train_file": "data", "eval_dataset": "validation", "eval_steps": "evaluate_every",
    "early_stopping_patience": "patience", "method": "recipe", "log_with": "report_to",
    "wandb_project": "project",
}  # fmt: skip
#: How much less similar than the nearest name another suggestion may be.
_NEAR = 0.1

F = TypeVar("F", bound=Callable[..., Any])


def at_least_zero(name: str, value: Any) -> float:
    return _number(name, value, "a finite number ≥ 0", lambda number: 0 <= number < math.inf)


def above_zero(name: str, value: Any) -> float:
    return _number(name, value, "a finite number > 0", lambda number: 0 < number < math.inf)


def at_least_one(name: str, value: Any) -> float:
    """A number ≥ 1, perhaps infinity."""
    return _number(name, value, "a number ≥ 1, or infinity", lambda number: number >= 1)


def share(name: str, value: Any) -> float:
    return _number(name, value, "in [0, 1]", lambda number: 0 <= number <= 1)


def positive_share(name: str, value: Any) -> float:
    return _number(name, value, "in (0, 1]", lambda number: 0 < number <= 1)


def share_below_one(name: str, value: Any) -> float:
    return _number(name, value, "in [0, 1)", lambda number: 0 <= number < 1)


def whole_number(name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    number = int(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
    if number > most:
        raise ValueError(f"{name} must be at most {most:,}, got {value!r}")
    return number


def natural_number(name: str, value: Any) -> int:
    return whole_number(name, value, 0)


def positive_integer(name: str, value: Any) -> int:
    return whole_number(name, value, 1)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def file_name(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be the name of a file, got {value!r}")
    return os.fspath(value)


def one_of(name: str, value: Any, allowed: Sequence[str]) -> Any:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def duration(name: str, value: Any) -> float:
    """The seconds of a duration such as ``"90s"`` or ``"1h30m"``.

    >>> duration("budget", "1h30m"), duration("budget", "2d")
    (5400.0, 172800.0)
    """
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", str(value).strip())
    parts = found.groups("0") if found else ()
    seconds = sum(int(n) * size for n, size in zip(parts, (86400, 3600, 60, 1), strict=False))
    if not seconds:
        raise ValueError(
            f"{name} must be a duration above 0 in days, hours, minutes and seconds, such as 90s, "
            f"30m, 1h30m or 2d, got {value!r}"
        )
    return float(seconds)


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return the end of an error message about an unknown name: similar names, or all names.

    >>> did_you_mean("recadm", ["recadam", "mofo"])
    "; did you mean 'recadam'?"
    >>> did_you_mean("xyz", ["recadam", "mofo"])
    '; known: mofo, recadam'
    """
    known = sorted(known)
    if nearest := difflib.get_close_matches(name, known, n=1, cutoff=cutoff):
        near = max(cutoff, difflib.SequenceMatcher(None, nearest[0], name).ratio() - _NEAR)
        similar = difflib.get_close_matches(name, known, n=3, cutoff=near)
        return f"; did you mean {' or '.join(map(repr, similar))}?"
    return f"; known: {', '.join(known)}" if known else ""


def hint_at_setting(name: str, known: Collection[str], *, cutoff: float = 0.5) -> str:
    """Return the end of an error message about an unknown setting, or option with dashes.

    A name of another library stands for the setting of the same meaning, which may be a plural.

    >>> hint_at_setting("learning_rate", ["lr", "epochs"])
    "; did you mean 'lr'?"
    >>> hint_at_setting("--method", ["--recipes", "--seeds"])
    "; did you mean '--recipes'?"
    """
    ours = meant_by(name)
    same = [one for one in known if _without_dashes(one) in (ours, f"{ours}s")]
    if same:
        return f"; did you mean {min(same, key=len)!r}?"
    return did_you_mean(name, known, cutoff=cutoff)


def meant_by(name: str) -> str:
    """The setting that a name stands for, which may be one of another library.

    >>> meant_by("--learning-rate"), meant_by("--batch-size")
    ('lr', 'batch_size')
    """
    plain = _without_dashes(name)
    return ELSEWHERE.get(plain, plain)


def _without_dashes(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def named_settings(function: F) -> F:
    """Decorate a function, or an ``__init__``: an unknown setting is an error that suggests others.

    >>> @named_settings
    ... def train(*, epochs=1): ...
    >>> train(epoch=2)
    Traceback (most recent call last):
    TypeError: train has no setting 'epoch'; did you mean 'epochs'?
    """
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY and p.name != "self"]
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        _check_names(name, given, known)
        return function(*args, **given)

    return cast("F", checked)


class NamedSettings:
    """The base of a dataclass of settings: an unknown setting is an error that suggests others."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        settings: Any = cls
        is_dataclass = dataclasses.is_dataclass(settings)
        known = [f.name for f in dataclasses.fields(settings) if f.init] if is_dataclass else []
        _check_names(cls.__name__, given, known)
        return super().__new__(cls)


def _check_names(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise TypeError(f"{what} has no setting {name!r}{hint_at_setting(name, known)}")


def _number(name: str, value: Any, allowed: str, is_allowed: Callable[[float], bool]) -> float:
    if isinstance(value, str | bytes | bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, got {value!r}") from error
    if not is_allowed(number):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return number
