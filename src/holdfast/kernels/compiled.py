"""C files of this folder, compiled for the machine when they are first used.

That takes a fraction of a second per process. Nothing is kept on disk, so no library can be out of
date or made for another CPU. Without a C compiler, callers use torch's own operations.
"""

import ctypes
import functools
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

logger = logging.getLogger(__name__)

# OpenMP's threads are those of torch: both load the library libgomp.so.1. Square roots need not set
# errno, which would prevent vector instructions. A product and a sum are fused only where the code
# says so, in vectors as well as in single elements.
_OPTIONS = [
    "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared",
]  # fmt: skip
_LOCK = threading.Lock()


def library(name: str) -> ctypes.CDLL | None:
    """The functions of ``name.c``, or None if it cannot be compiled or loaded here.

    The compiler is that of the environment variable ``CC``, or else ``cc``.
    """
    with _LOCK:  # several threads may need it first
        return _compiled(name)


@functools.cache
def _compiled(name: str) -> ctypes.CDLL | None:
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(compiler[0]) is None:
        logger.info(f"torch's operations are used, not {name}.c: there is no {compiler[0]!r}")
        return None
    source = Path(__file__).with_name(f"{name}.c")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        made = Path(folder, f"{name}.so")
        command = [*compiler, *_OPTIONS, str(source), "-o", str(made), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            return ctypes.CDLL(str(made))
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            reason = said[0] if said else type(error).__name__
            logger.info(f"torch's operations are used, not {source.name}: {reason}")
            return None
