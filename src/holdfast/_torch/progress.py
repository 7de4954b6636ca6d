"""Progress bars: tqdm if it is installed, otherwise a line of text every ten seconds."""

from __future__ import annotations

import sys
import time
from typing import Any


def progress_bar(total: int | None, description: str, *, shown: bool, unit: str = "sample") -> Any:
    """A progress bar with ``update(n)`` and ``close()``."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _Lines(total, description, shown)
    return tqdm(total=total, desc=description, disable=not shown, unit=unit)


class _Lines:
    """Prints the progress and the remaining time to stderr."""

    def __init__(self, total: int | None, description: str, shown: bool) -> None:
        self.total, self.description, self.shown = total, description, shown
        self.done, self.begin = 0, time.monotonic()
        self.last = self.begin

    def update(self, n: int) -> None:
        self.done += n
        now = time.monotonic()
        if self.shown and now - self.last > 10:
            self.last = now
            left = ""
            if self.total and self.done:
                seconds = (now - self.begin) / self.done * (self.total - self.done)
                left = f" of {self.total}, about {seconds:.0f} s left"
            print(f"{self.description}: {self.done}{left}", file=sys.stderr)

    def close(self) -> None:
        pass
