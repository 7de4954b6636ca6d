"""The inputs of a plan: its tests, all of them or one half, and a check before the first run."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from holdfast.comparison.plan import RECIPES, Plan
from holdfast.evaluate.classify import Classification
from holdfast.evaluate.harness import Harness
from holdfast.evaluate.probes import BLOCK
from holdfast.evaluate.suite import Suite, named
from holdfast.evaluate.watch import validation_tests
from holdfast.hosts.job import encode
from holdfast.io.checkpoint import open_weights
from holdfast.io.encoding import TrainingData
from holdfast.io.heads import target_of
from holdfast.io.models import Loader
from holdfast.io.render import read_texts
from holdfast.io.rows import (
    Sources,
    is_text,
    labels_of,
    names_of,
    open_rows,
    read_text,
    share_a_file,
)
from holdfast.recipe import is_recipe_file, read_recipe

logger = logging.getLogger(__name__)

#: About how many characters a token has.
_CHARACTERS = 4


def measure_options(plan: Plan) -> dict[str, Any]:
    """The tests of a plan, as keyword arguments of :func:`holdfast.measure`."""
    asked, half = plan.measuring, plan.measuring.half
    text: Any = asked.text
    rows: dict[str, Any] = {
        "data": named(asked.data, "data"),
        "target": named(plan.target, "target"),
        "similarity": named(asked.similarity, "similarity"),
    }
    if half is not None:
        texts = {n: read_texts(p, plan.columns) for n, p in named(text, "text").items()}
        text = {name: half_of_text(whole, half) for name, whole in texts.items()}
        rows = {k: {n: _half(p, half) for n, p in some.items()} for k, some in rows.items()}
    return {
        "text": text, **rows, "tasks": asked.tasks, "include_path": asked.include_path,
        "limit": asked.limit, "limit_tokens": asked.limit_tokens,
        "context_free": asked.context_free, "columns": plan.columns,
    }  # fmt: skip


def samples_in(plan: Plan) -> float:
    """About how many samples the tests have on one half; a block of tokens is one of a text."""
    tests = measure_options(plan)
    kinds = tests["data"], tests["target"], tests["similarity"]
    rows: list[float] = [len(some) for kind in kinds for some in kind.values()]
    texts = [len(words) / (_CHARACTERS * BLOCK) for words in tests["text"].values()]
    most = plan.measuring.limit or math.inf
    free = plan.measuring.context_free
    return sum(min(most, max(1.0, count)) for count in (*rows, *texts)) + min(most, free)


def training_data(plan: Plan, loader: Loader | None = None) -> TrainingData:
    """Open the model's data; by default, the model is loaded as the plan trains it."""
    own = plan.common.loader(plan.device, trust_remote_code=plan.trust_remote_code)
    return TrainingData.open(
        plan.model, plan.data, loader or own, head=plan.head, new=plan.new, columns=plan.columns,
        validation=plan.common.validation,
    )  # fmt: skip


def paths_of(plan: Plan) -> list[str]:
    """All files and directories that a plan reads; names of the hub are among them."""
    tests = plan.measuring
    given = filter(None, [plan.old_data, plan.common.validation_file])
    data = [plan.data, plan.target, *given, *tests.data, *tests.similarity]
    rows = [name for source in data for name in names_of(source)]
    rows += [name for source in tests.text for name in names_of(source, "text")]
    recipes = filter(is_recipe_file, plan.recipes)
    return [plan.model, *rows, *filter(None, [tests.include_path]), *recipes]


def warn_of_known_target(data: Sources, target: str) -> None:
    """Warn if models that are trained on some data are tested on them.

    >>> warn_of_known_target(["a.jsonl", "b.jsonl"], "dev.jsonl")  # no file of the data: no warning
    """
    if share_a_file(data, target):
        logger.warning(
            f"the target {target} is training data: its score shows what a model has "
            "memorized, not what it has learned; give other rows of the task as the target"
        )


def check_inputs(plan: Plan, asked: Sequence[str] | None = None) -> Sequence[Any]:
    """Read all data and the model's configuration, but not its weights; return the samples.

    Raise the ValueError or OSError that would otherwise end every run. ``asked`` are the recipes
    that must fit; by default those of the plan.
    """
    if (Path(plan.model) / "adapter_config.json").is_file():
        raise ValueError(
            f"{plan.model} is an adapter, but training needs a full model: merge it first, with "
            f"holdfast merge BASE {plan.model} --alpha 1 --out DIR"
        )
    training = training_data(plan)
    loader = training.loader
    # Of the default recipes, those that do not fit the model fail by themselves.
    if asked is None:
        asked = () if plan.recipes == RECIPES and loader.bits is None else plan.recipes
    recipes = [read_recipe(name)[1] for name in asked]
    samples, _ = encode(training, recipes, plan.common, plan.old_data)
    where, _ = loader.location(plan.model)
    if Path(where).is_dir():
        open_weights(plan.model)
    Suite(**validation_tests(training.validation)).build()
    probes, _ = Suite(**measure_options(plan)).build()
    for probe in probes:
        if isinstance(probe, Harness):
            probe.check_tasks()
        elif training.head is not None and isinstance(probe, Classification):
            config = SimpleNamespace(**training.head.settings())
            for label in labels_of(probe.data, probe.name) or ():
                target_of(config, label, probe.name)  # raises if the new head lacks the class
    return samples


def _half(source: str, half: int) -> Sequence[Any]:
    if is_text(Path(source)) and Path(source).is_file():
        return [{"text": half_of_text(read_text(Path(source)), half)}]
    rows = open_rows(source)
    if len(rows) < 2:
        raise ValueError(f"{source} has {len(rows)} row, but two halves need at least two")
    return rows[half::2]


def half_of_text(text: str, half: int) -> str:
    """The first or the second half of a text, split at the end of a line if possible.

    >>> half_of_text("to be\\nor not\\nto be", 0), half_of_text("to be\\nor not\\nto be", 1)
    ('to be\\n', 'or not\\nto be')
    """
    middle = text.rfind("\n", 0, len(text) // 2) + 1 or len(text) // 2
    return text[middle:] if half else text[:middle]
