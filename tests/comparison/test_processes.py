"""Worker processes: values, errors, progress and deaths, each of one call alone."""

import os
import signal
import struct
from collections import deque

import pytest

from holdfast.comparison import processes
from holdfast.comparison.processes import call_in_processes, report_progress


def work(kind, number):
    report_progress(kind, number)
    if kind == "raises":
        raise KeyError(number)
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "dies in a message":
        os.write(processes._pipe.fileno(), struct.pack("!i", 1000) + b"the first bytes")
        os.kill(os.getpid(), signal.SIGKILL)
    return number + 1, os.environ.get("OMP_NUM_THREADS")


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_a_call_returns_raises_or_dies_and_the_others_go_on(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    calls = deque(
        [("returns", 1), ("dies", 2), ("raises", 3), ("returns", 4), ("dies in a message", 6)]
    )
    heard, ended = [], {}
    for one in call_in_processes(
        work,
        calls,
        caller="compare",
        jobs=2,
        workers=[None, None],
        on_progress=lambda call, *m: heard.append((call, m)),
    ):
        ended[one.call] = one
        if one.call == ("dies", 2):
            calls.append(("returns", 5))  # calls may be added meanwhile
    deaths = {call for call, one in ended.items() if one.died}
    assert deaths == {("dies", 2), ("dies in a message", 6)}
    assert "KeyError: 3" in ended["raises", 3].error
    values = {call[1]: one.value for call, one in ended.items() if one.value}
    assert values == {number: (number + 1, "1") for number in (1, 4, 5)}
    reported = {call for call, message in heard if call == message}
    assert reported >= ended.keys() - deaths  # their messages may be lost with them
