"""The command that trains a recipe as a comparison or a search trained it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from holdfast.hosts.job import Training
from holdfast.io.codec import encode
from holdfast.recipe import is_recipe_file, read_recipe
from holdfast.report.printing import plain

if TYPE_CHECKING:
    from holdfast.comparison.results import RunResult


def finetune_command(plan: Mapping[str, Any], run: RunResult, *, searched: bool = False) -> str:
    """The line of ``holdfast finetune`` for a run of a plan; empty if it is not known.

    If options cannot give the settings that a search has found, its ``recipe.yaml`` is named.
    """
    model, data = plan.get("model"), plan.get("data")
    if not (model and data):
        return ""
    known = map(str, _list(plan.get("recipes")))
    names = {PurePath(name).stem if is_recipe_file(name) else name: name for name in known}
    recipe, before, after = names.get(run.recipe, run.recipe), {}, dict(_flat(encode(run.settings)))
    with contextlib.suppress(OSError, ValueError):
        before = dict(_flat(encode(read_recipe(recipe)[1].to_dict())))
    changed = {n: v for n, v in after.items() if before.get(n, v) != v}
    training = {**_part(plan, "training"), **_part(plan, "options"), **run.values}
    lr = training.get("lr") or _part(plan, "rates").get(run.recipe)
    other = any(n.endswith(".name") or isinstance(v, list | dict) for n, v in changed.items())
    if other or not before:
        if not searched:
            return ""
        recipe, changed, lr = "recipe.yaml", {}, None
    elif after.get("update.lr") is not None:
        lr = changed.pop("update.lr", None) if before.get("update.lr") is None else None
    words = ["holdfast", "finetune", "--model", model, "--data", *_list(data), "--recipe", recipe]
    words += ["--lr", _word(lr)] if lr else []
    for name, default in vars(Training()).items():
        value = training.get(name, default)
        if name not in ("lr", "save_seconds") and value != default:
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [option, _word(value)]
    for name, value in changed.items():
        words += ["--set", name, _word(value)]
    if columns := _part(plan, "columns"):
        words += ["--columns", *(f"{name}={column}" for name, column in columns.items())]
    for name in ("old_data", "new", "head"):
        if (value := plan.get(name)) and value != "auto":
            words += [f"--{name.replace('_', '-')}", *_list(value)]
    words += ["--trust-remote-code"] * bool(plan.get("trust_remote_code"))
    return plain(shlex.join([*map(str, words), "--out", "tuned"]))


def _part(plan: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = plan.get(name)
    return part if isinstance(part, Mapping) else {}


def _list(given: Any) -> list[Any]:
    return [*given] if isinstance(given, list | tuple) else [given]


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings of a recipe by dotted name; the names of its methods end in ``.name``."""
    for stage, given in settings.items():
        for method in given if isinstance(given, list) else [given]:
            yield from ((f"{stage}.{name}", value) for name, value in method.items())


def _word(value: Any) -> str:
    """A value as the command line reads it.

    >>> _word(1e-3), _word(None), _word(True)
    ('0.001', 'none', 'true')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
