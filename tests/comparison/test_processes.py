"""Worker processes: values, errors, progress and deaths, each of one call alone."""

import os
import signal
import struct
import time
from collections import deque

import pytest
import torch

from holdfast.comparison import processes
from holdfast.comparison.processes import call_in_processes, device_failed, report_progress


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


def wait_for(number):
    """Return when so many calls have shared the device; a process hears of them after a moment.

    The number of calls at this moment may be smaller again: the other call may have ended.
    """
    until = time.monotonic() + 30
    while processes.at_a_time() < number and time.monotonic() < until:
        time.sleep(0.01)
    return processes.at_a_time()


def share(kind, number):
    if kind == "waits":
        return wait_for(number), os.getpid()
    seen = wait_for(number)
    raise torch.OutOfMemoryError("of the GPU") if kind == "memory" else KeyError(seen)


def shared(calls, workers, admits=lambda gpu, running: True):
    return [*call_in_processes(
        share, deque(calls), caller="compare", jobs=2, workers=workers, admits=admits,
    )]  # fmt: skip


@pytest.mark.usefixtures("forked_workers")
def test_a_process_knows_how_many_share_its_device():
    ended = shared([("waits", 2), ("waits", 2)], [None, None])
    assert [one.value[0] for one in ended] == [2, 2]
    assert [one.at_a_time for one in ended] == [2, 2]
    assert processes.at_a_time() is None  # in no worker process


@pytest.mark.usefixtures("forked_workers")
def test_only_admitted_calls_start_and_a_warm_process_is_used_again():
    limits = []

    def one_at_a_time(gpu, running):
        limits.append(running)
        return running < 1

    ended = shared([("waits", 1)] * 3, [None] * 3, one_at_a_time)
    assert [one.at_a_time for one in ended] == [1] * 3
    assert len({one.value[-1] for one in ended}) == 1
    assert max(limits) == 1


@pytest.mark.usefixtures("forked_workers")
def test_a_failure_of_the_device_beside_others_is_told_apart():
    beside = {one.call[0]: one for one in shared([("memory", 2), ("raises", 2)], [None, None])}
    assert beside["memory"].disturbed
    assert not beside["raises"].disturbed
    (alone,) = shared([("memory", 1)], [None])
    assert alone.device_failed
    assert not alone.disturbed


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (ValueError("CUDA is a word"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_failures_of_a_device(error, expected):
    assert device_failed(error) == expected
    outer = ValueError("no")
    outer.__cause__ = error
    assert device_failed(outer) == expected
