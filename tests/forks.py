"""Processes that start at once: forks of a server that has imported the libraries.

A new interpreter takes seconds for the imports.
"""

import os
import sys
import traceback
from multiprocessing import context

PRELOADED = [
    "pytest", "hypothesis", "torch.distributed.fsdp", "holdfast.hosts.hf", "accelerate", "peft",
    "holdfast.comparison.worker", "holdfast.evaluate.measure",
    "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert",
]  # fmt: skip


class Fork(context.ForkServerProcess):
    """A process with the environment and the folder of the one that starts it."""

    def __init__(self, *args, environment=None, **options):
        super().__init__(*args, **options)
        self.given = {**os.environ, **(environment or {})}, os.getcwd()

    def run(self):
        environment, folder = self.given
        os.environ.clear(), os.environ.update(environment)
        os.chdir(folder)
        super().run()


class Forks(context.ForkServerContext):
    Process = Fork


FORKS = Forks()
FORKS.set_forkserver_preload(PRELOADED)


def start(function, *arguments, log, **environment):
    """Call a function of a module in a new process, whose output goes into a file."""
    process = FORKS.Process(target=_call, args=(function, arguments, log), environment=environment)
    process.start()
    return process


def _call(function, arguments, log):
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1), os.dup2(said, 2)
    status = 1
    try:
        import torch

        torch.set_num_threads(1)
        function(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)  # gloo's threads may abort the interpreter's own shutdown
