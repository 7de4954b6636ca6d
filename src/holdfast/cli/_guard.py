"""Shared by all commands: write and print their results."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.report.printing import printable, tell, tell_line

if TYPE_CHECKING:
    from holdfast.io.storage import Place
    from holdfast.report.shown import Shown


class Failed(Exception):  # noqa: N818 (what was done is kept)
    """A command has failed in part, not because of its input; the message is one sentence."""


def say(message: object, start: str = "holdfast") -> None:
    """Print one line on stderr, without control characters, over a progress bar in its way."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    tell_line(f"{start}: {message}", file=sys.stderr)


@contextlib.contextmanager
def log_lines() -> Iterator[None]:
    """Print what holdfast logs, such as the learning rate that it chose.

    What other libraries log is printed by themselves, here without control characters.
    """
    handler = logging.Handler()
    handler.emit = lambda record: say(  # type: ignore[method-assign]
        record.getMessage(), "note" if record.levelno < logging.WARNING else "warning"
    )
    logger, level = logging.getLogger("holdfast"), logging.getLogger("holdfast").level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # PEFT imports bitsandbytes, which warns about a faster kernel for 4-bit weights on CPUs.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    make = logging.getLogRecordFactory()

    def make_printable(*args: Any, **more: Any) -> logging.LogRecord:
        record = make(*args, **more)
        record.msg, record.args = printable(record.getMessage()), ()
        return record

    logging.setLogRecordFactory(make_printable)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
        logger.removeHandler(handler)
        logger.setLevel(level)


def check_page() -> None:
    """Check before the work that an HTML page can be drawn, which needs jinja2."""
    if importlib.util.find_spec("jinja2") is None:
        raise ImportError('the HTML page needs the package jinja2: pip install "holdfast[eval]"')


def show(shown: Shown, options: argparse.Namespace, out: Place | None, *files: str) -> None:
    """Write results to these files of ``out``, the page last, and print them."""
    forms = {"json": shown.to_json, "md": shown.to_markdown, "html": shown.to_html}
    if out is not None:
        for file in files:
            (out / file).write_text(forms[file.rpartition(".")[2]]())
    if options.json:
        tell(shown.to_json(), end="")
    elif vars(options).get("markdown"):
        tell(shown.to_markdown(), end="")
    else:
        shown.to_terminal()
    if out is not None:
        name = files[-1].partition(".")[0].capitalize()
        tell_line(f"{name}: {(out / files[-1]).name}", file=sys.stderr)
