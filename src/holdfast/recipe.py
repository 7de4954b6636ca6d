"""Recipe: one method per stage, so that methods compose.

>>> from holdfast import Flow, Recipe, RecAdamUpdate, WiseFT
>>> recipe = Recipe(objective=Flow(), update=RecAdamUpdate(), merging=WiseFT(alpha=0.8))
>>> Recipe.from_dict(recipe.to_dict()) == recipe
True
>>> print(Recipe.preset("recadam+flow").name)
flow+recadam
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from reprlib import repr as short  # aliases in YAML can make a value huge
from typing import Any

from torch import nn

from holdfast import registry
from holdfast._torch.adapters import has_adapters, without_peft
from holdfast._torch.checks import NamedSettings, did_you_mean
from holdfast._torch.imports import require
from holdfast.anneal import Anneal
from holdfast.io.untrusted import parse_yaml
from holdfast.losses import LossFunction, Task
from holdfast.methods.adamw import AdamWUpdate
from holdfast.methods.identity import Full, Keep, NoRecall, Pretrained, Uniform
from holdfast.registry import STAGES, Stage, entry_of
from holdfast.stages import Merging, Method, Objective, Penalty, Recall, Start, Trainable, Update


@dataclass(frozen=True)
class Recipe(NamedSettings):
    """The method of each stage. The defaults are plain fine-tuning.

    Args:
        trainable: stage 1, what may change.
        start: stage 1, from where.
        objective: stage 2, how the new samples count.
        recall: stage 2, which old knowledge the loss preserves.
        update: stage 3, how the weights move.
        penalties: stage 3, any number of them; they add up.
        merging: stage 4, what is kept.

    Methods that cannot be combined raise a ValueError with the reason.
    """

    trainable: Trainable = Full()  # noqa: RUF009 (frozen)
    start: Start = Pretrained()  # noqa: RUF009
    objective: Objective = Uniform()  # noqa: RUF009
    recall: Recall = NoRecall()  # noqa: RUF009
    update: Update = AdamWUpdate()  # noqa: RUF009
    penalties: Sequence[Penalty] = ()
    merging: Merging = Keep()  # noqa: RUF009

    def __post_init__(self) -> None:
        given = self.penalties
        alone = isinstance(given, Penalty | str | type)
        object.__setattr__(self, "penalties", (given,) if alone else tuple(given))
        for stage, method in self:
            if not isinstance(method, STAGES[stage]):
                raise TypeError(_wrong_kind(stage, method))
        twice = [type(p).__name__ for p in self.penalties]
        if len(set(twice)) < len(twice):
            raise ValueError(
                f"penalties must differ, got {', '.join(twice)}: add their strengths instead"
            )
        for _, method in self:
            if reason := method.conflict(self):
                raise ValueError(reason)

    def __iter__(self) -> Iterator[tuple[Stage, Method]]:
        """Stage and method, in the order of the stages."""
        for stage in STAGES:
            chosen = getattr(self, stage)
            yield from ((stage, m) for m in (chosen if stage == "penalties" else (chosen,)))

    @property
    def needs_reference(self) -> bool:
        """Whether a method uses the pretrained weights after training has started."""
        return any(method.needs_reference for _, method in self)

    @property
    def reads_data(self) -> bool:
        """Whether a method reads the training data before training."""
        return any(method.reads_data for _, method in self)

    def fitting_head(self, new: Sequence[str]) -> Recipe:
        """Return the recipe that fits a new head first, if a method needs its predictions.

        A recipe with a method of its own in the stage trainable stays as it is.
        """
        plain = type(Recipe().trainable)
        if not new or not self._needing_a_fitted_head() or type(self.trainable) is not plain:
            return self
        cls: Any = registry.find(preset_that("fits_head")).cls
        known = {field.name for field in dataclasses.fields(cls)}
        kept = {name: x for name, x in settings_of(self.trainable).items() if name in known}
        return dataclasses.replace(self, trainable=cls(**kept))

    def check_head(self, new: Sequence[str]) -> None:
        """Raise ValueError if a method needs predictions of a new part that cannot be fitted first.

        Args:
            new: the names of the model's new parts, such as ``("classifier",)``.
        """
        asking = self._needing_a_fitted_head()
        if not new or not asking or self.fitting_head(new).trainable.fits_head:
            return
        raise ValueError(
            f"{', '.join(asking)} uses the pretrained model's predictions on the data, but "
            f"{', '.join(new)} is new and predicts at random. Train it alone first, with the "
            f"preset {preset_that('trains_only_head')}, and start from the trained model without "
            "new= (on the command line: give the --out of the first training as --model)"
        )

    def _needing_a_fitted_head(self) -> list[str]:
        return [type(method).__name__ for _, method in self if method.needs_fitted_head]

    def check_model(self, model: nn.Module, has_old_data: bool) -> None:
        """Raise ValueError if a method cannot be used with a model, judged by its structure."""
        if getattr(without_peft(model), "is_quantized", False) and not (
            self.trainable.keeps_base or has_adapters(model)
        ):
            raise ValueError(
                f"the weights of a quantized model cannot be trained, but the recipe {self.name} "
                f"trains them: add {preset_that('keeps_base')}, which trains adapters"
            )
        for _, method in self:
            if reason := method.unfit(model, has_old_data):
                raise ValueError(reason)

    def check_task(self, task: Task | LossFunction) -> None:
        """Raise ValueError if a method cannot be used for a task."""
        for _, method in self:
            if reason := method.unfit_task(task):
                raise ValueError(reason)

    @property
    def name(self) -> str:
        """The names of all methods that are not the defaults, joined by "+"; else "standard".

        It is a preset. Settings that the preset does not change are not part of the name:
        ``LoRA(dora=True, r=8)`` is ``"dora"``.
        """
        plain = [type(method) for _, method in Recipe()]
        methods = [method for _, method in self if type(method) not in plain]
        names = []
        for preset, wanted in registry.PRESETS.items():
            found = [m for m in methods if any(_is_like(m, one) for one in wanted)]
            if wanted and len(found) == len(wanted):
                names.append(preset)
                methods = [m for m in methods if m not in found]
        return "+".join([*names, *(entry_of(m).name for m in methods)]) or "standard"

    def _repr_html_(self) -> str:
        """The stages, as notebooks show them."""
        cells = (line.partition(" ")[::2] for line in self.describe().splitlines())
        left = ' style="text-align:left"'  # notebooks put all cells on the right
        rows = (
            f"<tr><th{left}>{escape(stage)}</th><td{left}>{escape(method.strip())}</td></tr>"
            for stage, method in cells
        )
        return f"<table>{''.join(rows)}</table>"

    def describe(self) -> str:
        """One line per stage: the method, its settings and its summary."""
        lines = []
        for stage, method in self:
            entry = entry_of(method)
            given = [f"{name}={x!r}" for name, x in settings_of(method).items() if x is not None]
            settings = f"({', '.join(given)})" if given else ""
            lines.append(f"{stage:<10} {entry.name}{settings}: {entry.summary}")
        return "\n".join(lines)

    @classmethod
    def preset(cls, names: str) -> Recipe:
        """Build a recipe from the names of methods, each with its default settings.

        Args:
            names: joined by "+", such as ``"recadam+flow+wise-ft"``. ``"standard"`` is plain
                fine-tuning, ``"holdfast"`` is ``"auto"``. :func:`holdfast.registry.methods` lists
                the names, and ``holdfast.registry.PRESETS`` the presets with settings.
        """
        if not isinstance(names, str):
            raise TypeError(f'names must be a string such as "recadam+flow", got {names!r}')
        slots: dict[str, Any] = {}
        for method in methods_of(names):
            entry = entry_of(method)
            if entry.stage == "penalties":
                slots["penalties"] = (*slots.get("penalties", ()), method)
            elif entry.stage in slots:
                other = entry_of(slots[entry.stage]).name
                raise ValueError(
                    f"{other} and {entry.name} both belong to the stage {entry.stage}, and a "
                    "recipe has one method per stage: leave out one of them"
                )
            else:
                slots[entry.stage] = method
        return cls(**slots)

    @property
    def settings(self) -> list[str]:
        """The dotted names of all settings: ``"update.lr"``, ``"merging.alpha"``, …"""
        return [f"{stage}.{name}" for stage, method in self for name in settings_of(method)]

    def with_settings(self, values: Mapping[str, Any]) -> Recipe:
        """Return the recipe with other values of settings, by dotted name.

        A name such as ``penalties.strength`` applies to every penalty that has the setting.

        >>> Recipe.preset("wise-ft").with_settings({"merging.alpha": 0.3}).merging.alpha
        0.3
        """
        saved = self.to_dict()
        for name, value in values.items():
            if name not in self.settings:
                hint = did_you_mean(name, self.settings)
                raise ValueError(f"the recipe {self.name} has no setting {name!r}{hint}")
            stage, _, option = name.partition(".")
            for one in saved[stage] if stage == "penalties" else [saved[stage]]:
                if option in one:  # a word may be "true", which the command line reads as a flag
                    is_word = isinstance(one[option], str) and isinstance(value, bool)
                    one[option] = str(value).lower() if is_word else value
        return Recipe.from_dict(saved)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: the name and all settings of each method."""
        saved: dict[str, Any] = {"penalties": []}
        for stage, method in self:
            one: dict[str, Any] = {"name": entry_of(method).name}
            for name, value in settings_of(method).items():
                plain = value.to_dict() if isinstance(value, Anneal) else value
                one[name] = copy.deepcopy(plain)  # presets share their methods
            saved[stage] = [*saved[stage], one] if stage == "penalties" else one
        return {stage: saved[stage] for stage in STAGES}

    @classmethod
    def from_dict(cls, saved: Mapping[Any, Any]) -> Recipe:
        """Build a recipe from :meth:`to_dict`'s values. Missing stages and settings get defaults.

        A method may be given by name: ``{"update": "recadam", "merging": {"name": "wise-ft"}}``.
        """
        if not isinstance(saved, Mapping):
            raise TypeError(f"a recipe must be a mapping of stages to methods, got {short(saved)}")
        for stage in saved:
            if stage not in STAGES:
                raise ValueError(
                    f"a recipe has no stage {stage!r}{did_you_mean(str(stage), STAGES)}"
                )
        slots: dict[str, Any] = {}
        for stage, given in saved.items():
            if stage == "penalties" and isinstance(given, list | tuple):
                slots[stage] = tuple(_method(stage, one) for one in given)
            else:
                slots[stage] = _method(stage, given)
        return cls(**slots)

    def to_yaml(self) -> str:
        """Return the recipe as YAML."""
        text: str = _yaml().safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        return text

    @classmethod
    def from_yaml(cls, text: str) -> Recipe:
        """Build a recipe from YAML text (not from a file name)."""
        if not isinstance(text, str):
            raise TypeError(f"text must be YAML text, such as path.read_text(), got {text!r}")
        saved = parse_yaml(text, "the recipe")
        if isinstance(saved, str) and saved.endswith((".yaml", ".yml")):
            raise ValueError(
                f"{saved} looks like a file name: pass its text, Path({saved!r}).read_text()"
            )
        return cls.from_dict({} if saved is None else saved)


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """In what two recipes differ, as :meth:`Recipe.to_dict` writes them.

    >>> changed = Recipe(update=AdamWUpdate(lr=0.1), trainable=registry.find("hft").cls())
    >>> difference(Recipe().to_dict(), changed.to_dict())
    'trainable is full and hft; update.lr is None and 0.1'
    """
    found = []
    for stage, given in other.items():
        mine, theirs = (m if isinstance(m, list) else [m] for m in (one.get(stage, []), given))
        names = [", ".join(m["name"] for m in methods) or "none" for methods in (mine, theirs)]
        if names[0] != names[1]:
            found.append(f"{stage} is {names[0]} and {names[1]}")
            continue
        for a, b in zip(mine, theirs, strict=True):
            found += [f"{stage}.{k} is {a.get(k)} and {v}" for k, v in b.items() if a.get(k) != v]
    return "; ".join(found)


def changed_settings(method: Method) -> dict[str, Any]:
    """The settings of a method that differ from its defaults.

    >>> changed_settings(AdamWUpdate(lr=0.1))
    {'lr': 0.1}
    """
    default = settings_of(type(method)())
    return {name: x for name, x in settings_of(method).items() if x != default[name]}


def preset_words(name: str) -> str:
    """The methods of a preset and their settings.

    >>> preset_words("asft")
    'dft + distill(strength=0.05, temperature=1.0)'
    """
    words = []
    for method in registry.PRESETS[name]:
        changed = ", ".join(f"{name}={x!r}" for name, x in changed_settings(method).items())
        words.append(entry_of(method).name + (f"({changed})" if changed else ""))
    return " + ".join(words) or "plain fine-tuning"


def preset_that(flag: str) -> str:
    """The name of the first method of stage 1 that has a flag set."""
    return next(e.name for e in registry.methods("trainable") if getattr(e.cls, flag))


def as_recipe(recipe: Recipe | str) -> Recipe:
    """Return a recipe as it is, or build the preset with this name."""
    if isinstance(recipe, str):
        return Recipe.preset(recipe)
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f'recipe must be a Recipe or a preset name such as "recadam+flow", got {recipe!r}'
        )
    return recipe


def read_recipe(name: str) -> tuple[str, Recipe]:
    """Read a preset name or a YAML file; also return the name of the recipe.

    >>> read_recipe("recadam+flow")[0]
    'recadam+flow'
    """
    if not is_recipe_file(name):
        return name, Recipe.preset(name)
    path = Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"no such recipe file: {name}")
    try:
        return path.stem, Recipe.from_yaml(path.read_text(encoding="utf-8"))
    except (TypeError, ValueError) as error:  # invalid UTF-8 is a ValueError too
        raise ValueError(f"{name}: {error}") from error


def is_recipe_file(name: str) -> bool:
    """Whether a recipe is a YAML file, not a preset."""
    return name.endswith((".yaml", ".yml"))


#: The recipe of ``holdfast finetune``.
DEFAULT_RECIPE = "holdfast"
#: The file beside a trained model that holds its recipe.
FILE = "holdfast_recipe.yaml"


def recipe_beside(model: object) -> Recipe | None:
    """The recipe that a model in a directory was trained with; None if it is not known."""
    if not isinstance(model, str | os.PathLike):
        return None
    try:
        return Recipe.from_yaml((Path(model) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):  # none, or one of unknown methods
        return None


def settings_of(method: Method) -> dict[str, Any]:
    """The settings of a method by name.

    >>> settings_of(AdamWUpdate(lr=0.1))["lr"]
    0.1
    """
    return {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.init}


def methods_of(names: str) -> list[Method]:
    """The methods that names joined by "+" stand for.

    >>> [type(method).__name__ for method in methods_of("asft+wise-ft")]
    ['DFT', 'Distill', 'WiseFT']
    """
    found: list[Method] = []
    for name in names.split("+"):
        known = registry.PRESETS.get(name.strip().lower())
        try:
            found += [registry.find(name).cls()] if known is None else known
        except ValueError as error:
            if name == names:
                raise
            raise ValueError(f"{error} (in the preset {names!r})") from None
    return found


def _is_like(method: Method, preset: Method) -> bool:
    """Whether a method has the settings that a preset changes."""
    changed = changed_settings(preset)
    return type(method) is type(preset) and all(getattr(method, n) == x for n, x in changed.items())


def _wrong_kind(stage: Stage, given: Any) -> str:
    wanted = ", ".join(e.cls.__name__ for e in registry.methods(stage))
    hint = ""
    if isinstance(given, type) and issubclass(given, Method):
        hint = f"; write {given.__name__}()"
    elif isinstance(given, Method):
        hint = f"; pass {type(given).__name__} as {entry_of(given).stage}="
    elif isinstance(given, type) and f"{given.__name__}Update" in wanted:
        hint = f"; in a recipe use {given.__name__}Update()"
    elif isinstance(given, str):
        hint = "; build a recipe from names with Recipe.preset(...)"
    return f"{stage} must be one of {wanted}, got {given!r}{hint}"


def _method(stage: Stage, given: Any) -> Method:
    """Build a method from its name, or from a mapping of its name and settings."""
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ValueError(f"{stage} must be a name or a mapping with a name, got {short(given)}")
    settings = {str(n): v for n, v in given.items() if n != "name"}
    entry = registry.find(given["name"], stage)
    try:
        return entry.cls(**{name: _setting(value) for name, value in settings.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{stage} {entry.name}: {error}") from error


def _setting(value: Any) -> Any:
    if isinstance(value, Mapping) and value.get("name") in Anneal._known:
        return Anneal.from_dict({str(name): x for name, x in value.items()})
    if isinstance(value, Mapping):
        return {str(name): _setting(x) for name, x in value.items()}
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)  # YAML reads 2e-5, without a dot, as text
    return value


def _yaml() -> Any:
    return require("yaml", extra="hf", what="a recipe as YAML")
