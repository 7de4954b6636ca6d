"""The command that trains a recipe as a comparison or a search trained it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
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
    if not (plan.get("model") and plan.get("data")):
        return ""
    known = map(str, _list(plan.get("recipes")))
    names = {PurePath(name).stem if is_recipe_file(name) else name: name for name in known}
    recipe, before, after = names.get(run.recipe, run.recipe), {}, _flat(run.settings)
    with contextlib.suppress(OSError, ValueError):
        before = _flat(read_recipe(recipe)[1].to_dict())
    changed = {n: v for n, v in after.items() if before.get(n, v) != v}
    training = {**_part(plan, "training"), **_part(plan, "options"), **run.values}
    lr = training.pop("lr", None) or _part(plan, "rates").get(run.recipe)
    if not before or any(
        n.endswith(".name") or isinstance(v, list | dict) for n, v in changed.items()
    ):
        recipe, changed, lr = "recipe.yaml", {}, None
        if not searched:
            return ""
    elif after.get("update.lr") is not None:
        lr = changed.pop("update.lr", None) if before.get("update.lr") is None else None
    defaults = {n: value for n, value in vars(Training()).items() if n != "save_seconds"}
    differ = {n: v for n, v in training.items() if v != defaults.get(n, v)}
    options = {
        **{name: plan.get(name) for name in ("model", "data")}, "recipe": recipe, "lr": lr,
        **{n: v if v is True else _word(v) for n, v in differ.items()},
        "columns": [f"{name}={column}" for name, column in _part(plan, "columns").items()],
        **{name: plan.get(name) for name in ("old_data", "new", "trust_remote_code")},
        "head": plan.get("head") if plan.get("head") != "auto" else None,
    }  # fmt: skip
    words = ["holdfast", "finetune"]
    for name, value in options.items():
        given = [] if value is True else map(_word, _list(value))
        words += [f"--{name.replace('_', '-')}", *given] if value else []
    for name, value in changed.items():
        words += ["--set", name, _word(value)]
    return plain(shlex.join([*words, "--out", "tuned"]))


def _part(plan: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = plan.get(name)
    return part if isinstance(part, Mapping) else {}


def _list(given: Any) -> list[Any]:
    return [*given] if isinstance(given, list | tuple) else [given]


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recipe by dotted name; the names of its methods end in ``.name``."""
    methods = ((stage, method) for stage, given in settings.items() for method in _list(given))
    return {
        f"{stage}.{n}": encode(value) for stage, method in methods for n, value in method.items()
    }


def _word(value: Any) -> str:
    """A value as the command line reads it.

    >>> _word(1e-3), _word(None), _word(True)
    ('0.001', 'none', 'true')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
