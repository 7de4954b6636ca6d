"""Run a test's function on several gloo ranks, as real processes."""

import socket
from multiprocessing.connection import wait
from pathlib import Path

from forks import start


def run_on_ranks(world, function, *arguments, folder):
    """Call a module-level function, given by reference, on ``world`` ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    logs = [Path(folder).absolute() / f"said-{rank}" for rank in range(world)]
    ranks = [
        start(
            _rank, function, [str(a) for a in arguments], log=log, OMP_NUM_THREADS="1",
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    waiting = {process.sentinel: process for process in ranks}
    while waiting:
        for sentinel in wait([*waiting]):
            waiting.pop(sentinel).join()
        if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
            for process in waiting.values():  # it may wait for the failed one
                process.kill(), process.join()
            raise AssertionError(logs[failed[0]].read_text()[-4000:])


def _rank(function, arguments):
    import torch

    torch.distributed.init_process_group("gloo")
    function(*arguments)
    torch.distributed.barrier()
