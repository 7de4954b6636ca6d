"""The time limit of a search, counted over all its sessions.

A session is one call of ``tune`` on one machine. The study holds the beginning and the last sign of
life of each, so the time counts that passed while at least one session was at work: a pause between
two sessions is free, and machines that work at the same time count once.
"""

import secrets
import time
from collections.abc import Iterable
from typing import Any

#: Seconds between two signs of life.
EVERY = 5.0
#: Seconds at the end of a budget for the report, and its largest share of the budget.
REPORT, LARGEST = 15.0, 0.1


class Clock:
    """The clock of one session.

    Attributes:
        end: the time at which training must end; None without a limit.
    """

    def __init__(self, study: Any, budget: float | None) -> None:
        self.study, self.budget = study, budget
        self.name, self.begin, self.said = f"session {secrets.token_hex(4)}", time.time(), 0.0
        self.before = spent(study)
        self.end: float | None = None
        if budget is not None:
            self.end = self.begin + budget - self.before - min(REPORT, LARGEST * budget)

    @property
    def left(self) -> float | None:
        """The seconds left for training; None without a limit."""
        return None if self.end is None else max(0.0, self.end - time.time())

    @property
    def is_over(self) -> bool:
        return self.left == 0.0

    def tick(self, *, now: bool = False) -> None:
        """Write a sign of life, if one is due."""
        if now or time.time() - self.said > EVERY:
            self.said = time.time()
            self.study.set_user_attr(self.name, [self.begin, self.said])


def spent(study: Any) -> float:
    """The seconds that all sessions of a study have taken."""
    sessions = [v for name, v in study.user_attrs.items() if name.startswith("session ")]
    return covered(sessions)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of all spans together, where overlaps count once.

    >>> covered([(0, 10), (5, 20), (30, 31)])
    21.0
    """
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
