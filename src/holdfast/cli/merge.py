"""Merge tuned checkpoints with their base and write the result, without training.

Merging runs on the CPU, one tensor at a time. With --sweep, several settings are measured and one
is recommended.

examples:
  holdfast merge models/Llama-3.2-1B runs/my-tune --alpha 0.5 --out models/half
  holdfast merge models/Llama-3.2-1B runs/my-tune --method lines --alpha 0.2 --beta 0.8 --out out
  holdfast merge models/Llama-3.2-1B runs/code runs/math --method ties --density 0.2 --out both
  holdfast merge models/Llama-3.2-1B runs/my-tune --sweep 0 0.25 0.5 0.75 1 --out sweep \\
      --target gsm8k.jsonl --retained piqa.jsonl --text wiki.txt
  holdfast merge models/Llama-3.2-1B runs/my-tune --method lines --sweep alpha 0 0.2 0.4 \\
      --sweep beta 0.4 0.6 --retain 99% --target gsm8k.jsonl --retained piqa.jsonl --out sweep

The default method writes α·TUNED + (1−α)·BASE: α = 1 is the tuned model and α = 0 is the base. A
smaller α forgets less and has learned less. TUNED may be an adapter: the result is a full
model. `holdfast methods` lists all methods, those of the stage merging among them.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast, get_type_hints

from holdfast.cli._guard import Failed, check_page, show
from holdfast.cli._options import (
    NUMBER,
    Convert,
    Parser,
    UsageError,
    add,
    attribute_texts,
    one_of,
    share,
)
from holdfast.cli.measure import add_models, add_tests, inputs_of, measure_arguments
from holdfast.evaluate.drift import drift
from holdfast.evaluate.sweep import Sweep, folder_of, sweep
from holdfast.io.codec import encode
from holdfast.io.merge import merge_on_disk
from holdfast.io.outputs import claim, output_name
from holdfast.io.storage import Place
from holdfast.registry import methods
from holdfast.report import LEARN_AT_LEAST
from holdfast.report.printing import tell, tell_line
from holdfast.report.verdict import MERGED_ROWS, on_tokens
from holdfast.report.words import settings_text
from holdfast.stages import Merging

#: The methods that merge checkpoints, by name; the first is the default.
METHODS = {
    entry.name: cast("type[Merging]", entry.cls)
    for entry in methods("merging")
    if cast(Merging, entry.cls()).tensorwise
}
#: Tests of what a model should keep.
KEPT = ("retained", "text", "tasks", "similarity", "skills")


class Swept(argparse.Action):
    """Collect ``--sweep VALUE…``, of the method's own setting (``""``), or NAME VALUE…."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        name, numbers = ("", values) if isinstance(values[0], float) else (values[0], values[1:])
        for value in numbers:
            if not isinstance(value, float):
                raise argparse.ArgumentError(self, f"must be a number, got {value!r}")
        if not numbers:
            raise argparse.ArgumentError(self, f"expected values after {name!r}")
        before = getattr(namespace, self.dest) or {}
        if name in before:
            raise argparse.ArgumentError(self, f"{name or 'the setting'} is given twice")
        setattr(namespace, self.dest, {**before, name: numbers})


def settings_of(cls: type[Merging]) -> list[str]:
    """The numeric settings of a method, without its seed, which is an option of all tests."""
    kinds = get_type_hints(cls)
    return [field.name for field in fields(cls) if kinds[field.name] is float]


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, "BASE TUNED [TUNED ...] --out DIR [options]", needed=("out",))
    add_models(parser, several=True)
    merging = parser.add_argument_group("merging")
    default = next(iter(METHODS))
    merging.add_argument("--method", **one_of(*METHODS), default=default, help="how to merge")
    texts: dict[str, dict[str, list[str]]] = {}  # option → its meaning → the methods
    for method, cls in METHODS.items():
        described = attribute_texts(cls)
        for name in settings_of(cls):
            meaning = f"{described[name]} (default: {getattr(cls, name):g})"
            texts.setdefault(name, {}).setdefault(meaning, []).append(method)
    for name, meanings in texts.items():
        text = "; ".join(f"{', '.join(of)}: {meaning}" for meaning, of in meanings.items())
        merging.add_argument(f"--{name}", type=NUMBER, metavar="X", help=text)
    merging.add_argument(
        "--sweep", action=Swept, type=Convert((float, str)), nargs="+",
        metavar=("[NAME] X", "X"), help="measure merged models at these values of a setting (by "
        "default the method's first); may be repeated with another NAME",
    )  # fmt: skip
    merging.add_argument(
        "--retain", type=share, metavar="X%",
        help="with --sweep: take only a model that keeps X% of every retained score of the base, "
        "and write it",
    )  # fmt: skip
    merging.add_argument(
        "--retain-kl", type=NUMBER, metavar="X",
        help="with --sweep: take only a model whose context-free divergence is at most X nats per "
        "token; needs no data",
    )  # fmt: skip
    add(merging, "learn_at_least")
    merging.add_argument(
        "--keep-models", action="store_true", help="with --sweep: keep all merged models"
    )
    output = parser.add_argument_group("output")
    add(output, "out", "json")
    output.add_argument("--overwrite", action="store_true", help="replace existing models in --out")
    add_tests(parser, "tests, with --sweep")


def run(options: argparse.Namespace) -> None:
    method = method_of(options)
    if options.sweep is not None:
        measure_merged(options, method)
        return
    blank = Parser()
    add_tests(blank)
    alone = {
        "keep_models": False, "retain": None, "retain_kl": None, "learn_at_least": LEARN_AT_LEAST
    }  # fmt: skip
    for name, default in {**vars(blank.parse([])), **alone}.items():
        own = name == "seed" and hasattr(method, "seed")
        if getattr(options, name) != default and not own:
            if name == "seed":
                raise UsageError(
                    f"{options.method} draws nothing, and --seed of tests needs a sweep"
                )
            option = f"--{name.replace('_', '-')}"
            values = f"values of {method.swept}" if method.swept else "values"
            raise UsageError(f"{option} needs a sweep: add --sweep and {values}")
    merge(options, method)


def method_of(options: argparse.Namespace) -> Merging:
    """The method with the given settings; refuse those that it does not have."""
    cls = METHODS[options.method]
    known = settings_of(cls)
    every = dict.fromkeys(name for one in METHODS.values() for name in settings_of(one))
    given = {name: getattr(options, name) for name in every if getattr(options, name) is not None}
    swept = {name or cls.swept for name in options.sweep or ()}
    for name in given:
        if name not in known:
            own = ", ".join(f"--{name}" for name in known)
            raise UsageError(
                f"{options.method} has no setting --{name}"
                + (f": it has {own}" if own else " and no other settings")
            )
        if name in swept:
            raise UsageError(
                f"--{name} merges at one value and --sweep at several: give one of the two"
            )
    if "seed" in get_type_hints(cls):
        given["seed"] = options.seed
    return cls(**given)


def merge(options: argparse.Namespace, method: Merging) -> None:
    """Write one merged checkpoint, and print its size and its distance from the base."""
    shared = {"allow_pickle": options.allow_pickle, "progress": True}
    out = merge_on_disk(
        options.base,
        options.tuned,
        output_name(options.out),
        method,
        overwrite=options.overwrite,
        **shared,
    )
    moved = drift(options.base, out, **shared)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    settings = {name: getattr(method, name) for name in settings_of(type(method))}
    if hasattr(method, "seed"):
        settings["seed"] = method.seed
    if options.json:
        about: dict[str, Any] = {
            "out": str(out), "method": options.method, "settings": settings, "bytes": size,
            "relative": moved.total.relative, "not_finite": moved.not_finite,
            "vocabulary": moved.vocabulary,
        }  # fmt: skip
        tell(json.dumps(encode(about), allow_nan=False))
        return
    shown = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
    how = f" ({settings_text(settings)})" if settings else ""
    tell_line(
        f"wrote {options.out} ({shown}), {options.method}{how} of {options.base} and "
        f"{', '.join(options.tuned)}: {100 * moved.total.relative:.2g} % from the base"
    )
    if moved.vocabulary is not None:
        tell_line(f"{on_tokens(moved.vocabulary)} {MERGED_ROWS}")
    if bad := moved.not_finite:
        tell_line(f"{len(bad)} tensors contain NaN or infinity, the first is {bad[0]}")


def measure_merged(options: argparse.Namespace, method: Merging) -> None:
    limited = options.retain is not None or options.retain_kl is not None
    if options.retain is not None and not any(getattr(options, name) for name in KEPT):
        raise UsageError(
            "--retain needs tests of what to keep, such as --retained or --tasks; without data, "
            "limit the divergence: --retain-kl 0.05"
        )
    if options.retain_kl is not None and options.context_free < 1:
        raise UsageError("--retain-kl needs the base's own texts: leave out --context-free 0")
    values: Mapping[str, list[float]] = options.sweep
    if "" in values:
        if method.swept is None:
            raise UsageError(f"{options.method} has no setting to sweep: leave out --sweep")
        values = {name or method.swept: numbers for name, numbers in values.items()}
    check_page()
    out = Path(output_name(options.out))
    with claim(out, "merge --sweep", inputs_of(options)):
        found = sweep(
            options.base,
            options.tuned,
            method,
            values,
            out=out,
            keep_models=options.keep_models,
            overwrite=options.overwrite,
            retain=options.retain,
            max_kl=options.retain_kl,
            learn_at_least=options.learn_at_least,
            **measure_arguments(options),
        )
        show(found, options, Place.at(out), "sweep.json", "sweep.md", "sweep.html")
        if limited:
            write_chosen(options, method, found, out)


def write_chosen(options: argparse.Namespace, method: Merging, found: Sweep, out: Path) -> None:
    """Write the model that the limits choose, unless it is there: the base, the tuned, or kept."""
    answer = found.recommendation()
    if answer.settings is None:
        raise Failed(answer.headline)
    [point] = [point for point in found.points if point.settings == answer.settings]
    model = out / folder_of(point.settings)
    if point.kind == "merged" and not options.keep_models:
        merge_on_disk(
            options.base,
            options.tuned,
            model,
            replace(method, **cast("dict[str, Any]", point.settings)),
            overwrite=options.overwrite,
            allow_pickle=options.allow_pickle,
        )
