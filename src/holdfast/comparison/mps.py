"""NVIDIA's Multi-Process Service (MPS): kernels of several processes run on a GPU at once.

Without it, processes on one GPU take turns. MPS is a daemon. The one started here has a folder of
its own, so no other program uses it. A shell stands guard over it: when this process closes their
pipe or dies, even if it is killed, the shell stops the daemon and removes the folder.
"""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

CONTROL = "nvidia-cuda-mps-control"
#: Seconds after which a command of the daemon has failed.
PATIENCE = 30
#: Seconds after which the daemon ends processes that still use it.
GRACE = 10
#: The longest path of a folder for the daemon's sockets, whose paths have at most 107 characters.
LONGEST = 80

# It says in one line whether the daemon runs. Its input ends with the process that started it.
_GUARD = f"""
trap : INT TERM HUP
if timeout {PATIENCE} {CONTROL} -d >/dev/null 2>&1 </dev/null; then echo started; else echo no; fi
cat
echo quit -t {GRACE} | timeout {PATIENCE} {CONTROL} >/dev/null 2>&1
rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
"""

# The driver calls of a process that opens a GPU, without the seconds that torch takes to import.
_PROBE = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
raise SystemExit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
"""

logger = logging.getLogger(__name__)


def can_connect(environment: Mapping[str, str]) -> bool:
    """Whether a process with these variables can use a GPU."""
    given = {**os.environ, **environment}
    with contextlib.suppress(subprocess.TimeoutExpired):
        probe = [sys.executable, "-c", _PROBE]
        done = subprocess.run(probe, env=given, capture_output=True, timeout=2 * PATIENCE)
        return done.returncode == 0
    return False


@contextlib.contextmanager
def shared(
    uuids: Sequence[str], works: Callable[[Mapping[str, str]], bool] = can_connect
) -> Iterator[dict[str, str]]:
    """Let processes share GPUs; yields the environment variables that they need.

    A daemon that runs already is used and left alone. Without MPS, a log line says why.

    Args:
        uuids: all GPUs that the processes see, in torch's order.
        works: whether a process with some variables can use a GPU.
    """
    if shutil.which(CONTROL) is None:
        reason = f"there is no {CONTROL}"
    elif is_running():
        yield {}
        return
    elif not all(uuids):
        reason = "a GPU has no UUID"
    else:
        reason = f"{CONTROL} did not start"
        with _daemon(uuids) as environment:
            if environment and works(environment):
                yield environment
                return
            if environment:
                reason = "no process could use a GPU with it"
    logger.warning(f"runs on one GPU take turns, without NVIDIA MPS: {reason}")
    yield {}


def is_running() -> bool:
    """Whether processes of this user would find a daemon."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(
            [CONTROL], input="get_server_list\n", text=True, capture_output=True, timeout=PATIENCE
        )
        return asked.returncode == 0
    return False


@contextlib.contextmanager
def _daemon(uuids: Sequence[str]) -> Iterator[dict[str, str]]:
    """Run a daemon; yields its variables, or none if it does not start."""
    above = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="holdfast-mps-", dir=above if len(above) < LONGEST else "/tmp")
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": folder,
        "CUDA_MPS_LOG_DIRECTORY": folder,
        # The daemon renumbers its GPUs, so processes must not name theirs by index.
        "CUDA_VISIBLE_DEVICES": ",".join(uuids),
    }
    guard = subprocess.Popen(
        ["sh", "-c", _GUARD], env={**os.environ, **environment}, text=True, cwd="/",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert guard.stdin is not None
    assert guard.stdout is not None
    try:
        has_started = guard.stdout.readline().strip() == "started"
        yield environment if has_started else {}
    finally:
        guard.stdin.close()
        guard.wait()
        guard.stdout.close()
