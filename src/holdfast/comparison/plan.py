"""A plan: recipes × seeds × settings, on one model and its data.

    Plan(model="SmolLM2-135M", data="gsm8k-train.jsonl", target="gsm8k-dev.jsonl",
         measuring=Measuring(text=("wiki.txt",)), recipes=("standard", "recadam+flow"))

A plan consists of plain values, and is written to and read from YAML. Each of its runs has an id
that is the same in every process and on every machine, so that a finished run is not repeated.
"""

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from holdfast._torch.checks import NamedSettings, hint_at_setting, natural_number, whole_number
from holdfast._torch.version import __version__
from holdfast.builtin import located_model
from holdfast.evaluate.kl import MOST_TEXTS
from holdfast.hosts.job import Training
from holdfast.io import codec as _codec
from holdfast.io.heads import check_head
from holdfast.io.outputs import local_path
from holdfast.io.render import check_columns
from holdfast.io.rows import matched, names_of
from holdfast.recipe import Recipe, read_recipe
from holdfast.registry import methods

Value = bool | int | float | str | None

#: The recipes that are compared by default, for a first look: plain fine-tuning, the default
#: recipe, a method of each further kind and a combination. Those with merging add no training.
RECIPES = ("standard", "holdfast", "spd", "lora", "wise-ft", "spd+wise-ft")

#: The recipe whose settings are tuned by default.
TUNED_RECIPE = "recadam+wise-ft"

#: Combinations that a search over all recipes tries besides single methods.
COMBINATIONS = ("recadam+flow", "recadam+flow+wise-ft", TUNED_RECIPE)


@dataclass(frozen=True)
class Measuring(NamedSettings):
    """The tests of each model, before and after fine-tuning.

    Attributes:
        text: files of running text, tested by perplexity; ``builtin`` stands for three unseen texts
            of the built-in model.
        data: files of rows: multiple choice, completions, classification.
        tasks: names of tasks of lm-evaluation-harness.
        include_path: directory with YAML files of further tasks.
        similarity: for encoders, files with two texts and a number per row; the test is the rank
            correlation of the number with the similarity of the hidden states.
        limit: maximum number of samples per test: rows of a file, samples of a task, texts that
            the base model writes, blocks of 128 tokens of a running text.
        limit_tokens: maximum number of tokens per test; images and tasks of
            lm-evaluation-harness are not limited by it.
        context_free: number of texts that the base model writes for the data-free divergence.
        max_length: maximum length of a sequence, in tokens.
        half: 0 or 1 tests one half of the data: every other row, and the first or second half of a
            text. If None, all data is tested. A search uses one half and reports on the other.
    """

    text: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    include_path: str | None = None
    similarity: tuple[str, ...] = ()
    limit: int | None = None
    limit_tokens: int | None = None
    context_free: int = 16
    max_length: int = 1024
    half: int | None = None

    def __post_init__(self) -> None:
        if self.half not in (None, 0, 1):
            raise ValueError(f"half must be 0, 1 or None, got {self.half!r}")
        for name in ("limit", "limit_tokens"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        whole_number("context_free", self.context_free, 0, MOST_TEXTS)
        whole_number("max_length", self.max_length, 2)


@dataclass(frozen=True)
class RunSpec:
    """One run of a plan.

    Attributes:
        recipe: name of the recipe: the preset, or the stem of the file.
        settings: all settings of the recipe, as :meth:`Recipe.to_dict` writes them.
        values: the values of the grid that apply to this run, by dotted name.
    """

    recipe: str
    settings: dict[str, Any]
    seed: int
    values: dict[str, Any]
    training: Training
    id: str

    @property
    def label(self) -> str:
        """The name of the recipe, and the values of the grid that apply."""
        return label_of(self.recipe, self.values)


@dataclass(frozen=True)
class Plan(NamedSettings):
    """What to compare.

    Attributes:
        model: directory or hub name of a transformers model.
        data: the training data: files of rows (JSON lines, CSV, Parquet, Arrow) or a pattern of
            such files, a directory of ``datasets.save_to_disk`` (``dir:split``), a folder with one
            subfolder of images per class, or a dataset of the hub (``name:split``,
            ``name:configuration:split``).
        target: rows to test the new task on.
        old_data: data of an old task, for recipes that train on it as well.
        columns: a column map for rows with other columns: ``{"question": "problem", "answer":
            "solution"}``. ``data`` and ``target`` must have its columns; other data that lacks
            one of them is read without the map.
        measuring: further tests, of what should be retained.
        recipes: presets (``"recadam+flow"``) or YAML files. ``standard`` is plain fine-tuning. In
            a search (``tune``), ``all`` stands for every recipe that fits the model and the data.
        seeds: each recipe is run once per seed; results are medians over seeds.
        grid: values to try, by dotted name: ``{"lr": [1e-4, 1e-3], "merging.alpha": [0.3]}``. A
            name is a stage of the recipe and its setting, or a setting of ``training``.
        options: one value per dotted name, for every recipe that has the setting:
            ``{"penalties.samples": 128}``.
        training: settings of the training loop.
        new: parts of the model without pretrained weights, such as ``"classifier"``.
        head: ``"auto"`` adds a new head if the rows have labels that the model has no head for (a
            causal language model keeps its own); ``"classification"`` and ``"regression"`` always
            add one, ``"none"`` never does.
        rates: learning rates of recipes by name, where neither ``training`` nor the recipe has one.
            :func:`holdfast.compare` fills in what is missing, by the model.
        resolved: by name, the recipes that depend on the model, as they are resolved for it;
            :func:`holdfast.compare` fills them in.
        device: device of all runs. If None, each worker process uses a GPU if there is one.
        trust_remote_code: run Python code that comes with the model.
    """

    model: str
    data: str | tuple[str, ...]
    target: str
    measuring: Measuring = field(default_factory=Measuring)
    recipes: tuple[str, ...] = RECIPES
    seeds: tuple[int, ...] = (0, 1)
    grid: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    options: dict[str, Value] = field(default_factory=dict)
    training: Training = field(default_factory=Training)
    new: tuple[str, ...] = ()
    head: str = "auto"
    old_data: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    device: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_head(self.head)
        check_columns(self.columns)
        self.training.check_validation(data=self.data, target=self.target)
        if not self.recipes or not self.seeds:
            raise ValueError("a plan needs at least one recipe and one seed")
        for seed in self.seeds:
            natural_number("seeds", seed)
        for name, given in (("recipes", self.recipes), ("seeds", self.seeds)):
            if len(set(given)) < len(given):
                raise ValueError(f"{name} contains {_twice(given)!r} twice")
        names = [read_recipe(name)[0] for name in self.recipes]
        if len(set(names)) < len(names):
            raise ValueError(f"two recipe files are named {_twice(names)!r}: rename one of them")
        used = [part for name in self.recipes for part in read_recipe(name)[1]]
        known = [(entry.stage, entry.cls) for entry in methods()]
        for asked, parts in ((self.grid, used), (self.options, known)):
            keys = {f"{stage}.{f.name}" for stage, cls in parts for f in fields(cls) if f.init}
            for key in asked:
                if key in ("load_in_4bit", "load_in_8bit", "validation"):
                    raise ValueError(
                        f"all runs share one base and one split of the data: {key} is a setting "
                        "of the training, not of the grid or of options"
                    )
                _check_setting(key, keys | vars(self.training).keys())
        _ = self.runs  # raises if a recipe or a value is invalid

    @functools.cached_property  # recipe files are read once
    def runs(self) -> list[RunSpec]:
        """All runs, seed by seed, so that the first results cover all recipes."""
        grid = [[(name, value) for value in some] for name, some in self.grid.items()]
        found: dict[str, RunSpec] = {}
        for seed, name in itertools.product(self.seeds, self.recipes):
            specs = (self.spec(name, seed, dict(chosen)) for chosen in itertools.product(*grid))
            found |= {spec.id: spec for spec in specs}
        return list(found.values())

    def spec(
        self, name: str, seed: int, values: Mapping[str, Any], recipe: Recipe | None = None
    ) -> RunSpec:
        """The run of a recipe with those of the given values that it has settings for.

        ``recipe`` replaces the one with this name.
        """
        label, named = read_recipe(name)
        recipe, training = recipe or named, self.common
        own: dict[str, Any] = {}  # of the recipe
        applied: dict[str, Any] = {}
        for key, value in {**self.options, **values}.items():
            if "." not in key:
                if key in values:
                    _check_setting(key, vars(training))
                    training = replace(training, **{key: value})
                if key == "lr" and own.get("update.lr", recipe.update.lr) is not None:
                    own["update.lr"] = value
            elif key in recipe.settings:
                own[key] = value
            else:
                continue
            if key in values:
                applied[key] = value
        settings = recipe.with_settings(own).to_dict()
        if training.lr is None and settings["update"]["lr"] is None:
            training = replace(training, lr=self.rates.get(label))
        trained = {k: v for k, v in _codec.encode(training).items() if k != "save_seconds"}
        known = [
            self.model, matched(self.data), self.old_data, self.target, self.columns, self.new,
            self.head, settings, seed, trained, _codec.encode(self.measuring), self.contents,
            self.resolved.get(label), __version__,
        ]  # fmt: skip
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
        return RunSpec(label, settings, seed, applied, training, f"{label}-{seed}-{digest}")

    @functools.cached_property
    def common(self) -> Training:
        """The settings of the training before those of the grid."""
        given: dict[str, Any] = {n: value for n, value in self.options.items() if "." not in n}
        for name in given:
            _check_setting(name, vars(self.training))
        return replace(self.training, **given)

    @functools.cached_property
    def contents(self) -> list[str | None]:
        """Digests of all local inputs: a run of changed weights or on changed data is another."""
        asked, validation = self.measuring, self.training.validation_file
        data = self.data, self.old_data, self.target, validation
        tests = *asked.data, *asked.similarity, asked.include_path
        names = [
            located_model(self.model), *_names(data), *_names(asked.text, "text"), *_names(tests)
        ]  # fmt: skip
        return [contents_of(name) for name in names]


def _names(
    given: Iterable[str | tuple[str, ...] | None], kind: Literal["data", "text"] = "data"
) -> list[str]:
    return [name for source in given if source is not None for name in names_of(source, kind)]


def label_of(recipe: str, values: Mapping[str, Any]) -> str:
    """
    >>> label_of("recadam", {"lr": 1e-4})
    'recadam lr=0.0001'
    """
    shown = {k: f"{v:g}" if isinstance(v, float) else v for k, v in values.items()}
    return " ".join([recipe, *(f"{k}={v}" for k, v in shown.items())])


def contents_of(source: str) -> str | None:
    """A digest of the content of a file, or of all files in a folder; None if it is not local."""
    path = local_path(source)
    if path is None:
        return None
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    found = hashlib.sha256()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for file, digest in zip(files, threads.map(_digest_of, files), strict=True):
            name = file.relative_to(path).as_posix() if path.is_dir() else ""
            found.update(f"{name}:{digest}\n".encode())
    return found.hexdigest()[:12]


def _digest_of(file: Path) -> str:
    about = file.stat()
    return _digest(str(file.resolve()), about.st_size, about.st_mtime_ns, about.st_ino)


@functools.lru_cache(maxsize=4096)  # many plans of one process have the same model
def _digest(path: str, *about: int) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def _check_setting(name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"no recipe has a setting {name!r}{hint_at_setting(name, known)}")


def _twice(given: Sequence[Any]) -> Any:
    return next(item for i, item in enumerate(given) if item in given[:i])
