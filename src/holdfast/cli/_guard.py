"""Shared by all commands: check where they write, write and print their results."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.report.words import plain

if TYPE_CHECKING:
    from holdfast.io.storage import Place
    from holdfast.report.shown import Shown


def say(message: object, start: str = "holdfast") -> None:
    """Print one line on stderr, without control characters, over a progress bar in its way."""
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}{start}: {plain(str(message))}", file=sys.stderr)


@contextlib.contextmanager
def log_lines() -> Iterator[None]:
    """Print what the library logs, such as the learning rate that it chose."""
    handler = logging.Handler()
    handler.emit = lambda record: say(  # type: ignore[method-assign]
        record.getMessage(), "note" if record.levelno < logging.WARNING else "warning"
    )
    logger, level = logging.getLogger("holdfast"), logging.getLogger("holdfast").level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def claim(
    folder: Path, inputs: Iterable[str] = (), *, page: bool = False, option: str = "--out"
) -> None:
    """Check before the work that its results can be written, and that they overwrite no input.

    Inputs that are neither files nor directories are ignored. ``page`` is whether an HTML page will
    be drawn, which needs plotly.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{option} must be a directory, but {folder} is a file")
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder} cannot be written: no permission in {above}")
    for given in map(Path, inputs):
        if given.is_dir() and given.resolve() in (folder.resolve(), *folder.resolve().parents):
            raise ValueError(f"{option} {folder} must be outside the input {given}")
    if page and importlib.util.find_spec("plotly") is None:
        raise ImportError('the HTML page needs the package plotly: pip install "holdfast[eval]"')


@contextlib.contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove a new output directory at the end if the work wrote nothing into it."""
    existed = folder.exists()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it does not exist, or is not empty
            if not existed:
                folder.rmdir()


def show(shown: Shown, options: argparse.Namespace, out: Place | None, *files: str) -> None:
    """Write results to these files of ``out``, the page last, and print them."""
    forms = {"json": shown.to_json, "md": shown.to_markdown, "html": shown.to_html}
    if out is not None:
        for file in files:
            (out / file).write_text(forms[file.rpartition(".")[2]]())
    if options.json:
        print(shown.to_json(), end="")
    elif vars(options).get("markdown"):
        print(shown.to_markdown(), end="")
    else:
        shown.to_terminal()
    if out is not None:
        name = files[-1].partition(".")[0].capitalize()
        print(f"{name}: {(out / files[-1]).name}", file=sys.stderr)
