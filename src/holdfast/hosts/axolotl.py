"""Recipes in Axolotl, as a plugin of its YAML configuration.

    plugins: [holdfast.hosts.axolotl.HoldfastPlugin]
    holdfast:
      recipe: holdfast  # a preset, a recipe file, or a mapping of stages to methods

Axolotl loads the model and the data, and builds its own trainer, which gets the recipe as a mixin.
The saved model is the merged one. A forgetting report is written beside it.
"""

import functools
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, cast

from holdfast._torch.imports import require
from holdfast.hosts.hf import WithRecipe, has_own_update
from holdfast.recipe import DEFAULT_RECIPE, Recipe, read_recipe

_base: Any = require("axolotl.integrations.base", what="The Axolotl host")
from accelerate import PartialState  # noqa: E402
from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator  # noqa: E402
from transformers import TrainingArguments  # noqa: E402

__all__ = ["HoldfastArgs", "HoldfastPlugin", "HoldfastSettings", "ReportSettings"]

#: Learning rates of single groups, which only Axolotl's own optimizers have.
_GROUPS = ("embedding_lr", "embedding_lr_scale", "lr_groups", "loraplus_lr_ratio")


class ReportSettings(BaseModel):
    """The forgetting report; all settings are options of ``holdfast measure``.

    Attributes:
        out: the directory of the report. By default, the model's with ``-forgetting`` appended.
        text: files of running text, tested by perplexity.
        retained: rows of tasks to retain.
        target: rows of the new task.
        tasks: names of tasks of lm-evaluation-harness.
        limit: the maximum number of samples per test.
    """

    model_config = ConfigDict(extra="forbid")

    out: str | None = None
    text: list[str] = []
    retained: list[str] = []
    target: list[str] = []
    tasks: list[str] = []
    limit: PositiveInt | None = None

    def options(self) -> list[str]:
        """The tests, as ``holdfast measure`` takes them."""
        given = [f"--limit={self.limit}"] if self.limit else []
        for name in ("text", "retained", "target", "tasks"):
            given += [f"--{name}", *values] if (values := getattr(self, name)) else []
        return given


class HoldfastSettings(BaseModel):
    """The block ``holdfast:`` of an Axolotl configuration.

    Attributes:
        recipe: a preset, the name of a recipe file, or the settings of a recipe as in such a file.
        report: the settings of the forgetting report; False for no report.
    """

    model_config = ConfigDict(extra="forbid")

    recipe: str | dict[str, Any] = DEFAULT_RECIPE
    report: ReportSettings | bool = True


class HoldfastArgs(BaseModel):
    """What the plugin adds to Axolotl's configuration. Axolotl mixes it into its own model."""

    holdfast: HoldfastSettings = HoldfastSettings()

    @model_validator(mode="before")
    @classmethod
    def _leave_learning_rate_to_the_recipe(cls, given: Any) -> Any:
        """Axolotl requires a learning rate. The default of transformers counts as not set."""
        unset = next(f.default for f in fields(TrainingArguments) if f.name == "learning_rate")
        return {"learning_rate": unset, **given} if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _check(self) -> "HoldfastArgs":
        """Refuse what cannot work before the model is loaded."""
        recipe = configured_recipe(self.holdfast.recipe)
        if reason := _conflict(recipe, self):
            raise ValueError(reason)
        if self.holdfast.report:
            _check_report()
        return self


class HoldfastPlugin(_base.BasePlugin):  # type: ignore[misc]
    """The plugin: ``plugins: [holdfast.hosts.axolotl.HoldfastPlugin]``."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer: WithRecipe | None = None

    def get_input_args(self) -> str:
        return f"{__name__}.{HoldfastArgs.__name__}"

    def get_trainer_cls(self, cfg: Any) -> type[WithRecipe]:
        """Axolotl's trainer, or the one of ``trainer_cls:``, with the recipe."""
        if cfg.trainer_cls:
            helper = require("axolotl.utils.import_helper", what="The Axolotl host")
            base: Any = helper.get_cls_from_module_str(cfg.trainer_cls)
        else:
            base = require("axolotl.core.trainers", what="The Axolotl host").AxolotlTrainer
        recipe = configured_recipe(_plain(cfg.holdfast.recipe))

        class HoldfastAxolotlTrainer(_InAxolotl, base):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, recipe=recipe, **kwargs)

        return HoldfastAxolotlTrainer

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        # Axolotl keeps its plugins for later runs of the process, which may not use this one.
        self.trainer = trainer if isinstance(trainer, WithRecipe) else None

    def post_train(self, cfg: Any, model: Any) -> None:
        """Write the recipe beside the model, which Axolotl saves without its trainer."""
        if self.trainer is not None and self.trainer.args.should_save:
            self.trainer.save_recipe(cfg.output_dir)

    def post_train_unload(self, cfg: Any) -> None:
        """Measure what the saved model forgot.

        A process of its own measures it, because Axolotl has patched transformers in this one.
        """
        if self.trainer is None:
            return
        self.trainer = None  # frees the model
        settings = HoldfastSettings(**_plain(cfg.holdfast))
        if not settings.report or not PartialState().is_main_process:
            return
        report = ReportSettings() if settings.report is True else settings.report
        out = report.out or f"{cfg.output_dir.rstrip('/')}-forgetting"
        command = ["measure", cfg.base_model, cfg.output_dir, "--out", out, *report.options()]
        if cfg.trust_remote_code:
            command.append("--trust-remote-code")
        if subprocess.run([sys.executable, "-m", "holdfast", *command]).returncode:
            raise RuntimeError(
                f"the model is in {cfg.output_dir}, but its forgetting report failed. To repeat "
                f"it: {shlex.join(['holdfast', *command])}"
            )


class _InAxolotl(WithRecipe):
    """What Axolotl's trainer needs besides the recipe."""

    #: Axolotl's own trainer counts tokens and then returns the loss of transformers.
    plain_losses: ClassVar[tuple[str, ...]] = (
        *WithRecipe.plain_losses, "axolotl.core.trainers.base",
    )  # fmt: skip

    @functools.cached_property
    def _samples_per_row(self) -> float:
        """Above 1 if samples are packed into rows of the maximum length."""
        args, data = cast(Any, self.args), cast(Any, self.train_dataset)
        if not args.sample_packing or not hasattr(data, "__len__"):
            return 1.0
        samplers = require("axolotl.utils.samplers", what="The Axolotl host")
        length = float(samplers.get_dataset_lengths(data).mean())
        return max(1.0, float(args.max_seq_length * args.sample_packing_efficiency) / length)

    def _samples_per_update(self) -> int:
        return round(super()._samples_per_update() * self._samples_per_row)

    def _replace_loss(self) -> None:
        args: Any = self.args
        if args.sample_packing:
            raise ValueError(_packing_conflict(self.run.recipe))
        super()._replace_loss()


def configured_recipe(given: str | Mapping[str, Any]) -> Recipe:
    """The recipe of a configuration; every invalid one is a ValueError, which pydantic reports."""
    try:
        return read_recipe(given)[1] if isinstance(given, str) else Recipe.from_dict(given)
    except (OSError, TypeError) as error:
        raise ValueError(str(error)) from error


def _conflict(recipe: Recipe, config: Any) -> str | None:
    """Why a recipe does not work with an Axolotl configuration; None if it does."""

    def asked(name: str) -> bool:
        return bool(getattr(config, name, None))

    if others := [n for n in ("rl", "reward_model", "process_reward_model") if asked(n)]:
        return f"holdfast trains language models on texts, not with {others[0]}: remove one of them"
    if recipe.trainable.keeps_base:
        method = type(recipe.trainable).__name__
        return f"Axolotl makes the adapters: leave {method} out of the recipe, write adapter: lora"
    if has_own_update(recipe) and (groups := [name for name in _GROUPS if asked(name)]):
        update = type(recipe.update).__name__
        return f"{update} gives all parameters the same learning rate: remove {groups[0]}"
    if asked("sample_packing") and recipe.reads_data:
        return _packing_conflict(recipe)
    return None


def _packing_conflict(recipe: Recipe) -> str:
    return (
        f"the recipe {recipe.name} needs each sample on its own, which Axolotl's packing does not "
        "keep: write sample_packing: false"
    )


def _check_report() -> None:
    """The report is written after training: what it needs must be there before."""
    for package in ("cattrs", "jinja2", "rich"):
        try:
            require(package, extra="eval", what="The forgetting report")
        except ImportError as error:
            raise ValueError(f"{error}, or write report: false under holdfast:") from error


def _plain(value: Any) -> Any:
    """Axolotl's dictionaries have all keys; a plain one has only those that were given."""
    return value.to_dict() if hasattr(value, "to_dict") else value
