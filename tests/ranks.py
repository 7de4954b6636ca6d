"""Run a test's function on several gloo ranks, as real processes."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

MAIN = """
import importlib, os, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
getattr(importlib.import_module({module!r}), {function!r})(*{arguments!r})
torch.distributed.barrier()
# gloo's threads may abort the interpreter's own shutdown.
sys.stdout.flush()
os._exit(0)
"""


def run_on_ranks(world, function, *arguments, folder):
    """Call a module-level function, given by reference, on ``world`` ranks."""
    file = Path(inspect.getfile(function)).relative_to(TESTS)
    script = Path(folder) / "main.py"
    script.write_text(
        MAIN.format(
            tests=str(TESTS),
            module=".".join(file.with_suffix("").parts),
            function=function.__name__,
            arguments=tuple(str(a) for a in arguments),
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", str(world), str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(done.stderr[-4000:])
