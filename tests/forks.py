"""Processes that start at once: forks of a server that has imported the libraries.

A new interpreter takes seconds for the imports.
"""

import os
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
