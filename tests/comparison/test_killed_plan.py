"""A plan that is killed at random moments and continued has the results of an undisturbed one.

A kill comes a fraction of a second after a random number of logged rows.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comparison.small_plan import make_plan, settings_of, what_must_agree

pytest.importorskip("transformers", reason="the hf extra is not installed")

UPDATES = 40
ROWS = 21  # of the log of a run: before the first update, and every second one


def start(plan, out, *more):
    command = "import sys; from holdfast.cli import main; sys.exit(main(sys.argv[1:]))"
    with open(out.with_suffix(".stderr"), "a") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", command, "compare", *settings_of(plan), f"--out={out}", *more],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def said(out):
    return out.with_suffix(".stderr").read_text()


def rows_done(out):
    """How far the plan is, in rows of logs; the log of a finished run is gone."""
    done = ROWS * len(list(out.glob("runs/*/result.json")))
    for log in out.glob("runs/*/history.jsonl"):
        try:
            done += log.read_text().count("\n")
        except FileNotFoundError:
            done += ROWS
    return done


def wait_until(true, process, out):
    begun = time.monotonic()
    while not true():
        assert process.poll() is None, said(out)[-3000:]
        assert time.monotonic() - begun < 300
        time.sleep(0.002)


def children_of(pid):
    """The processes that a process has started, and theirs."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                child = int(stat.parent.name)
                found += [child, *children_of(child)]
        except (OSError, ValueError):
            continue
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_kills(tmp_path, seed):
    draw, kills, seeds = random.Random(seed), 10, (0, 1)
    recipes = ("standard", "recadam+wise-ft", "flow", "ewc", "lora", "sfa")
    plan = make_plan(tmp_path, recipes=recipes, seeds=seeds, updates=UPDATES)
    out = tmp_path / "cut"
    for number in range(kills):
        process = start(plan, out, "--jobs=2")
        enough = rows_done(out) + draw.randint(1, ROWS * len(recipes) * len(seeds) // (kills + 2))
        wait_until(lambda enough=enough: rows_done(out) >= enough, process, out)
        time.sleep(draw.random() / 10)
        theirs = children_of(process.pid)
        if number % 2:  # a lost connection: all at once
            os.killpg(process.pid, signal.SIGKILL)
        else:  # for want of memory: what is left must end by itself
            process.kill()
        assert process.wait(300) == -signal.SIGKILL
        deadline = time.monotonic() + 60
        while any(map(alive, theirs)):
            assert time.monotonic() < deadline, "processes that nobody waits for are at work"
            time.sleep(0.01)
    assert start(plan, out, "--jobs=2").wait() == 0, said(out)[-3000:]
    assert start(plan, tmp_path / "whole", "--jobs=2").wait() == 0
    ours, theirs = (
        what_must_agree((tmp_path / name / "results.json").read_text()) for name in ("cut", "whole")
    )
    assert len(ours["runs"]) == len(recipes) * len(seeds)
    assert ours == theirs
    left = [p.name for p in out.glob("runs/*/*") if p.name != "result.json"]
    assert left == []


@pytest.mark.soak
def test_ctrl_c_ends_everything_and_says_so_once(tmp_path):
    plan = make_plan(tmp_path, seeds=(0,), updates=UPDATES)
    out = tmp_path / "out"
    process = start(plan, out, "--jobs=2")
    wait_until(lambda: rows_done(out) > 0, process, out)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(300) == 130
    assert said(out).strip().splitlines()[-1] == "holdfast: stopped; what was finished is kept"
    assert "Traceback" not in said(out)
