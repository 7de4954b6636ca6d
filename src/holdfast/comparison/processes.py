"""Worker processes of this machine: each runs one call at a time, with a GPU of its own.

One :class:`~concurrent.futures.ProcessPoolExecutor` of a single process stands behind each worker:
a process that dies takes only its own call with it.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import torch

Call = tuple[Any, ...]
_PROCESSES: BaseContext = multiprocessing.get_context("spawn")  # CUDA does not survive a fork


@dataclass(frozen=True)
class Ended:
    """A call that returned a value, raised an exception (a traceback), or whose process died."""

    call: Call
    value: Any = None
    error: str | None = None
    died: bool = False


def call_in_processes(
    function: Callable[..., Any],
    calls: deque[Call],
    *,
    caller: str,
    jobs: int,
    workers: int | None = None,
    on_progress: Callable[..., None] | None = None,
    on_wait: Callable[[], None] | None = None,
) -> Generator[Ended, None, None]:
    """Run calls side by side in processes, and yield each when it has ended.

    Args:
        function: a function of a module; processes import it.
        calls: arguments of the calls. More may be appended while this iterates.
        caller: name of the public function, for errors.
        jobs: number of processes that share the machine's cores; ``workers`` of them are started.
        on_progress: called with a call and what it passed to :func:`report_progress`.
        on_wait: called several times per second.
    """
    idle = [_Worker(number, jobs) for number in range(min(workers or jobs, len(calls)))]
    busy: dict[Future[Any], tuple[_Worker, Call]] = {}
    begun = False
    try:
        while calls or busy:
            while calls and idle:
                worker, call = idle.pop(0), calls.popleft()
                busy[worker.submit(function, call)] = worker, call
            done, _ = futures.wait(busy, 0.1, futures.FIRST_COMPLETED)
            for worker, call in busy.values():
                for message in worker.messages():
                    begun = True
                    if message and on_progress:
                        on_progress(call, *message)
            if on_wait:
                on_wait()
            for future in done:
                worker, call = busy.pop(future)
                idle.append(worker)
                if isinstance(future.exception(), BrokenProcessPool):
                    if not begun:
                        raise RuntimeError(
                            "no worker process could start. If the error printed above does not "
                            f"explain why: {_guard(caller)}"
                        )
                    worker.restart()
                    yield Ended(call, died=True)
                    continue
                value, error = future.result()
                if error and torch.cuda.is_available():
                    worker.restart()  # an error may leave the GPU unusable for the process
                yield Ended(call, value, error)
    finally:
        for worker, _ in busy.values():
            worker.pipe.close()  # its process exits at once; an idle one exits in good order
        everyone = [*idle, *(worker for worker, _ in busy.values())]
        with ThreadPoolExecutor() as threads:
            list(threads.map(_Worker.end, everyone))


def report_progress(*message: Any) -> None:
    """In a worker process: send a message to the ``on_progress`` of the parent."""
    assert _pipe is not None
    _pipe.send(message)


def attempt(function: Callable[..., Any], call: Call) -> tuple[Any, str | None]:
    """Return the value of a call and None, or None and the traceback of its exception."""
    try:
        return function(*call), None
    except Exception as error:
        return None, "".join(traceback.format_exception(error))


def reason(error: str) -> str:
    r"""Return the last line of a traceback, without the module of its exception.

    >>> reason("Traceback:\n  ...\nholdfast.recipe.RecipeError: no such method\n")
    'RecipeError: no such method'
    """
    return re.sub(r"^(\w+\.)+(?=\w+(:|$))", "", error.strip().rpartition("\n")[2])


def refuse_in_import(caller: str) -> None:
    """Raise in a process that is just importing the main script: the script lacks its guard."""
    # multiprocessing sets this flag during the import, for the same purpose.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(_guard(caller))


def _guard(caller: str) -> str:
    return (
        f"{caller} starts processes, each of which imports the main script again: put the call "
        'under `if __name__ == "__main__":`'
    )


class _Worker:
    """A process that runs one call at a time. It exits when the other end of its pipe closes."""

    def __init__(self, number: int, jobs: int) -> None:
        self.number, self.jobs = number, jobs
        self._start()

    def _start(self) -> None:
        self.pipe, self._theirs = _PROCESSES.Pipe()
        self.executor = ProcessPoolExecutor(
            1, _PROCESSES, initializer=_begin, initargs=(self._theirs, self.number, self.jobs)
        )

    def submit(self, function: Callable[..., Any], call: Call) -> Future[Any]:
        with _no_interrupts():
            try:
                future = self.executor.submit(attempt, function, call)
            except BrokenProcessPool:  # it died while it was idle
                self.restart()
                future = self.executor.submit(attempt, function, call)
        self._theirs.close()  # now only the process holds that end: the pipe ends when it dies
        return future

    def messages(self) -> Iterator[tuple[Any, ...]]:
        with contextlib.suppress(EOFError, OSError):  # it died, perhaps in the middle of a message
            while self.pipe.poll():
                yield self.pipe.recv()

    def restart(self) -> None:
        self.end()
        self._start()

    def end(self) -> None:
        # A process that hangs, as after a CUDA error, exits when its pipe closes.
        overdue = threading.Timer(10, self.pipe.close)
        overdue.start()
        self.executor.shutdown(cancel_futures=True)
        overdue.cancel()
        self.pipe.close()


_pipe: Connection | None = None


def _begin(pipe: Connection, number: int, jobs: int) -> None:
    """At the start of a process: take a GPU and a share of the cores; exit with the parent."""
    global _pipe
    _pipe = pipe

    def exit_with_parent() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()  # the parent sends nothing: this returns when its end is closed
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    if gpus := torch.cuda.device_count():
        torch.cuda.set_device(number % gpus)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    pipe.send(())


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C; a process started meanwhile inherits that, so only the parent handles it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
