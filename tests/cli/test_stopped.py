"""No permission, a full disk, Ctrl-C: one sentence, and nothing lost or left half done."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("cattrs", reason="the eval extra is not installed")
if sys.platform != "linux":
    pytest.skip("limits and capabilities of Linux", allow_module_level=True)

from cli.test_bad_input import GOOD, contents, make_place
from holdfast.cli import main

#: Several command lines in one process, each with the size that files may have; a line of JSON of
#: each: its status and what it said.
MANY = """
import contextlib, io, json, multiprocessing, resource, sys

forks = multiprocessing.get_context("fork")  # a new interpreter takes seconds
multiprocessing.get_context = lambda *_: forks
from holdfast.cli import main

for size, *arguments in json.loads(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = main(arguments)
    print(json.dumps([arguments[0], status, said.getvalue()]))
"""
WRITING = [name for name, given in GOOD.items() if any(a.startswith("--out") for a in given)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    return make_place(tmp_path, monkeypatch)


def run_all(lines, prepare=None):
    """What each of some command lines says, in a process that is prepared."""
    done = subprocess.run(
        [sys.executable, "-c", MANY, json.dumps(lines)],
        capture_output=True, text=True, preexec_fn=prepare,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip("root cannot give up its rights here")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, *_ in found] == [line[1] for line in lines], done.stderr
    return found


def check(found, words, status):
    for name, ended, said in found:
        last = said.splitlines()[-1]
        assert ended == status, (name, said)
        assert last.startswith("holdfast: "), said
        assert any(word in last for word in words), (name, last)
        assert "Traceback" not in said


def as_anybody():
    """Root may write everywhere, but for this."""
    if os.geteuid() == 0 and ctypes.CDLL(None).prctl(24, 1, 0, 0, 0):  # PR_CAPBSET_DROP, DAC
        os._exit(77)


def test_no_permission_is_said_before_the_work(place):
    locked = place / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    before = contents(place)
    lines = [[-1, name, *GOOD[name], "--out=locked/out"] for name in WRITING]
    lines += [[-1, "score", *GOOD["score"], "--weighted=locked/rows.jsonl"]]
    check(run_all(lines, as_anybody), ["locked"], 2)
    assert contents(place) == before


def test_a_full_disk_leaves_no_part_of_a_file(place):
    sizes = {"merge": 100_000, "finetune": 100_000, "report": 1000}
    (place / "good").mkdir()
    (place / "good" / ".holdfast").write_text("report\n")
    (place / "good" / "report.md").write_text("from before")
    lines = [[sizes.get(name, 20), name, *GOOD[name], f"--out=out/{name}"] for name in WRITING]
    lines += [[10, "report", *GOOD["report"], "--out=good"]]
    check(run_all(lines), ["File too large", "is the disk full?"], 1)
    left = [file.name for file in contents(place) if file.is_file()]
    assert not [name for name in left if name.endswith((".tmp", ".safetensors"))]
    assert (place / "good" / "report.md").read_text() == "from before"


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def interrupt(process, when):
    """Ctrl-C, to all processes as a terminal does it, when something has come to be."""
    until = time.monotonic() + 300
    while not when() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=120)[1]


def all_gone(group):
    """Whether all processes of a group have ended, or do so soon."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_control_c_and_on_with_finetune(place):
    given = [
        "finetune",
        *GOOD["finetune"],
        "--recipe=recadam",
        "--max-updates=25",
        "--save-seconds=0",
        "--lr=1e-3",
    ]
    process = start(*given)
    said = interrupt(process, lambda: (place / "out" / "run.pt").exists())
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "holdfast: stopped; what was finished is kept"
    assert "Traceback" not in said
    assert (place / "out" / "run.pt").exists()
    assert not (place / "out" / "model.safetensors").exists()
    assert main(given) == 0
    assert (place / "out" / "model.safetensors").exists()


def test_control_c_in_compare_leaves_no_process(place):
    given = [*GOOD["compare"], "--max-updates=5000"]
    process = start("compare", *given)
    said = interrupt(process, lambda: list(place.glob("out/runs/*/history.jsonl")))
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "holdfast: stopped; what was finished is kept"
    assert "Traceback" not in said
    assert all_gone(process.pid)
