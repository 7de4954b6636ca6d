"""Progress of long work: bars on a terminal and in notebooks, elsewhere a line now and then."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from typing import Any

#: Seconds between two lines of progress.
QUIET = 30.0


class Lines:
    """Stands in for a bar: writes a line if no bar has written one for a while.

    ``said`` is when the last line of any bar was written, or when the first bar began.
    """

    said: float | None = None

    def __init__(self, total: int | None, description: str, *, shown: bool, unit: str) -> None:
        self.total, self.description, self.unit = total, description, unit
        self.shown = shown and sys.stderr is not None  # it may be closed
        self.begin, self.done = time.monotonic(), 0.0
        Lines.said = self.begin if Lines.said is None else Lines.said

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, n: float = 1) -> None:
        self.done += n
        now = time.monotonic()
        if not self.shown or Lines.said is None or now - Lines.said < QUIET:
            return
        Lines.said = now
        line = f"{self.description}: {self.done:,.0f}"
        line += f" {self.unit}s" if self.total is None else f" of {self.total:,} {self.unit}s"
        if self.total is not None and self.done >= self.total / 10:  # before, it is only a guess
            left = (now - self.begin) / self.done * (self.total - self.done)
            line += f", about {left:.0f} s left"
        # Names of files must not control the terminal that shows the log.
        sys.stderr.write("".join(c if c.isprintable() else " " for c in line) + "\n")

    def close(self) -> None: ...


def progress_bar(total: int | None, description: str, *, shown: bool, unit: str = "sample") -> Any:
    """A progress bar with ``update(n)``, as a context manager."""
    bars = _bars()
    if bars is None:
        return Lines(total, description, shown=shown, unit=unit)
    return bars(total=total, desc=description, disable=not shown, unit=unit)


def _bars() -> Any:
    """The bars of tqdm: widgets in a notebook with ipywidgets, else text; None if neither fits."""
    in_notebook = _in_notebook()
    if not in_notebook and not (sys.stderr and sys.stderr.isatty()):
        return None
    try:
        if in_notebook and importlib.util.find_spec("ipywidgets"):
            return importlib.import_module("tqdm.notebook").tqdm
        return importlib.import_module("tqdm").tqdm  # tqdm.auto would warn without ipywidgets
    except ImportError:  # the core needs torch, safetensors and numpy only
        return None


def _in_notebook() -> bool:
    """Whether the process is a kernel of a notebook; others may have imported its packages."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "IPKernelApp" in getattr(shell, "config", ())
