"""How far long work is: bars with the time left on a terminal, else a line for each part."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from holdfast.report.words import seconds

__all__ = ["Progress"]

#: Seconds between two lines about a part under way, where there is no terminal.
QUIET = 30.0


class Progress:
    """Parts of a long work, some of them under way at once. All of it goes to stderr.

    Args:
        total: how many parts there are.
        what: they are: ``"runs"``.
        done: how many were finished before.

    Example:
        >>> with Progress(2, "runs") as progress:
        ...     progress.update("recadam, seed 0", 20, 40)
        ...     progress.finished("recadam, seed 0", "done")
    """

    def __init__(self, total: int, what: str, done: int = 0) -> None:
        self.total, self.done, self.before = total, done, done
        self.shares: dict[str, float] = {}
        self.begin = self.said = time.monotonic()
        self.bars = _Bars(total, what, done) if sys.stderr.isatty() and _has_rich() else None

    def __enter__(self) -> Progress:
        if self.bars:
            self.bars.shown.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self.bars:
            self.bars.shown.stop()

    def update(self, name: str, done: int, total: int, doing: str = "") -> None:
        """A part is under way, and so far."""
        self.shares[name] = max(self.shares.get(name, 0.0), done / max(1, total))
        if self.bars:
            self.bars.update(name, done, total, doing)
            self.bars.overall(self.done, sum(self.shares.values()))
        elif time.monotonic() - self.said > QUIET and 0 < done < total:
            self._say(f"{name}: {done}/{total}")

    def finished(self, name: str, text: str) -> None:
        """A part is finished: a line that stays says how."""
        self.shares.pop(name, None)
        self.done += 1
        line = f"[{self.done}/{self.total}] {name}: {text}"
        if self.bars:
            self.bars.finished(name, line)
            self.bars.overall(self.done, sum(self.shares.values()))
            return
        self._say(line)

    def _say(self, line: str) -> None:
        """A line, and how long the rest takes if it goes on like this."""
        self.said = time.monotonic()
        done = self.done + sum(self.shares.values())
        if done < self.total and done > self.before:
            each = (self.said - self.begin) / (done - self.before)
            line += f" (about {seconds(each * (self.total - done))} left)"
        print(line, file=sys.stderr)


class _Bars:
    """One bar for all parts, and one for each that is under way."""

    def __init__(self, total: int, what: str, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.shown: Any = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            speed_estimate_period=3600,
        )
        self.total = total
        self.all = self.shown.add_task(what, total=total, completed=done, count=f"{done}/{total}")
        self.parts: dict[str, Any] = {}

    def overall(self, done: int, under_way: float) -> None:
        """What is under way counts for the time left."""
        count = f"{done}/{self.total}"
        self.shown.update(self.all, completed=done + under_way, count=count)

    def update(self, name: str, done: int, total: int, doing: str) -> None:
        if name not in self.parts:
            self.parts[name] = self.shown.add_task(name, total=total, count="")
        count = f"{doing} {done}/{total}".strip() if total > 1 else doing
        self.shown.update(self.parts[name], completed=done, total=total, count=count)

    def finished(self, name: str, line: str) -> None:
        if name in self.parts:
            self.shown.remove_task(self.parts.pop(name))
        self.shown.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _has_rich() -> bool:
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        return False
    return True
