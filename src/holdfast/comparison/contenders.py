"""What a search chooses from: recipes that fit the model and the data, and the settings of each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast._torch.checks import did_you_mean
from holdfast._torch.layers import head_of
from holdfast.comparison.inputs import training_data
from holdfast.comparison.plan import COMBINATIONS, Plan
from holdfast.hosts.job import check_fit, resolved_quietly
from holdfast.recipe import Recipe, read_recipe
from holdfast.registry import PRESETS, methods
from holdfast.report.recommend import STANDARD
from holdfast.stages import MedianLoss, SearchRange, SearchSpace

#: Stands for every recipe that fits.
ALL = "all"
#: The parameter of a study that names the recipe, if there are several.
RECIPE = "recipe"


@dataclass(frozen=True)
class Contender:
    """A recipe of a search.

    Attributes:
        name: as it was given: a preset or a YAML file.
        recipe: with the methods that were chosen for the model.
        space: the settings to search, by dotted name.
        alone: whether it is the only recipe of the search.
    """

    name: str
    recipe: Recipe
    space: SearchSpace
    alone: bool = True

    @property
    def label(self) -> str:
        """Its name in results: a file by its stem."""
        return label_of(self.name)

    @property
    def is_standard(self) -> bool:
        """Whether it is standard fine-tuning, which the others are compared with."""
        return self.label == STANDARD

    @property
    def defaults(self) -> dict[str, Any]:
        """The parameters of the trial with the default settings."""
        named = {} if self.alone else {RECIPE: self.name}
        return named | {self.parameter(name): range_.default for name, range_ in self.space.items()}

    @property
    def swept(self) -> str | None:
        """The dotted name of the setting that can vary after training, or None."""
        return swept_setting(self.recipe)

    def parameter(self, setting: str) -> str:
        """The name of a setting in the study: settings of several recipes are told apart."""
        return setting if self.alone else f"{self.name}:{setting}"

    def draw(self, trial: Any) -> dict[str, float]:
        """Let a trial of the study choose a value for each setting."""
        return {n: suggest(range_, trial, self.parameter(n)) for n, range_ in self.space.items()}

    def values_of(self, parameters: Mapping[str, Any]) -> dict[str, float]:
        """The values of the settings in the parameters of a trial."""
        begin = self.parameter("")
        return {n.removeprefix(begin): v for n, v in parameters.items() if n.startswith(begin)}


def label_of(name: str) -> str:
    """The name of a recipe in results: a file by its stem."""
    return read_recipe(name)[0]


def every_recipe() -> list[str]:
    """Presets, each method that stands alone, and good combinations.

    >>> every_recipe()[:2]
    ['standard', 'holdfast']
    """
    alone = [entry.name for entry in methods() if entry.cls.stands_alone]
    return list(dict.fromkeys([*PRESETS, *alone, *COMBINATIONS]))


def fitting(plan: Plan, asked: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The recipes of a search, and of ``all`` those that do not fit, with the reason.

    Recipes that the user named are kept as they are. Recipes that train the model in the same way,
    with everything resolved that depends on it, count once. The model is built without its weights.
    """
    if ALL not in asked:
        return tuple(asked), {}
    named = [name for name in asked if name != ALL]
    data = training_data(plan)
    model = data.loader.skeleton(data.source, data.head)
    new = data.given or ((head_of(model) or "the head",) if data.head else ())
    fits = {name: resolved_quietly(read_recipe(name)[1], model, new)[0] for name in named}
    unfit: dict[str, str] = {}
    for name in every_recipe():
        try:
            recipe = Recipe.preset(name)
            check_fit(recipe, model, data, plan.common, has_old_data=plan.old_data is not None)
            trained = resolved_quietly(recipe, model, new)[0]
        except ValueError as error:
            unfit[name] = str(error)
            continue
        if trained not in fits.values():
            fits[name] = trained
    if not fits:
        raise ValueError(f"no recipe fits the model and the data; {next(iter(unfit.values()))}")
    _check_labels(fits)
    return tuple(fits), unfit


def _check_labels(names: Iterable[str]) -> None:
    """Raise ValueError if two recipes have one name in the results."""
    known: dict[str, str] = {}
    for name in names:
        if (other := known.setdefault(label_of(name), name)) != name:
            raise ValueError(
                f"{other} and {name} have the same name in the results: rename the recipe file"
            )


def contenders_of(
    recipes: Mapping[str, tuple[Recipe, float]],
    median_loss: MedianLoss,
    given: Mapping[str, Sequence[float]],
) -> dict[str, Contender]:
    """The recipes of a search by name, each with its learning rate.

    ``given`` are ranges to search instead of the defaults, in every recipe that has the setting.
    """
    known: set[str] = set()
    found = {}
    for name, (recipe, lr) in recipes.items():
        own = {"lr", *_settings(recipe, lr, median_loss)}
        known |= own
        ours = {n: ends for n, ends in given.items() if n in own or len(recipes) == 1}
        space = space_of(recipe, lr, median_loss, ours)
        found[name] = Contender(name, recipe, space, alone=len(recipes) == 1)
    for name in given:
        if name not in known:
            raise ValueError(
                f"no recipe has a setting {name!r} to search{did_you_mean(name, known)}"
            )
    return found


def space_of(
    recipe: Recipe, lr: float, median_loss: MedianLoss, given: Mapping[str, Sequence[float]]
) -> SearchSpace:
    """The settings to search and their ranges, by dotted name; ``given`` replaces ranges.

    The ranges of the methods reach from hardly any change of the model to hardly any protection.
    The default settings are a point of the space, and the first one that is tried.
    """
    space = {"lr": SearchRange(lr / 10, lr * 3, lr), **_settings(recipe, lr, median_loss)}
    for name, ends in given.items():
        if name not in space:
            raise ValueError(
                f"{recipe.name} has no setting {name!r} to search{did_you_mean(name, list(space))}"
            )
        if len(ends) != 2:
            raise ValueError(f"{name} needs two ends, such as [0.01, 0.5], got {list(ends)}")
        old = space[name]
        default = type(old.default)(min(max(old.default, ends[0]), ends[1]))
        space[name] = replace(old, low=ends[0], high=ends[1], default=default)
    return space


def _settings(recipe: Recipe, lr: float, median_loss: MedianLoss) -> SearchSpace:
    """The ranges of the recipe's methods."""
    space = {}
    for stage, method in recipe:
        for name, range_ in method.search_space(lr, median_loss).items():
            value = getattr(method, name)
            default = range_.default if value is None or isinstance(value, str) else value
            space[f"{stage}.{name}"] = replace(
                range_, low=min(range_.low, default or range_.low), default=default,
                high=max(range_.high, default),
            )  # fmt: skip
    return space


def suggest(range_: SearchRange, trial: Any, name: str) -> float:
    if isinstance(range_.default, int):
        return int(trial.suggest_int(name, int(range_.low), int(range_.high), log=range_.log))
    return float(trial.suggest_float(name, range_.low, range_.high, log=range_.log))


def swept_setting(recipe: Recipe) -> str | None:
    """The dotted name of the setting that can vary after training, or None.

    >>> swept_setting(Recipe.preset("wise-ft"))
    'merging.alpha'
    """
    return None if recipe.merging.swept is None else f"merging.{recipe.merging.swept}"
