"""Multimodal language models, which also read and write texts without images."""

import inspect
from typing import Any

from torch import nn


def is_text_generator(cls: type, config: Any) -> bool:
    """Whether a class of transformers is a decoder that reads texts, with images if it gets any."""
    if not cls.__name__.endswith("ForConditionalGeneration"):
        return False
    takes = inspect.signature(cls.forward).parameters  # type: ignore[attr-defined]
    optional = "pixel_values" in takes and takes["pixel_values"].default is None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    encodes = any(getattr(c, "is_encoder_decoder", False) for c in (config, text))
    return optional and "input_ids" in takes and not encodes


def text_part(model: nn.Module) -> nn.Module:
    """The decoder of a multimodal language model; any other model is returned as it is."""
    ask: Any = getattr(model, "get_decoder", None)
    if not callable(ask) or not is_text_generator(type(model), getattr(model, "config", None)):
        return model
    decoder: nn.Module = ask()
    return decoder


def freeze_other_parts(model: nn.Module) -> None:
    """Freeze the parts of a multimodal language model that texts do not pass through."""
    if (decoder := text_part(model)) is model:
        return
    outputs: Any = model.get_output_embeddings()  # type: ignore[operator]
    read = {*decoder.parameters(), *outputs.parameters()}
    for parameter in model.parameters():
        if parameter not in read:
            parameter.requires_grad_(False)
