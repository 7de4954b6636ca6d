"""Do programs that a model wrote pass their tests? Each runs in a process of its own, with limits.

    python -I _execute.py < programs.json > verdicts.json

The input is a list of programs, the output a list of true and false. A program has 3 seconds and
1 GB, writes no files, and runs in an empty directory. This limits accidents, not attacks.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time

SECONDS, MEMORY = 3, 1 << 30
AT_ONCE = 4


def start(program: str) -> int:
    """Run a program in a child; returns the number of the process."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        with open(os.devnull, "r+b") as nothing:
            for stream in (0, 1, 2):
                os.dup2(nothing.fileno(), stream)
        for limit, most in (
            (resource.RLIMIT_CPU, SECONDS),
            (resource.RLIMIT_AS, MEMORY),
            (resource.RLIMIT_FSIZE, 0),
        ):
            resource.setrlimit(limit, (most, most))
        exec(compile(program, "program", "exec"), {"__name__": "program"})
    except BaseException:
        os._exit(1)
    os._exit(0)


def run_all(programs: list[str]) -> list[bool]:
    """Whether each program ends without an error and in time."""
    passed, waiting = [False] * len(programs), list(enumerate(programs))[::-1]
    running: dict[int, tuple[int, float]] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, program = waiting.pop()
            running[start(program)] = (number, time.monotonic())
        for child, (number, begin) in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                passed[number] = status == 0
                del running[child]
            elif time.monotonic() - begin > 2 * SECONDS:  # one that sleeps uses no processor time
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.001)
    return passed


if __name__ == "__main__":
    given = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        found = run_all(given)
        os.chdir("/")
    json.dump(found, sys.stdout)
