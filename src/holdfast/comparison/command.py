"""The command that trains a recipe as a comparison or a search trained it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from holdfast.hosts.job import Training
from holdfast.io.codec import encode
from holdfast.recipe import is_recipe_file, read_recipe
from holdfast.report.command import command

if TYPE_CHECKING:
    from holdfast.comparison.results import RunResult


def finetune_command(plan: Mapping[str, Any], run: RunResult) -> str:
    """The line of ``holdfast finetune`` for a run of a plan; empty if options cannot give it.

    It never trusts the code of a model: the plan may come from a file of others.
    """
    if not (plan.get("model") and plan.get("data")):
        return ""
    known = map(str, _list(plan.get("recipes")))
    names = {PurePath(name).stem if is_recipe_file(name) else name: name for name in known}
    recipe, before, after = names.get(run.recipe, run.recipe), {}, _flat(run.settings)
    with contextlib.suppress(OSError, ValueError):
        before = _flat(read_recipe(recipe)[1].to_dict())
    changed = {n: v for n, v in after.items() if before.get(n, v) != v}
    said = all(
        not n.endswith(".name") and not isinstance(v[0], list | dict) and v == v[:1] * len(v)
        for n, v in changed.items()
    )
    if not (before and said):
        return ""
    training = {**_part(plan, "training"), **_part(plan, "options"), **run.values}
    lr = training.pop("lr", None) or _part(plan, "rates").get(run.recipe)
    if after.get("update.lr", [None]) != [None]:
        unset = before.get("update.lr", [None]) == [None]
        lr = changed.pop("update.lr", [None])[0] if unset else None
    defaults = {n: value for n, value in vars(Training()).items() if n != "save_seconds"}
    differ = {n: v for n, v in training.items() if v != defaults.get(n, v)}
    columns = [f"{name}={column}" for name, column in _part(plan, "columns").items()]
    head = plan.get("head")
    return command(
        "finetune", model=plan["model"], data=plan["data"], recipe=recipe, lr=lr,
        **{n: "none" if v is None else v for n, v in differ.items()},
        columns=columns, old_data=plan.get("old_data"), new=plan.get("new"),
        head=None if head == "auto" else head, set={n: v[0] for n, v in changed.items()},
        out=f"tuned-{run.recipe}",
    )  # fmt: skip


def _part(plan: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = plan.get(name)
    return part if isinstance(part, Mapping) else {}


def _list(given: Any) -> list[Any]:
    return [*given] if isinstance(given, list | tuple) else [given]


def _flat(settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The settings of a recipe by dotted name, of all methods of the stage that have it."""
    found: dict[str, list[Any]] = {}
    for stage, given in settings.items():
        for method in _list(given):
            for name, value in method.items():
                found.setdefault(f"{stage}.{name}", []).append(encode(value))
    return found
