"""Compare a tuned model with its base: distances, divergence, test scores before and after.

examples:
  holdfast measure builtin tuned --target builtin:dev --text builtin
  holdfast measure BASE TUNED --skills               needs no data
  holdfast measure BASE TUNED --text wiki.txt --retained piqa.jsonl --target gsm.jsonl --out report
  holdfast measure BASE TUNED --target flowers/test  images, one folder per class
  holdfast measure BASE ENCODER --similarity stsb.jsonl --target cola.jsonl
  holdfast measure BASE ADAPTER --tasks piqa arc_easy --limit 500
  holdfast measure BASE TUNED --text wiki.txt --model-card TUNED/README.md

BASE and TUNED are directories, hub names or GGUF files of transformers models; TUNED may be a LoRA
adapter. If it has no holdfast_recipe.yaml, --recipe says how it was trained, so that the report can
tell which figures were a training signal.

--retained and --target take rows (JSON lines, CSV, Parquet, Arrow), a directory written by
datasets.save_to_disk (DIR:SPLIT), a folder of images, or a hub dataset (NAME:SPLIT,
NAME:CONFIGURATION:SPLIT). Their columns decide the test: question, choices and label (multiple
choice), messages, prompt and completion, text or image and label, or text. --columns
question=problem answer=solution names the columns of other rows.
"""

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch

from holdfast.cli._card import check_card, update_card
from holdfast.cli._guard import check_page, show
from holdfast.cli._options import SHARED, Parser, add, add_settings, one_of
from holdfast.comparison.inputs import warn_of_known_target
from holdfast.comparison.plan import Measuring
from holdfast.evaluate.kl import ContextFreeKL
from holdfast.evaluate.measure import measure
from holdfast.evaluate.skills import skills
from holdfast.io.models import Loader
from holdfast.io.outputs import claim, output_name
from holdfast.io.rows import names_of
from holdfast.io.storage import Place
from holdfast.io.untrusted import parse_yaml
from holdfast.recipe import read_recipe

FILES = ("report.json", "report.md", "report.html")


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, "BASE TUNED [options]")
    add(add_models(parser), "recipe")
    add_tests(parser)
    add(parser.add_argument_group("output"), "out", "model_card", "json")


def add_models(parser: Parser, *, several: bool = False, **more: Any) -> Any:
    models = parser.add_argument_group("models")
    models.add_argument("base", metavar="BASE", help=SHARED["model"]["help"], **more)
    given: dict[str, Any] = {"nargs": "+"} if several else {}
    models.add_argument(
        "tuned", metavar="TUNED", help="fine-tuned model, or adapter", **given, **more
    )
    add(models, "allow_pickle", "trust_remote_code")
    return models


def add_tests(parser: argparse.ArgumentParser, title: str = "tests") -> None:
    tests = parser.add_argument_group(title)
    add(tests, "target", nargs="+", default=[])
    add(tests, "columns")
    add_settings(tests, Measuring, skip=("half",))
    own = "test arithmetic, code, languages and chats, on texts that the base itself writes"
    tests.add_argument("--skills", action="store_true", help=own)
    tests.add_argument(
        "--drift", action=argparse.BooleanOptionalAction, default=True, help="compare the weights"
    )
    add(tests, "device")
    dtype = "dtype of the models (default: float32 on the CPU, else the checkpoint's)"
    tests.add_argument("--dtype", **one_of("float32", "bfloat16", "float16"), help=dtype)
    add(tests, "seed")
    parser.set_defaults(context_free=64)


def measure_arguments(options: argparse.Namespace) -> dict[str, Any]:
    same = (
        "text", "target", "similarity", "tasks", "include_path", "columns", "drift", "limit",
        "limit_tokens",
    )  # fmt: skip
    texts = options.context_free
    return {
        **{name: getattr(options, name) for name in same},
        "data": options.retained,
        "probes": skills(min(16, options.limit or 16), seed=options.seed) if options.skills else (),
        "context_free": ContextFreeKL(texts, seed=options.seed) if texts > 0 else texts,
        "loader": Loader(
            device=options.device,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            max_length=options.test_max_length,
            allow_pickle=options.allow_pickle,
            trust_remote_code=options.trust_remote_code,
        ),
        "progress": True,
    }


def run(options: argparse.Namespace) -> None:
    out = None if options.out is None else Place.at(Path(output_name(options.out)))
    if out is not None:
        check_page()
    check_card(options, inputs_of(options))
    recipe = None if options.recipe is None else read_recipe(options.recipe)[1]
    with claim(out, "measure", inputs_of(options), files=FILES):
        check_targets(options)
        report = measure(
            options.base, options.tuned, recipe=recipe, **measure_arguments(options)
        )  # fmt: skip
        show(report, options, out, *FILES)
        update_card(options, report)


def check_targets(options: argparse.Namespace) -> None:
    """Warn of a target that the tuned model was trained on, by its config.yaml of finetune.

    The file does not record the folder in which the training ran. Relative paths in it are read as
    those of the current folder.
    """
    file = Path(options.tuned) / "config.yaml"
    with contextlib.suppress(OSError, ValueError):  # none, one of another tool, or of gone files
        given = parse_yaml(file.read_text(encoding="utf-8"), str(file))
        data = given.get("data") if isinstance(given, dict) else None
        if isinstance(data, str | list):
            for target in options.target:
                warn_of_known_target(data, target)


def inputs_of(options: argparse.Namespace) -> list[str]:
    tests = [*options.retained, *options.target, *options.similarity]
    tests = [name for test in tests for name in names_of(test)]
    tests += [name for test in options.text for name in names_of(test, "text")]
    tuned = options.tuned if isinstance(options.tuned, list) else [options.tuned]
    return [options.base, *tuned, *tests, *filter(None, [options.include_path])]
