"""Progress of long work: bars on a terminal, else one line per part."""

from __future__ import annotations

import sys
import time
from typing import Any

from holdfast._torch.progress import QUIET
from holdfast.report.printing import tell_line
from holdfast.report.words import plain, seconds


class Progress:
    """Show the progress of several parts, which may run at the same time, on stderr.

    ``what`` names the parts, ``done`` of which were finished before. ``total`` is None if it is not
    known, and ``until`` is the time at which they must end, if there is a limit.

    Example:
        >>> with Progress(2, "runs") as progress:
        ...     progress.update("recadam, seed 0", 20, 40)
        ...     progress.finished("recadam, seed 0", "done")
    """

    def __init__(
        self, total: int | None, what: str, done: int = 0, *, until: float | None = None
    ) -> None:
        self.total, self.done, self.before, self.until = total, done, done, until
        self.shares: dict[str, float] = {}
        self.begin = self.said = time.monotonic()
        self.bars: Any = _make_bars() if sys.stderr.isatty() else None
        self.tasks: dict[str, Any] = {}
        if self.bars:
            self.all = self.bars.add_task(what, total=total, completed=done, count="")

    def __enter__(self) -> Progress:
        if self.bars:
            self._show_all()
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars:
            self.bars.stop()

    def update(self, name: str, done: int, total: int, doing: str = "") -> None:
        self.shares[name] = max(self.shares.get(name, 0.0), done / max(1, total))
        if self.bars:
            if name not in self.tasks:
                self.tasks[name] = self.bars.add_task(plain(name), count="")
            count = plain(f"{doing} {done}/{total}") if total > 1 else doing
            self.bars.update(self.tasks[name], completed=done, total=total, count=count)
            self._show_all()
        elif time.monotonic() - self.said > QUIET and 0 < done < total:
            self._say(f"{name}: {done}/{total}")

    def finished(self, name: str, text: str) -> None:
        self.shares.pop(name, None)
        self.done += 1
        if name in self.tasks:
            self.bars.remove_task(self.tasks.pop(name))
        self.note(name, text)

    def note(self, name: str, text: str) -> None:
        """Print a line about a part."""
        line = f"[{self._count()}] {name}: {text}"
        if not self.bars:
            self._say(line)
            return
        if self.until is not None:
            line += self._left()
        self.bars.console.print(plain(line), markup=False, highlight=False, soft_wrap=True)
        self._show_all()

    def _show_all(self) -> None:
        """Update the bar of all parts; running parts count for the time left."""
        done = self.done + sum(self.shares.values())
        self.bars.update(self.all, completed=done, count=self._count())

    def _say(self, line: str) -> None:
        self.said = time.monotonic()
        tell_line(line + self._left(), file=sys.stderr)

    def _count(self) -> str:
        return str(self.done) if self.total is None else f"{self.done}/{self.total}"

    def _left(self) -> str:
        """The time left: at the speed so far, or until the limit if that comes first."""
        done, left = self.done + sum(self.shares.values()), []
        if self.total is not None and self.before < done < self.total:
            each = (time.monotonic() - self.begin) / (done - self.before)
            left.append(each * (self.total - done))
        if self.until is not None:
            left.append(max(0.0, self.until - time.time()))
        return f" (about {seconds(min(left))} left)" if left else ""


def _make_bars() -> Any:
    """Return the bars of rich, or None if it is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
    ]
    return Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True,
        speed_estimate_period=3600,
    )  # fmt: skip
