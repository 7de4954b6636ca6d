"""Optional packages, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any


def require(package: str, *, extra: str | None = None, what: str) -> Any:
    """Import an optional package, or say how to install it.

    Args:
        package: the module to import, such as ``"peft"`` or ``"lm_eval.tasks"``.
        extra: the extra of holdfast that installs it; None if the package is installed by name.
        what: the feature that needs the package; the subject of the error message.

    >>> require("peft_of_the_future", extra="peft", what="LoRA")
    Traceback (most recent call last):
    ImportError: LoRA needs the package peft_of_the_future: pip install "holdfast[peft]"
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        command = f'"holdfast[{extra}]"' if extra else name
        raise ImportError(f"{what} needs the package {name}: pip install {command}") from error
