"""The life of NVIDIA's daemon, with a program in its place that starts and ends a real process."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.comparison import mps

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPS is for Linux")

#: It keeps the daemon's process id where the real one does, and a log of its commands.
CONTROL = """#!/bin/sh
folder="${CUDA_MPS_PIPE_DIRECTORY:-$USUAL}"
file="$folder/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
    [ -e "$USUAL/broken" ] && exit 1
    sleep 300 >/dev/null 2>&1 </dev/null &
    echo $! >"$file"
    echo "start $folder $CUDA_VISIBLE_DEVICES" >>"$USUAL/log"
    exit 0
fi
[ -e "$file" ] || exit 1
read -r command options
echo "$command $folder" >>"$USUAL/log"
[ "$command" = quit ] && kill "$(cat "$file")" && rm "$file"
exit 0
"""


@pytest.fixture
def usual(tmp_path, monkeypatch):
    """The folder of a daemon of the machine."""
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / mps.CONTROL).write_text(CONTROL)
    (tmp_path / mps.CONTROL).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    folder = tmp_path / "usual"
    folder.mkdir()
    monkeypatch.setenv("USUAL", str(folder))
    yield folder
    if (left := folder / "nvidia-cuda-mps-control.pid").exists():
        os.kill(int(left.read_text()), signal.SIGKILL)


def works(environment):
    return True


def process_of(environment):
    folder = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
    return int((folder / "nvidia-cuda-mps-control.pid").read_text())


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(process):
    """Whether a process ends within a while; a signal takes a moment."""
    until = time.monotonic() + 30
    while is_alive(process) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_alive(process)


@pytest.mark.parametrize("raised", [None, KeyError, KeyboardInterrupt])
def test_a_daemon_lives_as_long_as_the_block(raised, usual):
    before = dict(os.environ)
    with (
        pytest.raises(raised) if raised else contextlib.nullcontext(),
        mps.shared(["GPU-a", "GPU-b"], works) as environment,
    ):
        process, folder = process_of(environment), environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert is_alive(process)
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
        assert dict(os.environ) == before  # only the workers get the variables
        if raised:
            raise raised
    assert ends(process)
    assert not Path(folder).exists()
    said = (usual / "log").read_text().splitlines()
    assert said == [f"start {folder} GPU-a,GPU-b", f"quit {folder}"]


SCRIPT = """
import sys, time
from holdfast.comparison import mps
with mps.shared(["GPU-a"], lambda environment: True) as environment:
    print(environment["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    time.sleep(300)
"""


def test_a_daemon_ends_with_a_process_that_is_killed(usual):
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    with process:
        folder = process.stdout.readline().strip()
        daemon = process_of({"CUDA_MPS_PIPE_DIRECTORY": folder})
        assert is_alive(daemon)
        process.kill()
    assert ends(daemon)
    until = time.monotonic() + 30
    while Path(folder).exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(folder).exists()


def test_a_daemon_that_runs_already_is_left_alone(usual, caplog):
    subprocess.run([mps.CONTROL, "-d"], check=True)
    daemon = process_of({"CUDA_MPS_PIPE_DIRECTORY": usual})
    with mps.shared(["GPU-a"], works) as environment:
        assert environment == {}
    assert is_alive(daemon)
    assert "quit" not in (usual / "log").read_text()
    assert not caplog.messages


def test_a_daemon_that_no_process_can_use_is_ended(usual, caplog):
    seen = []
    with mps.shared(["GPU-a"], lambda environment: seen.append(process_of(environment))) as given:
        assert given == {}
        assert ends(*seen)
    assert caplog.messages == [
        "runs on one GPU take turns, without NVIDIA MPS: no process could use a GPU with it"
    ]


@pytest.mark.parametrize("why", ["there is no", "did not start", "a GPU has no UUID"])
def test_without_a_daemon_runs_go_on(why, usual, caplog, monkeypatch):
    if why == "there is no":
        monkeypatch.setenv("PATH", "")
    if why == "did not start":
        (usual / "broken").touch()
    with mps.shared([""] if "UUID" in why else ["GPU-a"], works) as environment:
        assert environment == {}
    (message,) = caplog.messages
    assert why in message


def test_a_process_needs_the_driver(usual):
    """Also on a machine with a GPU: the folder has no daemon that would serve it."""
    hidden = {"LD_LIBRARY_PATH": "", "CUDA_VISIBLE_DEVICES": "none"}
    assert not mps.can_connect(hidden)
