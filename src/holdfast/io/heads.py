"""A new head for a model that has none for the task: of the right size, and the same every time.

Its weights are drawn from a fixed seed, so that whoever gives the same model the same head, in
another process or on another day, has the same model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast._torch.layers import head_of
from holdfast._torch.names import shorten
from holdfast.io.images import image_column
from holdfast.io.kinds import config_of, first_sentence, import_transformers, kind_named
from holdfast.io.labels import as_number, distinct, index_in, is_regression, texts_of
from holdfast.io.models import Loader, Source
from holdfast.io.sources import Rows, Table, labels_of

__all__ = ["NewHead", "check_head", "head_for", "head_like", "load_with_head"]

_HEADS = ("auto", "classification", "regression", "none")
_SEED = 0


@dataclass(frozen=True)
class NewHead:
    """What a new head predicts.

    Attributes:
        classes: their names, in their order; none for a regression.
        images: whether it is of images, and not of texts.
        pad: the token that a model pads with which has not been padded before: a causal language
            model's answer is at the last token before it.
    """

    classes: tuple[str, ...]
    images: bool = False
    pad: int | None = None

    def __str__(self) -> str:
        return f"{len(self.classes)} classes" if self.classes else "regression"

    def settings(self) -> dict[str, Any]:
        """For a transformers configuration."""
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


def check_head(asked: str) -> None:
    """Refuse what cannot be asked for."""
    if asked not in _HEADS:
        raise ValueError(f"head must be one of {', '.join(_HEADS)}, got {asked!r}")


def head_for(asked: str, source: str, rows: Rows, name: str) -> NewHead | None:
    """The head that a model needs to learn from rows; None if it is to be taken as it is.

    Args:
        asked: ``"auto"`` is a new one where the rows have labels and the model has no head, or one
            of other classes (a causal language model keeps its own); ``"classification"`` and
            ``"regression"`` are a new one, whatever the model has; ``"none"`` is none.
        source: the model's directory or hub name.
        rows: of the training data.
        name: of the training data, for errors.
    """
    check_head(asked)
    if asked == "none":
        return None
    images = image_column(rows[0]) is not None
    labels = labels_of(rows, name) if images or texts_of(rows[0]) else None
    if labels is None:
        if asked == "auto":
            return None
        raise ValueError(f"a head for {asked} needs rows with a text or an image and a label, and "
                         f"{name} has {', '.join(map(str, rows[0]))}")  # fmt: skip
    numbers = [as_number(label) for label in labels]
    if asked == "auto":
        if _suits(source, labels, numbers, rows):
            return None
        classes = isinstance(rows, Table) and rows.classes
        decimal = all(n is not None for n in numbers) and any(n != int(n) for n in numbers if n)
        asked = "regression" if decimal and not classes else "classification"
    if asked == "regression":
        if None in numbers:
            wrong = labels[numbers.index(None)]
            raise ValueError(f"{name}: a regression needs numbers, and {wrong!r} is none")
        return NewHead((), images)
    names = _names(rows) or distinct(labels)
    if len(names) < 2:
        raise ValueError(f"{name}: all rows have the label {names[0]!r}: nothing to tell apart")
    return NewHead(tuple(names), images)


def head_like(base: Source, tuned: Source) -> NewHead | None:
    """The head that a base needs beside a tuned classifier; None if it needs none.

    A base that lies in files and has no classes, or others, was given a new head when it was tuned.
    """
    if isinstance(base, nn.Module) or (Path(base) / "adapter_config.json").is_file():
        return None
    try:
        before = config_of(str(base))
        after: Any = tuned.config if isinstance(tuned, nn.Module) else config_of(str(tuned))
    except (AttributeError, ImportError, ValueError):  # GGUF, bare weights
        return None
    kinds = [kind_named((config.architectures or [""])[0]) for config in (before, after)]
    if kinds[1] not in ("classifier", "image_classifier"):
        return None
    if kinds[0] == kinds[1] and of_config(before).classes == of_config(after).classes:
        return None
    return of_config(after)


def of_config(config: Any) -> NewHead:
    """The head that a configuration speaks of."""
    images = kind_named((config.architectures or [""])[0]) == "image_classifier"
    names = sorted((int(i), str(name)) for i, name in config.id2label.items())
    classes = () if is_regression(config) else tuple(name for _, name in names)
    return NewHead(classes, images, getattr(config, "pad_token_id", None))


def load_with_head(loader: Loader, source: str, head: NewHead) -> tuple[nn.Module, tuple[str, ...]]:
    """A pretrained model with a new head, and the names of its parts that are new."""
    transformers = import_transformers()
    where, options = loader.place(source)
    config = config_of(where, options.get("gguf_file"))
    auto = transformers.AutoModelForSequenceClassification
    if head.images:
        auto = transformers.AutoModelForImageClassification
    try:
        with _quiet(transformers):
            model, info = auto.from_pretrained(
                where, dtype=loader.dtype or torch.float32, output_loading_info=True,
                ignore_mismatched_sizes=True, **head.settings(), **options,
            )  # fmt: skip
    except (OSError, RuntimeError, ValueError) as error:
        if "Unrecognized configuration class" in str(error):
            what = "images" if head.images else "texts"
            reason = f"transformers has no classifier of {what} for a {config.model_type}"
        else:
            reason = first_sentence(error)
        raise ValueError(f"{source} cannot get a head ({head}): {reason}") from error
    lacking = [str(key) for key in info["missing_keys"]]
    lacking += [str(k[0] if isinstance(k, tuple) else k) for k in info["mismatched_keys"]]
    body = f"{model.base_model_prefix}."
    if odd := sorted(key for key in lacking if key.startswith(body) and "pooler" not in key):
        raise ValueError(f"{source} lacks weights that a {type(model).__name__} has, or has them "
                         f"under other names: {shorten(odd)}. They would be random")  # fmt: skip
    new = _parts(lacking, body) or (_last_layer(model),)
    _draw(model, new)
    return model.to(loader.where()).eval(), new


def _suits(source: str, labels: Sequence[Any], numbers: Sequence[Any], rows: Rows) -> bool:
    """Whether a model has a head for labels already, or is not one to be given one unasked."""
    if source.endswith(".gguf") or (Path(source) / "adapter_config.json").is_file():
        return True
    config = config_of(str(Path(source).parent) if source.endswith(".safetensors") else source)
    kind = kind_named((config.architectures or [""])[0])
    if kind not in ("classifier", "image_classifier"):
        return kind == "causal_lm"
    if is_regression(config):
        return None not in numbers
    names = _names(rows) or distinct(labels)
    if all(index_in(config, label) is not None for label in names):
        known = {str(name) for name in config.id2label.values()}
        return len(names) == len(known) or set(names) <= known
    # Names of the data's own for classes that the model only counts.
    counted = all(str(name) == f"LABEL_{i}" for i, name in config.id2label.items())
    return counted and _names(rows) is not None and len(names) == len(config.id2label)


def _names(rows: Rows) -> list[str] | None:
    return rows.names if isinstance(rows, Table) else None


def _parts(keys: Sequence[str], body: str) -> tuple[str, ...]:
    """The modules that parameters belong to; those of one head are one part.

    >>> _parts(["head.dense.weight", "head.out.bias", "bert.pooler.dense.bias"], "bert.")
    ('bert.pooler.dense', 'head')
    """
    groups: dict[str, list[list[str]]] = {}
    for key in keys:
        path = key.split(".")[:-1]
        groups.setdefault(".".join(path) if key.startswith(body) else path[0], []).append(path)
    return tuple(sorted(".".join(_common(paths)) for paths in groups.values()))


def _common(paths: Sequence[list[str]]) -> list[str]:
    same = [len(set(step)) == 1 for step in zip(*paths, strict=False)]
    return paths[0][: same.index(False) if False in same else len(same)]


def _last_layer(model: nn.Module) -> str:
    """The linear layer that gives the outputs, of a head that had the right size already."""
    head = head_of(model)
    inside = [] if head is None else list(model.get_submodule(head).named_modules())
    for name, module in reversed(inside):
        if isinstance(module, nn.Linear):
            return f"{head}.{name}" if name else str(head)
    raise ValueError(f"cannot tell which part of {type(model).__name__} is its head")


@torch.no_grad()
def _draw(model: nn.Module, parts: Sequence[str]) -> None:
    """Random weights, the same whenever they are drawn."""
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


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the table of weights that are new: they are meant to be."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
