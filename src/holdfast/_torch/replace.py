"""Replace an attribute of an object, such as a method, within a block."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of the object itself, and afterwards restore it or the one of its class.

    Example:
        >>> number = type("Number", (), {"double": lambda self: 2})()
        >>> with replaced(number, "double", lambda: 4):
        ...     print(number.double())
        4
        >>> number.double(), vars(number)
        (2, {})
    """
    before = {name: vars(owner)[name]} if name in vars(owner) else {}
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(before)
