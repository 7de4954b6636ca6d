"""A plan: recipes × seeds × settings, on one model and its data. What is run, not how.

    Plan(model="SmolLM2-135M", data="gsm8k-train.jsonl", target="gsm8k-dev.jsonl",
         measuring=Measuring(text=("wiki.txt",)), recipes=("standard", "recadam+flow"))

A plan is plain values, goes to YAML and back, and says for each of its runs who it is: the same run
has the same id in every process and on every machine: one that is finished is not done again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from holdfast._torch.checks import whole
from holdfast.comparison.contents import contents_of
from holdfast.hosts.job import Training
from holdfast.io import codec as _codec
from holdfast.io.heads import check_head
from holdfast.recipe import Recipe, read_recipe
from holdfast.registry import find, methods

__all__ = ["Measuring", "Plan", "RunSpec", "Training"]

Value = bool | int | float | str

#: What is tried where nobody says: each method with its defaults, and what goes well together.
RECIPES = (
    "standard", "recadam", "flow", "recadam+flow", "l2-sp", "ewc", "mofo", "hft", "lora", "wise-ft",
    "recadam+flow+wise-ft", "sfa",
)  # fmt: skip


@dataclass(frozen=True)
class Measuring:
    """What each model is tested on, before and after.

    Attributes:
        text: files of running text: their perplexity.
        data: files of rows: multiple choice, completions, classification.
        tasks: of lm-evaluation-harness, by name.
        include_path: where YAML files of further tasks lie.
        similarity: files of two texts and a number a row, for encoders: how well the nearness of
            their hidden states agrees.
        limit: rows of each file and samples of each task at most.
        context_free: texts that the base writes for the data-free divergence.
        max_length: of a sequence, in tokens.
        half: 0 or 1 tests only every other row, from the first or the second on, and of a text its
            first or second half; None tests all. Settings are chosen on one half, and reported on
            the other.
    """

    text: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    include_path: str | None = None
    similarity: tuple[str, ...] = ()
    limit: int | None = None
    context_free: int = 16
    max_length: int = 1024
    half: int | None = None

    def __post_init__(self) -> None:
        if self.half not in (None, 0, 1):
            raise ValueError(f"half must be 0, 1 or None for all, got {self.half!r}")
        if self.limit is not None:
            whole("limit", self.limit, 1)
        whole("context_free", self.context_free, 0), whole("max_length", self.max_length, 2)


@dataclass(frozen=True)
class RunSpec:
    """One run of a plan.

    Attributes:
        recipe: its name: the preset's, or the file's.
        method: the recipe itself, as :meth:`Recipe.to_dict` writes it.
        seed: of the order of the data and of all that is drawn.
        values: the settings in which it differs from the plan, by dotted name.
        training: how it is trained.
        id: a name that no other run has.
    """

    recipe: str
    method: dict[str, Any]
    seed: int
    values: dict[str, Any]
    training: Training
    id: str


@dataclass(frozen=True)
class Plan:
    """What to compare.

    Attributes:
        model: a directory or hub name of a transformers model.
        data: the training data: a file of rows (JSON lines, CSV, Parquet), a directory of
            ``datasets.save_to_disk`` (``dir:split``), a folder of images in a folder for each
            class, or a dataset of the hub (``name:split``, ``name:configuration:split``).
        target: rows to test the new task on.
        measuring: what else to test, which should be retained.
        recipes: presets (``"recadam+flow"``) or YAML files of recipes. ``standard`` is plain
            fine-tuning.
        seeds: each recipe is run once a seed; figures are medians over them.
        grid: settings to try, by dotted name: ``{"lr": [1e-4, 1e-3], "merging.alpha": [0.3]}``.
            The first part names a stage of the recipe, or it is one of training.
        options: settings by dotted name, one value each, for every recipe that has them:
            ``{"penalties.samples": 128}``.
        training: how each model is trained.
        new: parts of the model without pretrained weights, such as ``"classifier"``.
        head: ``"auto"`` gives a model a new head where the rows have labels that it has no head
            for (a causal language model keeps its own); ``"classification"`` and ``"regression"``
            give it one in any case, ``"none"`` in none.
    """

    model: str
    data: str
    target: str
    measuring: Measuring = field(default_factory=Measuring)
    recipes: tuple[str, ...] = RECIPES
    seeds: tuple[int, ...] = (0, 1)
    grid: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    options: dict[str, Value] = field(default_factory=dict)
    training: Training = field(default_factory=Training)
    new: tuple[str, ...] = ()
    head: str = "auto"

    def __post_init__(self) -> None:
        check_head(self.head)
        if not self.recipes or not self.seeds:
            raise ValueError("a plan needs at least one recipe and one seed")
        for name, given in (("recipes", self.recipes), ("seeds", self.seeds)):
            if len(set(given)) < len(given):
                raise ValueError(f"{name} holds {_twice(given)!r} twice")
        names = [read_recipe(name)[0] for name in self.recipes]
        if len(set(names)) < len(names):
            raise ValueError(
                f"two recipes are called {_twice(names)!r}, as their files are: rename one"
            )
        list(self.runs())  # whatever is wrong with a recipe or a value is said now
        used = {n for r in self.recipes for n in settings_of(r)}
        for key in self.grid:
            if key not in used | vars(self.training).keys():
                raise ValueError(_unknown(key, sorted(used | vars(self.training).keys())))
        known = {f"{e.stage}.{f.name}" for e in methods() for f in fields(e.cls)}
        for key in self.options:
            if key not in known | vars(self.training).keys():
                raise ValueError(_unknown(key, sorted(known | vars(self.training).keys())))

    def runs(self) -> Iterator[RunSpec]:
        """Every run, the seeds outermost: the first results are of all recipes."""
        grid = [[(name, value) for value in some] for name, some in self.grid.items()]
        for seed in self.seeds:
            for name in self.recipes:
                seen = set()
                for chosen in itertools.product(*grid):
                    spec = self.spec(name, seed, dict(chosen))
                    if spec.id not in seen:
                        seen.add(spec.id)
                        yield spec

    def spec(self, name: str, seed: int, values: Mapping[str, Any]) -> RunSpec:
        """The run of a recipe with these values of the grid, as far as it has them."""
        label, recipe = read_recipe(name)
        method, training, applied = recipe.to_dict(), self.training, {}
        for key, value in {**self.options, **values}.items():
            stage, _, option = key.partition(".")
            if not option:
                if not hasattr(training, key):
                    raise ValueError(_unknown(key, sorted(vars(training))))
                training = replace(training, **{key: value})
                if key == "lr" and method["update"].get("lr") is not None:  # it has its own
                    method = {**method, "update": {**method["update"], "lr": value}}
            elif (changed := _with_option(method, stage, option, value)) is not None:
                method = changed
            else:
                continue
            if key in values:
                applied[key] = value
        method = Recipe.from_dict(method).to_dict()
        saving = {"save_seconds"}  # what does not change the result
        known = [
            self.model, self.data, self.target, self.new, self.head, method, seed,
            {k: v for k, v in _codec.encode(training).items() if k not in saving},
            _codec.encode(self.measuring), self._contents(),
        ]  # fmt: skip
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
        return RunSpec(label, method, seed, applied, training, f"{label}-{seed}-{digest}")

    def _contents(self) -> list[str | None]:
        """Of everything that lies on this machine: other data make another run."""
        if "_held" not in self.__dict__:  # once a plan
            asked = self.measuring
            tests = (*asked.text, *asked.data, *asked.similarity)
            sources = (self.model, self.data, self.target, *tests)
            self.__dict__["_held"] = [contents_of(source) for source in sources]
        held: list[str | None] = self.__dict__["_held"]
        return held


def settings_of(name: str) -> Iterator[str]:
    """The settings of a recipe by their dotted names, such as ``update.pull``."""
    for stage, parts in read_recipe(name)[1].to_dict().items():
        for row in parts if isinstance(parts, list) else [parts]:
            yield from (f"{stage}.{option}" for option in row if option != "name")


def _with_option(
    method: Mapping[str, Any], stage: str, option: str, value: Any
) -> dict[str, Any] | None:
    """A recipe with another value of an option; None if its method of that stage has no such."""
    parts = method.get(stage, ())
    rows = parts if isinstance(parts, list) else [parts]
    has = [any(f.init and f.name == option for f in fields(find(r["name"]).cls)) for r in rows]
    if not any(has):
        return None
    changed = [{**r, option: value} if h else r for r, h in zip(rows, has, strict=True)]
    return {**method, stage: changed if isinstance(parts, list) else changed[0]}


def _unknown(name: str, known: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f": it is one of {', '.join(known)}"
    return f"no recipe has a setting {name!r}{hint}"


def _twice(given: Sequence[Any]) -> Any:
    return next(item for i, item in enumerate(given) if item in given[:i])
