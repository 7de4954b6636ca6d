"""Worker processes: values, errors, progress and deaths, each of one call alone."""

import os
import signal
from collections import deque

import pytest

from holdfast.comparison.processes import call_in_processes, report_progress


def work(kind, number):
    report_progress(kind, number)
    if kind == "raises":
        raise KeyError(number)
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return number + 1, os.environ.get("OMP_NUM_THREADS")


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_a_call_returns_raises_or_dies_and_the_others_go_on(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    calls = deque([("returns", 1), ("dies", 2), ("raises", 3), ("returns", 4)])
    heard, ended = [], {}
    for one in call_in_processes(
        work, calls, caller="compare", jobs=2, on_progress=lambda call, *m: heard.append((call, m))
    ):
        ended[one.call] = one
        if one.call == ("dies", 2):
            calls.append(("returns", 5))  # calls may be added meanwhile
    assert [call for call, one in ended.items() if one.died] == [("dies", 2)]
    assert "KeyError: 3" in ended["raises", 3].error
    values = {call[1]: one.value for call, one in ended.items() if one.value}
    assert values == {number: (number + 1, "1") for number in (1, 4, 5)}
    reported = {call for call, message in heard if call == message}
    assert reported >= ended.keys() - {("dies", 2)}  # its message may be lost with it
