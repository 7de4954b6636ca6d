"""The heads of models: what a model predicts, what labels mean to it, and new heads.

Functions that take a ``config`` read a transformers model configuration, or any object with the
same attributes. A new head's weights are drawn from a fixed seed, so the same model with the same
head has the same weights in every process.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from posixpath import commonpath
from typing import Any, Literal

import torch
from torch import nn

from holdfast._torch.adapters import has_adapters, without_peft
from holdfast._torch.imports import require
from holdfast._torch.layers import head_parts, output_layer, within
from holdfast._torch.multimodal import is_text_generator
from holdfast._torch.names import shorten
from holdfast.builtin import located_model
from holdfast.io.adapter import is_adapter
from holdfast.io.rows import DatasetRows, Rows, as_number, image_column, labels_of, text_columns
from holdfast.io.untrusted import from_pretrained, read_object

#: A directory, file or hub name of a model, or a module in memory.
ModelSource = str | os.PathLike[str] | nn.Module
ModelKind = Literal["causal_lm", "masked_lm", "classifier", "image_classifier", "other"]
_KINDS: dict[str, ModelKind] = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForMaskedLM": "masked_lm",
    "ForSequenceClassification": "classifier",
    "ForImageClassification": "image_classifier",
}
_CHOICES = ("auto", "classification", "regression", "none")
_CLASSIFIERS = ("classifier", "image_classifier")
_MULTIMODAL = "ForConditionalGeneration"
_SEED = 0
_READ = "_is_hf_initialized"


def model_kind(model: Any) -> ModelKind:
    """Return what a model predicts, judged by its class, or by the class that a config names."""
    if not isinstance(model, nn.Module):
        name = (model.architectures or [""])[0]
        cls = getattr(import_transformers(), name, None) if name.endswith(_MULTIMODAL) else None
        return "causal_lm" if cls and is_text_generator(cls, model) else _kind_named(name)
    inner = without_peft(model)
    kind = _kind_named(type(inner).__name__)
    config = getattr(inner, "config", None)
    if is_text_generator(type(inner), config):
        return "causal_lm"
    encodes = hasattr(inner, "bert") or hasattr(inner, "roberta")
    if kind == "causal_lm" and encodes and not getattr(config, "is_decoder", True):
        return "other"  # its attention is bidirectional
    return kind


def _kind_named(name: str) -> ModelKind:
    if name == "XLNetLMHeadModel":  # it does not read from left to right
        return "other"
    return next((kind for ending, kind in _KINDS.items() if name.endswith(ending)), "other")


def is_headless(model: nn.Module) -> bool:
    """Whether a transformers model has no head: its class is named ``…Model``."""
    name = type(model).__name__
    return name.endswith("Model") and _kind_named(name) == "other"


def locate(source: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """Return a model's directory or hub name, and the option that names a GGUF file in it."""
    source = located_model(source)
    path = Path(source)
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    bare = path.suffix == ".safetensors" and path.is_file()
    return str(path.parent) if bare else source, {}


def config_of(source: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    transformers = import_transformers()
    where, options = locate(source)
    if not options and Path(where).is_dir() and not Path(where, "config.json").is_file():
        raise ValueError(
            f"{where} has no config.json, so it is not a model of transformers: only its drift can "
            "be measured. In Python, any module can be trained"
        )
    missing = [name for name in ("timm", "torchvision") if not find_spec(name)]
    if missing and is_timm(where):
        raise ValueError(
            f"{where} is a model of timm: install {' and '.join(missing)}, or train the module in "
            "Python"
        )
    return from_pretrained(
        transformers.AutoConfig, where, trust_remote_code=trust_remote_code, what="config.json",
        **options,
    )  # fmt: skip


def is_timm(where: str | os.PathLike[str]) -> bool:
    """Whether a directory has a model of timm. Its image processor is in config.json as well."""
    about = Path(where, "config.json")
    return about.is_file() and read_object(about).get("model_type") == "timm_wrapper"


def import_transformers() -> Any:
    return require("transformers", extra="eval", what="running models (all but the drift)")


def class_name(label: Any) -> str:
    """Return the name of a class: text unchanged, a whole number as its digits.

    >>> class_name("red"), class_name(3), class_name(3.0), class_name(True)
    ('red', '3', '3', '1')
    """
    if isinstance(label, str):
        return label.strip()
    if isinstance(label, int):
        return str(int(label))  # a float would round a large one
    number = as_number(label)
    if number is None:
        raise ValueError(f"a label must be text or a finite number, got {label!r}")
    return str(int(number)) if number == int(number) else str(label)


def class_names(labels: Sequence[Any]) -> list[str]:
    """Return the distinct class names, sorted as numbers if all of them are numbers.

    >>> class_names(["10", "9", "10"]), class_names(["b", "a"]), class_names([2, 0])
    (['9', '10'], ['a', 'b'], ['0', '2'])
    """
    found = {class_name(label) for label in labels}
    if all(name.lstrip("-").isdigit() for name in found):
        return sorted(found, key=int)
    return sorted(found)


def is_regression(config: Any) -> bool:
    """Whether a classifier's configuration describes a regression: one number, no classes."""
    problem = getattr(config, "problem_type", None)
    return problem == "regression" or (problem is None and getattr(config, "num_labels", 0) == 1)


def target_of(config: Any, label: Any, name: str) -> int | float:
    """Return the target of a label: a class index, or the number itself for a regression.

    If any class name of the model is itself a number, the label is a name and never an index.
    ``name`` is the data's name, for errors.
    """
    if is_regression(config):
        number = as_number(label)
        if number is None:
            raise ValueError(f"{name}: the model predicts a number, but the label is {label!r}")
        return number
    index = class_index(config, label)
    if index is None:
        known = _index_by_name(config)
        classes = f"{len(known)} classes: {shorten(list(known))}" if known else "classes"
        raise ValueError(f"{name}: the label {label!r} is not one of the model's {classes}")
    return index


def class_index(config: Any, label: Any) -> int | None:
    known, word = _index_by_name(config), class_name(label)
    if word in known:
        return known[word]
    number = as_number(label)
    if number is None or number != int(number) or number < 0:
        return None
    if known and (number >= len(known) or _any_number(tuple(known))):
        return None
    return int(number)


def _index_by_name(config: Any) -> dict[str, int]:
    names: Mapping[Any, str] = getattr(config, "id2label", None) or {}
    return {str(name): int(i) for i, name in sorted(names.items(), key=lambda item: int(item[0]))}


@lru_cache  # called once per row with the same classes
def _any_number(names: tuple[str, ...]) -> bool:
    return any(as_number(name) is not None for name in names)


@dataclass(frozen=True)
class NewHead:
    """The outputs of a new head; a regression has no classes.

    ``pad`` is the padding token, for a model that has none: a causal language model classifies at
    the last token before the padding.
    """

    classes: tuple[str, ...]
    images: bool = False  # instead of texts
    pad: int | None = None

    def __str__(self) -> str:
        return f"{len(self.classes)} classes" if self.classes else "regression"

    def settings(self) -> dict[str, Any]:
        pad = {} if self.pad is None else {"pad_token_id": self.pad}
        if not self.classes:
            return {"num_labels": 1, "problem_type": "regression", **pad}
        return {
            **pad,
            "num_labels": len(self.classes),
            "id2label": dict(enumerate(self.classes)),
            "label2id": {name: i for i, name in enumerate(self.classes)},
            "problem_type": "single_label_classification",
        }


def check_head(head: str) -> None:
    if head not in _CHOICES:
        raise ValueError(f"head must be one of {', '.join(_CHOICES)}, got {head!r}")


def head_for(
    head: str, source: str, rows: Rows, name: str, *, trust_remote_code: bool = False
) -> NewHead | None:
    """Return the new head that a model needs to learn from rows; None to keep the model's own.

    ``"auto"`` gives a new head if the rows have labels and the model has no head or other classes
    (a causal language model keeps its own head); ``"classification"`` and ``"regression"`` always
    give a new head; ``"none"`` never does. ``name`` is the name of the rows, for errors.
    """
    check_head(head)
    if head == "none":
        return None
    images = image_column(rows[0]) is not None
    labels = labels_of(rows, name) if images or text_columns(rows[0]) else None
    if labels is None:
        if head == "auto":
            return None
        raise ValueError(
            f"a {head} head needs rows with a text or an image and a label, but {name} has the "
            f"columns {', '.join(map(str, rows[0]))}"
        )
    numbers = [as_number(label) for label in labels]
    given, classes = (rows.names, rows.classes) if isinstance(rows, DatasetRows) else (None, False)
    if head == "auto":
        own = None
        if not source.endswith(".gguf") and not is_adapter(source):
            own = config_of(source, trust_remote_code=trust_remote_code)
        if own is None or _has_suitable_head(own, labels, numbers, given):
            return None
        decimal = all(n is not None for n in numbers) and any(n != int(n) for n in numbers if n)
        head = "regression" if decimal and not classes else "classification"
    if head == "regression":
        if None in numbers:
            wrong = labels[numbers.index(None)]
            raise ValueError(f"{name}: a regression needs numbers as labels, got {wrong!r}")
        return NewHead((), images)
    names = given or class_names(labels)
    if len(names) < 2:
        raise ValueError(
            f"{name}: all rows have the label {names[0]!r}, but a classification needs at least "
            "two classes"
        )
    return NewHead(tuple(names), images)


def head_like(
    base: ModelSource, tuned: ModelSource, *, trust_remote_code: bool = False
) -> NewHead | None:
    """Return the new head that a base needs to be compared with a tuned classifier, if any.

    A base on disk with no classes, or with other classes, got a new head when it was tuned.
    """
    on_disk = [source for source in (base, tuned) if not isinstance(source, nn.Module)]
    if isinstance(base, nn.Module) or is_adapter(base) or any(Path(s).is_file() for s in on_disk):
        return None
    try:
        before = config_of(base, trust_remote_code=trust_remote_code)
        after: Any = (
            tuned.config if isinstance(tuned, nn.Module)
            else config_of(tuned, trust_remote_code=trust_remote_code)
        )  # fmt: skip
    except (AttributeError, ImportError, ValueError):  # bare weights
        return None
    kind = model_kind(after)
    if kind not in _CLASSIFIERS:
        return None
    head = _head_in(after)
    same = model_kind(before) == kind and _head_in(before).classes == head.classes
    return None if same else head


def _head_in(config: Any) -> NewHead:
    names = sorted((int(i), str(name)) for i, name in config.id2label.items())
    classes = () if is_regression(config) else tuple(name for _, name in names)
    images = model_kind(config) == "image_classifier"
    return NewHead(classes, images, getattr(config, "pad_token_id", None))


def _has_suitable_head(
    config: Any, labels: Sequence[Any], numbers: Sequence[Any], given: Sequence[str] | None
) -> bool:
    """Whether a model's own head fits the labels, or must not be replaced without being asked."""
    kind = model_kind(config)
    if kind not in _CLASSIFIERS:
        return kind == "causal_lm"
    if is_regression(config):
        return None not in numbers
    names = given or class_names(labels)
    if all(class_index(config, label) is not None for label in names):
        known = {str(name) for name in config.id2label.values()}
        return len(names) == len(known) or set(names) <= known
    # The data names classes that the model only numbers.
    numbered = all(str(name) == f"LABEL_{i}" for i, name in config.id2label.items())
    return numbered and given is not None and len(given) == len(config.id2label)


def new_parts(model: nn.Module, missing: Sequence[str], body: str) -> tuple[str, ...]:
    """Return the modules of a new head: those whose parameters the checkpoint does not hold.

    The parameters outside of the body, whose prefix is ``body``, form one module per head. If
    nothing is missing, the new module is the output layer of the head.

    >>> missing = ["head.dense.weight", "head.out.bias", "bert.pooler.dense.bias"]
    >>> new_parts(nn.Module(), missing, "bert.")
    ('bert.pooler.dense', 'head')
    """
    groups: dict[str, list[str]] = {}
    for key in missing:
        path = key.split(".")[:-1]
        group = ".".join(path) if key.startswith(body) else path[0]
        groups.setdefault(group, []).append("/".join(path))
    if groups:
        return tuple(sorted(commonpath(paths).replace("/", ".") for paths in groups.values()))
    if layer := output_layer(model, head_parts(model)):
        return (layer,)
    raise ValueError(f"cannot find the head of {type(model).__name__}")


def new_in(model: nn.Module) -> tuple[str, ...]:
    """Return the modules of a head that transformers initialized when it loaded a checkpoint.

    transformers marks the parameters that it has read. A model without marks, such as a copy of
    another, is not known to have a new head.
    """
    body = body_of(model)
    read = {n: getattr(p, _READ, False) for n, p in model.named_parameters()}
    inside = [is_read for name, is_read in read.items() if name.startswith(body)]
    if body == "." or has_adapters(model) or not any(inside):
        return ()
    missing = [name for name, is_read in read.items() if not (is_read or in_body(name, model))]
    return new_parts(model, missing, body) if missing else ()


def mark_trained(model: nn.Module) -> None:
    """Mark all parameters like those that were read from a checkpoint."""
    for parameter in model.parameters():
        setattr(parameter, _READ, True)


def body_of(model: nn.Module) -> str:
    """Return the prefix of the names of parameters in the body of a transformers model."""
    return f"{getattr(model, 'base_model_prefix', '')}."


def in_body(name: str, model: nn.Module) -> bool:
    """Whether a parameter belongs to the body, and not to its pooler or a head inside of it."""
    inside = name.startswith(body_of(model)) and "pooler" not in name
    return inside and not within(name, head_parts(model))


@torch.no_grad()
def draw_weights(model: nn.Module, parts: Sequence[str]) -> None:
    spread = getattr(getattr(model, "config", None), "initializer_range", None) or 0.02
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        for part in parts:
            for module in model.get_submodule(part).modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0.0, spread)
                    if module.bias is not None:
                        module.bias.zero_()
                elif callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
