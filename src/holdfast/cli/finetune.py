"""Fine-tune a model with one recipe.

examples:
  holdfast finetune --model builtin --data builtin --out tuned        a small model, offline
  holdfast finetune --model DIR --data train.jsonl --out tuned
  holdfast finetune --model DIR --data train.jsonl --recipe recadam+flow --lr 1e-4 --out tuned
  holdfast finetune --model DIR --data train.jsonl --text wiki.txt --report-to mlflow --out tuned
  holdfast finetune --config tuned/config.yaml           continues a stopped run
  torchrun --nproc_per_node 2 -m holdfast finetune ...   trains in two processes

--data takes files of rows (JSON lines, JSON, CSV, TSV, Parquet, Arrow) or text, a directory written
by datasets.save_to_disk (DIR:SPLIT), a folder of images with one folder per class, or a hub dataset
(NAME, NAME:SPLIT, NAME:CONFIGURATION:SPLIT). Rows are conversations (messages, conversations),
prompt and completion, text, or text or image and label; --columns question=problem answer=solution
names the columns of other rows. `holdfast data train.jsonl --model DIR` shows what is trained.
The result is a transformers model, or an adapter for LoRA, with the recipe as it was trained in
holdfast_recipe.yaml. `holdfast measure` shows what it forgot, `holdfast compare` which recipe to
take.
"""

import argparse
import contextlib
import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from holdfast import builtin
from holdfast._torch.adapters import has_adapters, without_peft
from holdfast._torch.layout import whole_weights
from holdfast.cli._guard import say
from holdfast.cli._options import (
    DATA,
    NOT_SAVED,
    Parser,
    add,
    add_settings,
    config_input,
    config_text,
    settings_from,
)
from holdfast.cli._processes import is_first, joined
from holdfast.cli._progress import Progress
from holdfast.comparison.plan import Measuring
from holdfast.evaluate.amount import training_seconds
from holdfast.evaluate.suite import Suite
from holdfast.evaluate.watch import validation_tests, watch_training
from holdfast.hosts.job import Training, encode, train
from holdfast.hosts.tracking import TrackedRun, Tracking
from holdfast.io.codec import to_json
from holdfast.io.encoding import TrainingData
from holdfast.io.files import write_text
from holdfast.io.models import Loaded
from holdfast.io.outputs import claim, finished, output_name, write_changed, written_aside
from holdfast.io.rows import names_of
from holdfast.io.storage import Place
from holdfast.io.untrusted import parse_yaml
from holdfast.recipe import DEFAULT_RECIPE, FILE, Recipe, is_recipe_file, read_recipe
from holdfast.report.command import command
from holdfast.report.printing import tell, tell_line
from holdfast.report.words import seconds

#: Files that only an unfinished run has; the first one is its checkpoint.
UNFINISHED = ("run.pt", "history.jsonl", "seconds")
#: The tests of Measuring that a model takes during training.
RETAINED = ("text", "data", "similarity", "context_free", "limit")
#: Options that do not change the run: a stopped one may be continued with others.
BESIDE = ("out", "report_to", "project")


def add_options(parser: Parser) -> None:
    usage = "--model MODEL --data DATA --out DIR [options]"
    parser.describe(__doc__, usage, needed=("model", "data", "out"))
    add(parser, "config", "print_config")
    add(parser.add_argument_group("model and data"), *DATA)
    training = parser.add_argument_group("training")
    add(training, "recipe", default=DEFAULT_RECIPE)
    add(training, "set", "seed", "device")
    add_settings(training, Training)
    tests = parser.add_argument_group("tests during training, of what should be retained")
    add_settings(tests, Measuring, only=RETAINED)
    parser.set_defaults(context_free=0, limit=100)
    output = parser.add_argument_group("output")
    add(output, "out", "json")
    add_settings(output, Tracking)


def run(options: argparse.Namespace) -> None:
    out = Path(output_name(options.out))
    with joined() as device, contextlib.ExitStack() as stack:
        if is_first():
            settings_from(Tracking, options).check()
            stopped = stack.enter_context(claim(out, "finetune", inputs_of(options)))
            check_unfinished(out, options, stopped)
        if device is not None and options.device is not None:
            raise ValueError("the launcher gives each process its device: leave out --device")
        train_into(out, options, device or options.device)


def inputs_of(options: argparse.Namespace) -> list[str]:
    files = [*filter(is_recipe_file, [options.recipe]), *config_input(options)]
    data = [x for x in (options.data, options.old_data, options.validation) if _is_named(x)]
    data += [*options.retained, *options.similarity]
    texts = [name for given in options.text for name in names_of(given, "text")]
    return [options.model, *(name for given in data for name in names_of(given)), *texts, *files]


def _is_named(data: Any) -> bool:
    """Whether an option names data; a number is a share of other data."""
    return isinstance(data, str | list | tuple)


def train_into(out: Path, options: argparse.Namespace, device: torch.device | str | None) -> None:
    """Train in a folder that no other command uses, on the device of this process."""
    training, config = settings_from(Training, options), config_text(options)
    training.check_validation(data=options.data)
    name, recipe = read_recipe(options.recipe)
    recipe = recipe.with_settings(options.set)
    loader = training.loader(device, trust_remote_code=options.trust_remote_code)
    task = TrainingData.open(
        options.model, options.data, loader, head=options.head, new=options.new,
        columns=options.columns, validation=training.validation,
    )  # fmt: skip
    samples, old = encode(task, [recipe], training, options.old_data)
    retained = Suite(
        text=options.text, data=options.retained, similarity=options.similarity,
        context_free=options.context_free, limit=options.limit, columns=options.columns,
    )  # fmt: skip
    for suite in (Suite(**validation_tests(task.validation)), retained):
        suite.build()  # raises if they fit no test
    tracked = track(out, options) if is_first() else None
    model, new = task.load()
    if is_first():
        if not (out / UNFINISHED[0]).exists():
            remove_unfinished(out)  # of a run that was stopped before its first checkpoint
        write_changed(Place.at(out / "config.yaml"), config)
    watch = functools.partial(
        watch_training, training=training, validation=task.validation, new=new,
        retained=retained, loader=replace(loader, tokenizer=task.tokenizer),
    )  # fmt: skip
    head = f", new head ({task.head}): {', '.join(new)}" if task.head else ""
    # The run logs what the recipe is resolved to.
    tell_line(f"{name}: {len(samples)} samples{head}", file=sys.stderr)
    tell_line(
        length_of_run(training, loader.ready(model, task.tokenizer), samples), file=sys.stderr
    )
    if training.lr is not None and recipe.update.lr not in (None, training.lr):
        say(f"the recipe's own learning rate is used: {recipe.update.lr:g}", "note")
    with contextlib.ExitStack() as stack:
        if tracked is not None:
            stack.enter_context(tracked)
        # Bars of the preparation, such as drawing texts, come before that of the training.
        bars = functools.cache(lambda: stack.enter_context(Progress(1, "training")))
        model, trained, history = train(
            model, recipe, samples, training, out, old_data=old, new=new,
            tokenizer=task.tokenizer, seed=options.seed, watch=watch,
            show=is_first(), tracked=tracked,
            progress=lambda doing, done, total: bars().update(name, done, total, doing),
        )  # fmt: skip
    weights = whole_weights(model)
    if not is_first():
        return
    save(model, weights, task, trained, history, out)
    remove_unfinished(out)  # without its checkpoint, a run starts again
    finished(out)
    rows = [row for row in history if "loss" in row]
    logged = {name: [row[name] for row in rows if name in row] for name in ("loss", "recall")}
    ends = {n: {"first": values[0], "last": values[-1]} for n, values in logged.items() if values}
    best = next((row["best_update"] for row in history[::-1] if "best_update" in row), None)
    measure = measure_command(options, out, task)
    if options.json:
        about = {"recipe": name, "out": str(out), "updates": history[-1]["update"]}
        about |= {"resolved": trained.to_dict(), **ends, "measure": measure}
        about |= {} if best is None else {"best_update": best}
        tell(json.dumps(about, allow_nan=False))
    else:
        ended = f" The weights of update {best} of {history[-1]['update']} are kept."
        kept = "" if best is None else ended
        weighted = "weighted " * trained.objective.changes_loss
        moved = [f"{what} {at['first']:.3f} → {at['last']:.3f}" for what, at in ends.items()]
        tell_line(
            f"{name}: {weighted}{', '.join(moved)} (first updates → last), learning rate "
            f"{trained.update.lr:g}.{kept} The model is in {out}."
        )
        if measure:
            both = " --target " in measure
            tell_line(
                "What it learned and forgot:"
                if both
                else "What it forgot (add --target FILE for what it learned):"
            )
            tell_line(measure)


def measure_command(options: argparse.Namespace, out: Path, task: TrainingData) -> str:
    """The command that tests the model: on the rows for validation, and on what it could do."""
    ours = names_of(options.data) == names_of(builtin.NAME)
    other: Any = "builtin:dev" if ours else ()
    tests = Suite(
        target=options.validation if _is_named(options.validation) else other,
        text=options.text or (["builtin"] if ours else []),
        data=options.retained,
        similarity=options.similarity,
        columns=options.columns,
    )
    given = tests.options() or {}
    if not (tests.text or tests.data or tests.similarity):
        writes = task.head is None and task.loader.cannot_generate(options.model) is None
        given |= {"skills": True} if writes else {} if given else {"target": "FILE"}
    trust = options.trust_remote_code or None
    return command("measure", options.model, out, **given, trust_remote_code=trust)


def track(out: Path, options: argparse.Namespace) -> TrackedRun | None:
    """The run in the trackers that the options name, whose stores answer; None without any."""
    tracking = settings_from(Tracking, options)
    if not tracking.report_to:
        return None
    folder = out / "tracking"
    tracking.prepare(folder)
    kept = {n: v for n, v in vars(options).items() if n not in (*BESIDE, *NOT_SAVED, "recipe")}
    name = out.resolve().name
    return tracking.run(folder, name, settings={"recipe": str(options.recipe), **kept})


def length_of_run(training: Training, loaded: Loaded, samples: Sequence[Any]) -> str:
    """Say how many updates the training takes, and about how long, after a short run."""
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    updates, size = training.amount(samples, processes)
    said = f"{updates} updates of {size} samples"
    if (each := training_seconds(loaded, samples)) is None:
        return said
    plain = seconds(updates * size * each / processes)
    return f"{said}, about {plain} and what the recipe adds"


def save(
    model: Any,
    weights: dict[str, Any] | None,
    task: TrainingData,
    recipe: Recipe,
    history: list[dict[str, float]],
    out: Path,
) -> None:
    """Write a model and everything beside it; ``weights`` are those of a sharded model."""
    with written_aside(out) as aside:
        model.save_pretrained(aside, state_dict=weights)
        if task.head is not None and has_adapters(model):
            # An adapter's files do not describe the new head of its base.
            base = without_peft(model)
            base.config.architectures = [type(base).__name__]
            base.config.save_pretrained(aside)
        if task.tokenizer is not None:
            task.tokenizer.save_pretrained(aside)
        write_text(aside / FILE, recipe.to_yaml())
        write_text(aside / "training.json", to_json(history))


def remove_unfinished(out: Path) -> None:
    for left in UNFINISHED:
        (out / left).unlink(missing_ok=True)


def check_unfinished(out: Path, options: argparse.Namespace, stopped: bool) -> None:
    """Refuse a folder with a model, or with an unfinished run of other settings.

    ``stopped`` is whether a run was stopped in it, perhaps in its last moments.
    """
    config = out / "config.yaml"
    if (out / "training.json").exists() and not stopped:
        raise ValueError(f"{out} already contains a model: give another --out")
    if not config.exists() or not (out / UNFINISHED[0]).exists():
        return  # nothing to continue from
    before = parse_yaml(config.read_text(encoding="utf-8"), str(config))
    now: Any = parse_yaml(config_text(options), "the options")  # lists as YAML has them
    if not isinstance(before, dict):
        raise ValueError(f"{config} is damaged: remove {out} to start the run again")
    for name in sorted({str(name) for name in before} - {*BESIDE, *NOT_SAVED}):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{out} contains an unfinished run with {name} {before.get(name)}, not "
                f"{now.get(name)}: continue it with `holdfast finetune --config {out}/config.yaml`,"
                " or give another --out"
            )
