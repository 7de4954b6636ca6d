"""Run the Python blocks of a page; a ``text`` block right after one shows what it prints.

``python docs/_outputs.py docs/walkthrough.md`` updates the outputs of a page.
``tests/test_docs.py`` runs all pages and compares: words must be equal and figures close, because
the last digits of a training depend on the machine. A block that starts with
``{.python .no-run}`` is not run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

_BLOCK = re.compile(
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```\n"
    r"(?:\n*(?P<fence>(?P=indent)```text\n)(?P<shown>.*?)^(?P=indent)```\n)?",
    re.DOTALL | re.MULTILINE,
)
_NUMBER = re.compile(r"[-+−]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


def outputs(page: Path) -> Iterator[tuple[re.Match[str], int, str]]:
    """Run the blocks of a page in order: each block, its line and what it prints."""
    text, names = page.read_text(encoding="utf-8"), {"__name__": "__main__"}
    for block in _BLOCK.finditer(text):
        line, printed = text.count("\n", 0, block.start("code")), io.StringIO()
        code = "\n" * line + textwrap.dedent(block["code"])  # tracebacks show the page's lines
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), names)
        yield block, line + 1, printed.getvalue().strip("\n")


def alike(shown: str, printed: str, tolerance: float = 0.1) -> bool:
    """Whether words are equal and figures differ by at most 10 % or one unit of the last digit."""
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
    """Write the outputs of its blocks into a page."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOLDFAST_CACHE"] = f"{folder}/cache"
        os.chdir(folder)
        found = list(outputs(page))
        os.chdir(page.parent)
    for block, _, printed in reversed(found):
        if block["shown"] is not None:
            lines = [textwrap.fill(line, 88) for line in printed.split("\n")]
            wrapped = textwrap.indent("\n".join(lines) + "\n", block["indent"])
            text = text[: block.start("shown")] + wrapped + text[block.end("shown") :]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
