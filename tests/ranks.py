"""Run a test's function on several gloo ranks, as real processes."""

import importlib
import inspect
import os
import socket
import traceback
from multiprocessing.connection import wait
from pathlib import Path

from forks import FORKS

TESTS = Path(__file__).parent


def run_on_ranks(world, function, *arguments, folder):
    """Call a module-level function, given by reference, on ``world`` ranks."""
    file = Path(inspect.getfile(function)).relative_to(TESTS)
    what = ".".join(file.with_suffix("").parts), function.__name__, [str(a) for a in arguments]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        environment = {
            "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        log = Path(folder).absolute() / f"said-{rank}"
        ranks.append(FORKS.Process(target=_rank, args=(*what, log), environment=environment))
    for process in ranks:
        process.start()
    waiting = {process.sentinel: process for process in ranks}
    while waiting:
        for sentinel in wait([*waiting]):
            waiting.pop(sentinel).join()
        if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
            for process in waiting.values():  # it may wait for the failed one
                process.kill(), process.join()
            raise AssertionError(Path(folder, f"said-{failed[0]}").read_text()[-4000:])


def _rank(module, function, arguments, log):
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1), os.dup2(said, 2)
    status = 1
    try:
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        getattr(importlib.import_module(module), function)(*arguments)
        torch.distributed.barrier()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # gloo's threads may abort the interpreter's own shutdown
