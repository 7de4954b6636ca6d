"""The configuration of a transformers model, and what its class predicts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from torch import nn

from holdfast._torch.adapters import without_peft
from holdfast._torch.imports import require

__all__ = ["Kind", "ModelSource", "config_of", "is_adapter", "is_headless", "kind_named", "kind_of"]

#: A directory, file or hub name of a model, or a module in memory.
ModelSource = str | os.PathLike[str] | nn.Module
Kind = Literal["causal_lm", "masked_lm", "classifier", "image_classifier", "other"]
_KINDS: dict[str, Kind] = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForMaskedLM": "masked_lm",
    "ForSequenceClassification": "classifier",
    "ForImageClassification": "image_classifier",
}


def kind_of(model: nn.Module) -> Kind:
    """Return what a model predicts, judged by the name of its class."""
    inner = without_peft(model)
    kind = kind_named(type(inner).__name__)
    config = getattr(inner, "config", None)
    encodes = hasattr(inner, "bert") or hasattr(inner, "roberta")
    if kind == "causal_lm" and encodes and not getattr(config, "is_decoder", True):
        return "other"  # its attention is bidirectional
    return kind


def kind_named(name: str) -> Kind:
    """Return what a model of this class name predicts."""
    if name.startswith("XLNet"):  # it does not read from left to right
        return "other"
    return next((kind for ending, kind in _KINDS.items() if name.endswith(ending)), "other")


def kind_of_config(config: Any) -> Kind:
    """Return what the model of a configuration predicts."""
    return kind_named((config.architectures or [""])[0])


def is_headless(model: nn.Module) -> bool:
    """Whether a transformers model has no head: its class is named ``…Model``."""
    name = type(model).__name__
    return name.endswith("Model") and kind_named(name) == "other"


def is_adapter(source: ModelSource) -> bool:
    """Whether a source is the directory of a PEFT adapter."""
    return not isinstance(source, nn.Module) and (Path(source) / "adapter_config.json").is_file()


def config_of(where: str, gguf_file: str | None = None) -> Any:
    """Load a model's configuration. A ValueError gives the reason in one sentence."""
    transformers = import_transformers()
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    if gguf_file is None and Path(where).is_dir() and not (Path(where) / "config.json").is_file():
        raise ValueError(f"{where} has no config.json: without it only the drift can be measured")
    if Path(where).is_absolute() and not Path(where).exists():
        raise ValueError(f"no such model directory: {where}")
    try:
        return transformers.AutoConfig.from_pretrained(where, **options)
    except Exception as error:  # invalid values in the file raise many types
        raise ValueError(f"{where} is not a model: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error message."""
    return str(error).strip().split("\n")[0][:300]


def import_transformers() -> Any:
    """Import transformers, or say how to install it."""
    return require("transformers", extra="eval", what="running models (all but the drift)")
