"""Estimate the memory per GPU and the time per update of a training, without weights or a GPU.

examples:
  holdfast plan --model DIR
  holdfast plan --model DIR --recipe recadam+flow --gpus 64 --max-length 4096 --batch-size 1
  holdfast plan --model DIR --recipe lora --gpu H100 --gradient-checkpointing
  holdfast plan --model DIR --recipe recadam --gpus 8 --anchors host --json

Only the config.json of the model is read, so a model of any size takes a few seconds. The output
compares the recipe with plain fine-tuning: what is in the memory of each GPU, what an update
spends its time on, and what happens once before training. If the training does not fit, it says
with which options it would, or that none helps. It is an estimate, and it refuses nothing: the
speeds were measured on one H200, and communication between GPUs is not included. The options of the
training have the names and defaults of `holdfast finetune`, and the plan is that of this command,
unless you set --anchors host.
"""

import argparse

from holdfast.cli._options import Parser, add, add_settings, settings_from
from holdfast.hosts.forecast import TRAINING, Machines, forecast
from holdfast.hosts.job import Training
from holdfast.recipe import DEFAULT_RECIPE, read_recipe
from holdfast.report.printing import tell


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, "--model MODEL [options]", needed=("model",))
    amount = "; plan reads no data: give the number of training samples as --data-size N"
    parser.hints = {"data": amount, "samples": amount}
    add(parser, "config", "print_config")
    add(parser.add_argument_group("model"), "model", "trust_remote_code")
    training = parser.add_argument_group("training")
    add(training, "recipe", default=DEFAULT_RECIPE)
    add(training, "set")
    add_settings(training, Training, only=TRAINING)
    machines = parser.add_argument_group("machines and data")
    add(machines, "gpus", default=1)
    add_settings(machines, Machines, skip=("gpus",))
    add(parser.add_argument_group("output"), "json")


def run(options: argparse.Namespace) -> None:
    name, recipe = read_recipe(options.recipe)
    gpus = float(options.gpus)
    machines = settings_from(Machines, options, gpus=int(gpus) if gpus.is_integer() else gpus)
    found = forecast(
        options.model, name, recipe.with_settings(options.set),
        settings_from(Training, options), machines,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    if options.json:
        tell(found.to_json(), end="")
    else:
        found.to_terminal()
