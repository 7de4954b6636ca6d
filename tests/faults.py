"""Commands whose Nth write or rename fails: a server that has imported everything, and forks."""

import json
import multiprocessing
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MODES = {"count": 0, "full": 1, "error": 2, "kill": 3}


class Faults:
    """Runs commands in a folder. ``compiler`` is None where there is none."""

    compiler = shutil.which("cc") if sys.platform == "linux" else None

    def __init__(self, folder):
        self.folder, self.log, library = folder, folder / "said", folder / "faults.so"
        subprocess.run(
            [self.compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "faults.c", "-ldl"],
            check=True,
        )
        self.control = folder / "control"
        self.control.write_bytes(bytes(4096))
        paths = [str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ, "LD_PRELOAD": str(library), "FAULTS": str(self.control),
            "PYTHONPATH": os.pathsep.join(paths), "HOLDFAST_CACHE": str(folder / "cache"),
        }  # fmt: skip
        self.server = subprocess.Popen(
            [sys.executable, "-m", "faults"], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, place, arguments, mode="count", at=0):
        """Return the exit status, or minus a signal, and the number of writes and renames."""
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        given = struct.pack("4l4064s", 1, 0, at, MODES[mode], os.fsencode(place.resolve()))
        self.control.write_bytes(given)
        order = {"place": str(place), "arguments": arguments, "log": str(self.log)}
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        status = int(self.server.stdout.readline())
        return status, struct.unpack_from("4l", self.control.read_bytes())[1]

    def said(self):
        return self.log.read_text()

    def close(self):
        self.server.communicate()


def serve():
    import optuna  # noqa: F401
    import torch
    import transformers
    from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: F401

    from holdfast.cli import compare, finetune, main, merge, score, tune  # noqa: F401

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    context = multiprocessing.get_context("fork")  # a new interpreter takes seconds
    multiprocessing.get_context = lambda *_: context
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            work(main, order)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def work(main, order):
    status = 99
    try:
        os.setsid()  # a kill takes its workers with it, and no more
        os.chdir(order["place"])
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        status = main(order["arguments"])
        sys.stdout.flush(), sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve()
