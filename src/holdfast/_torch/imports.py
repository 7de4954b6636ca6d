"""Optional packages, imported when they are needed."""

import importlib
from typing import Any


def require(package: str, *, extra: str | None = None, what: str) -> Any:
    """Import an optional package or submodule, or say which ``extra`` of holdfast installs it.

    ``what`` needs the package: it is the subject of the error message.

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
