"""Run a test's function on several gloo ranks, as real processes.

They are forks of a server that has imported the libraries, because imports take seconds.
"""

import importlib
import inspect
import multiprocessing
import os
import socket
import traceback
from multiprocessing.connection import wait
from pathlib import Path

TESTS = Path(__file__).parent
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["pytest", "hypothesis", "torch.distributed.fsdp", "holdfast.hosts.hf", "accelerate", "peft",
     "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert"]
)  # fmt: skip


def run_on_ranks(world, function, *arguments, folder):
    """Call a module-level function, given by reference, on ``world`` ranks."""
    file = Path(inspect.getfile(function)).relative_to(TESTS)
    what = ".".join(file.with_suffix("").parts), function.__name__, [str(a) for a in arguments]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        log = Path(folder).absolute() / f"said-{rank}"
        ranks.append(FORKS.Process(target=_rank, args=(*what, environment, os.getcwd(), log)))
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


def _rank(module, function, arguments, environment, place, log):
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1), os.dup2(said, 2)
    os.environ.clear(), os.environ.update(environment)
    os.chdir(place)
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
