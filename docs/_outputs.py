"""The cells of a page and what they print: a ``text`` block right after a Python one.

``python docs/_outputs.py docs/walkthrough.md`` runs the cells of a page in order and writes what
they print into it. ``tests/test_docs.py`` runs all pages and compares: words must be the same, and
figures nearly so, since the last digits of a training depend on the machine.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"( *)(`{3,})([^`]*)")
_REASON = re.compile(r"<!-- not run: .+ -->")
_NUMBER = re.compile(r"[-+−]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Cell:
    """A Python block that runs.

    Attributes:
        line: of the page, at which the code begins.
        code: without the indentation of the block.
        shown: the output below it; None if the page shows none.
        lines: of the page that hold the output, as a slice of them.
    """

    line: int
    code: str
    shown: str | None = None
    lines: slice | None = None


def cells_of(text: str) -> list[Cell]:
    """The cells of a page, in order."""
    found: list[Cell] = []
    opening, above, after_cell = None, "", False
    for number, line in enumerate(text.split("\n"), 1):
        fence = _FENCE.fullmatch(line)
        if opening is None and fence:
            opening, inside, begin = fence, [], number + 1
        elif opening is not None and line.strip() == opening[2]:
            kind, *words = re.findall(r"[\w-]+", opening[3]) or [""]
            content = textwrap.dedent("\n".join(inside))
            if kind == "text" and after_cell:
                last = found.pop()
                found.append(Cell(last.line, last.code, content, slice(begin - 1, number - 1)))
            after_cell = kind == "python" and "no-run" not in words
            if after_cell:
                found.append(Cell(begin, content))
            elif kind == "python" and not _REASON.search(above):
                raise ValueError(f"line {begin}: <!-- not run: why --> is missing")
            opening = None
        elif opening is not None:
            inside.append(line)
        elif line.strip():
            above, after_cell = line, False
    return found


def run(cell: Cell, page: Path, names: dict[str, object]) -> str:
    """What a cell prints, among the names of those before it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # The lines of a traceback are those of the page.
        exec(compile("\n" * (cell.line - 1) + cell.code, str(page), "exec"), names)
    return printed.getvalue().strip("\n")


def alike(shown: str, printed: str, tolerance: float = 0.1) -> bool:
    """Whether the words are the same, and each figure is near: within this share of it.

    One unit of the last digit that is shown is always allowed. Lines may be broken elsewhere.
    """
    shown, printed = (" ".join(text.split()) for text in (shown, printed))
    if _NUMBER.sub("#", shown) != _NUMBER.sub("#", printed):
        return False
    pairs = zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True)
    return all(_near(a.replace(",", ""), b.replace(",", ""), tolerance) for a, b in pairs)


def _near(shown: str, printed: str, tolerance: float) -> bool:
    a, b = (float(text.replace("−", "-")) for text in (shown, printed))
    unit = 10.0 ** -len(shown.partition(".")[2]) if "e" not in shown else 0.0
    return abs(a - b) <= max(tolerance * abs(a), 1.01 * unit)


def main(page: Path) -> None:
    """Write what the cells of a page print into it."""
    text = page.read_text(encoding="utf-8")
    lines, printed, names = text.split("\n"), [], {"__name__": "__page__"}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOLDFAST_CACHE"] = f"{folder}/cache"
        os.chdir(folder)
        try:
            for cell in cells_of(text):
                printed.append((cell, run(cell, page, names)))
                print(printed[-1][1], file=sys.stderr, flush=True)
        finally:
            os.chdir(here)
    for cell, output in reversed(printed):
        if cell.lines is not None:
            wrapped = [
                textwrap.wrap(line, 88) or [""] if len(line) > 88 else [line]
                for line in output.split("\n")
            ]
            lines[cell.lines] = [part for some in wrapped for part in some]
    page.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
