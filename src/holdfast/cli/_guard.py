"""Guards of all commands: where they write, which results they read, what they print."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.io.files import check_folder
from holdfast.report.words import plain

if TYPE_CHECKING:
    from holdfast.report.shown import Shown

__all__ = ["claim", "open_results", "say"]


def say(message: object, start: str = "holdfast") -> None:
    """Print one line on stderr, without control characters, over a progress bar in its way."""
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}{start}: {plain(str(message))}", file=sys.stderr)


def claim(
    folder: Path, inputs: Iterable[str] = (), *, page: bool = False, option: str = "--out"
) -> None:
    """Check before the work that its results can be written, and that they overwrite no input.

    Args:
        folder: the output directory.
        inputs: files and directories that are read; names that are neither are ignored.
        page: whether an HTML page will be drawn, which needs plotly.
        option: the option that gave the folder, for error messages.
    """
    check_folder(folder, option)
    for given in map(Path, inputs):
        if given.is_dir() and given.resolve() in (folder.resolve(), *folder.resolve().parents):
            raise ValueError(f"{option} {folder} must lie outside the input {given}")
    if page and importlib.util.find_spec("plotly") is None:
        raise ImportError('the HTML page needs the package plotly: pip install "holdfast[eval]"')


def open_results(file: Path) -> Shown:
    """Read the results of compare, measure or merge --sweep from their JSON file."""
    from holdfast.comparison.results import Results
    from holdfast.evaluate.report import ForgettingReport
    from holdfast.evaluate.sweep import Sweep

    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    # A sweep also has a tuned model, so its own key comes first.
    kinds: dict[str, type[Shown]] = {"points": Sweep, "runs": Results, "tuned": ForgettingReport}
    keys = value if isinstance(value, dict) else {}
    kind = next((kind for key, kind in kinds.items() if key in keys), None)
    if kind is None:
        raise ValueError(
            f"{file} was not written by holdfast: expected results.json of compare, report.json "
            "of measure or sweep.json of merge --sweep"
        )
    return kind.load(file)
