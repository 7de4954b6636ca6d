"""What a transformers model predicts, by its class; and its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from torch import nn

from holdfast._torch.adapters import without_peft

__all__ = ["Kind", "config_of", "is_headless", "kind_named", "kind_of"]

Kind = Literal["causal_lm", "masked_lm", "classifier", "image_classifier", "other"]
_KINDS: dict[str, Kind] = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForMaskedLM": "masked_lm",
    "ForSequenceClassification": "classifier",
    "ForImageClassification": "image_classifier",
}


def kind_of(model: nn.Module) -> Kind:
    """What a model predicts, by the name of its class."""
    inner = without_peft(model)
    kind = kind_named(type(inner).__name__)
    config = getattr(inner, "config", None)
    encodes = hasattr(inner, "bert") or hasattr(inner, "roberta")
    if kind == "causal_lm" and encodes and not getattr(config, "is_decoder", True):
        return "other"  # it sees what comes after
    return kind


def is_headless(model: nn.Module) -> bool:
    """Whether a transformers model is a body alone: its class is called ``…Model``."""
    name = type(model).__name__
    return name.endswith("Model") and kind_named(name) == "other"


def kind_named(name: str) -> Kind:
    """What a model of this class predicts."""
    if name.startswith("XLNet"):  # which does not read from left to right
        return "other"
    return next((kind for ending, kind in _KINDS.items() if name.endswith(ending)), "other")


def config_of(where: str, gguf_file: str | None = None) -> Any:
    """A model's configuration; ValueError says in a sentence why there is none."""
    transformers = import_transformers()
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    if gguf_file is None and Path(where).is_dir() and not (Path(where) / "config.json").is_file():
        raise ValueError(f"{where} has no config.json: of bare weights only the drift is measured")
    if Path(where).is_absolute() and not Path(where).exists():
        raise ValueError(f"there is no model in {where}: no such directory")
    try:
        return transformers.AutoConfig.from_pretrained(where, **options)
    except Exception as error:  # a wrong value in it is told by an exception of its own
        raise ValueError(f"{where} is no model: {first_sentence(error)}") from error


def first_sentence(error: BaseException) -> str:
    """What an error says, without the advice that follows."""
    return str(error).strip().split("\n")[0][:300]


def import_transformers() -> Any:
    """The package, or an error that says how to get it."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            'running the models needs transformers: pip install "holdfast[eval]"; without it '
            "only the drift of weights is measured"
        ) from error
    return transformers
