"""Multimodal language models, which also read and write texts without images."""

import inspect
from typing import Any


def is_text_generator(cls: type, config: Any) -> bool:
    """Whether a class of transformers is a decoder that reads texts, with images if it gets any."""
    if not cls.__name__.endswith("ForConditionalGeneration"):
        return False
    takes = inspect.signature(cls.forward).parameters  # type: ignore[attr-defined]
    optional = "pixel_values" in takes and takes["pixel_values"].default is None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return optional and "input_ids" in takes and not getattr(text, "is_encoder_decoder", False)
