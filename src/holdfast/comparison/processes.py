"""Worker processes of this machine: each runs one call at a time, on one GPU or on the CPU.

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
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import torch

from holdfast._torch.lm_head import is_out_of_memory

Call = tuple[Any, ...]
_PROCESSES: BaseContext = multiprocessing.get_context("spawn")  # CUDA does not survive a fork


@dataclass(frozen=True)
class Ended:
    """A call that returned a value, raised an exception (a traceback), or whose process died.

    Attributes:
        gpu: the GPU of its worker; None on a CPU.
        at_a_time: the most calls that shared the device while it ran, itself included.
        device_failed: whether the exception is one of the device, such as a lack of memory.
    """

    call: Call
    value: Any = None
    error: str | None = None
    died: bool = False
    gpu: int | None = None
    at_a_time: int = 1
    device_failed: bool = False

    @property
    def disturbed(self) -> bool:
        """Whether it failed in a way that calls on the same device may have caused."""
        return self.device_failed and self.at_a_time > 1


def call_in_processes(
    function: Callable[..., Any],
    calls: deque[Call],
    *,
    caller: str,
    jobs: int,
    workers: Sequence[int | None],
    admits: Callable[[int | None, int], bool] = lambda gpu, running: True,
    on_progress: Callable[..., None] | None = None,
    on_wait: Callable[[], None] | None = None,
) -> Generator[Ended, None, None]:
    """Run calls side by side in processes, and yield each when it has ended.

    Args:
        function: a function of a module; processes import it.
        calls: arguments of the calls. More may be appended while this iterates.
        caller: name of the public function, for errors.
        jobs: number of processes that share the machine's cores.
        workers: the GPU of each process; None for the CPU.
        admits: whether another call may start on a GPU on which so many are running. It must admit
            the first. A process without a call is ended, because it holds memory.
        on_progress: called with a call and what it passed to :func:`report_progress`.
        on_wait: called several times per second.
    """
    idle = [_Worker(gpu, jobs) for gpu in workers]
    busy: dict[Future[Any], _Worker] = {}
    begun = False

    def next_worker() -> _Worker | None:
        running = Counter(worker.gpu for worker in busy.values())
        return next((one for one in idle if admits(one.gpu, running[one.gpu])), None)

    try:
        while calls or busy:
            while calls and (worker := next_worker()):
                idle.remove(worker)
                busy[worker.submit(function, calls.popleft())] = worker
            for worker in idle:
                worker.end()
            running = Counter(worker.gpu for worker in busy.values())
            for worker in busy.values():
                worker.share(running[worker.gpu])
            done, _ = futures.wait(busy, 0.1, futures.FIRST_COMPLETED)
            for worker in busy.values():
                for message in worker.messages():
                    begun = True
                    if message and on_progress:
                        on_progress(worker.call, *message)
            if on_wait:
                on_wait()
            for future in done:
                worker = busy.pop(future)
                idle.insert(0, worker)  # it has loaded what calls share
                ended = partial(Ended, worker.call, gpu=worker.gpu, at_a_time=worker.at_a_time)
                if isinstance(future.exception(), BrokenProcessPool):
                    if not begun:
                        raise RuntimeError(
                            "no worker process could start. If the error printed above does not "
                            f"explain why: {_guard(caller)}"
                        )
                    worker.end()
                    yield ended(died=True)
                    continue
                value, error, device_failed = future.result()
                if device_failed or (error and worker.gpu is not None):
                    worker.end()  # an error may leave the GPU unusable for the process
                yield ended(value=value, error=error, device_failed=device_failed)
    finally:
        for worker in busy.values():
            worker.hang_up()  # its process exits at once; an idle one exits in good order
        with ThreadPoolExecutor() as threads:
            list(threads.map(_Worker.end, [*idle, *busy.values()]))


def report_progress(*message: Any) -> None:
    """In a worker process: send a message to the ``on_progress`` of the parent."""
    assert _pipe is not None
    _pipe.send(message)


def at_a_time() -> int | None:
    """In a worker process: the most calls on its device since :func:`count_from_now`, with its own.

    None elsewhere.
    """
    return _sharing.most if _pipe is not None else None


def count_from_now() -> None:
    """Forget how many calls were on the device before."""
    _sharing.most = _sharing.now


def share_cores(jobs: int) -> int:
    """Use the threads of one of so many processes; return how many of them the cores can run."""
    cores = os.cpu_count() or 1
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores // jobs))
    return min(jobs, max(1, cores // torch.get_num_threads()))


def attempt(function: Callable[..., Any], call: Call) -> tuple[Any, str | None, bool]:
    """Return the value of a call, None and False.

    If it raises an exception: None, the traceback, and whether the device failed.
    """
    try:
        return function(*call), None, False
    except Exception as error:
        return None, "".join(traceback.format_exception(error)), device_failed(error)


def device_failed(error: BaseException) -> bool:
    """Whether an exception, or the one that caused it, is of the device and not of the call.

    Such as a lack of memory, or an error of a GPU, which other processes on it also get.
    """
    of_gpu = isinstance(error, RuntimeError) and re.search("CUDA|CUBLAS|CUDNN", str(error))
    if of_gpu or is_out_of_memory(error):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and device_failed(cause)


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
    """A process that runs one call at a time. It exits when the other end of its pipe closes.

    It is started for its first call, and for the next one after it was ended.
    """

    def __init__(self, gpu: int | None, jobs: int) -> None:
        self.gpu, self.jobs = gpu, jobs
        self.call: Call = ()
        self.at_a_time = 1
        self.executor: ProcessPoolExecutor | None = None

    def _started(self) -> ProcessPoolExecutor:
        if self.executor is None:
            self.pipe, self._theirs = _PROCESSES.Pipe()
            given = self._theirs, self.gpu, self.jobs
            self.executor = ProcessPoolExecutor(1, _PROCESSES, initializer=_begin, initargs=given)
        return self.executor

    def submit(self, function: Callable[..., Any], call: Call) -> Future[Any]:
        self.call, self.at_a_time = call, 1
        self._told = 0
        with _no_interrupts():
            try:
                future = self._started().submit(attempt, function, call)
            except BrokenProcessPool:  # it died while it was idle
                self.end()
                future = self._started().submit(attempt, function, call)
        self._theirs.close()  # now only the process holds that end: the pipe ends when it dies
        return future

    def share(self, running: int) -> None:
        """Tell the process how many calls run on its device, if it does not know."""
        self.at_a_time = max(self.at_a_time, running)
        if running != self._told:
            self._told = running
            with contextlib.suppress(OSError):  # it died
                self.pipe.send(running)

    def messages(self) -> Iterator[tuple[Any, ...]]:
        with contextlib.suppress(EOFError, OSError):  # it died, perhaps in the middle of a message
            while self.pipe.poll():
                yield self.pipe.recv()

    def hang_up(self) -> None:
        """Make the process exit at once."""
        self.pipe.close()

    def end(self) -> None:
        if self.executor is None:
            return
        # A process that hangs, as after a CUDA error, exits when its pipe closes.
        overdue = threading.Timer(10, self.pipe.close)
        overdue.start()
        self.executor.shutdown(cancel_futures=True)
        overdue.cancel()
        self.pipe.close()
        self.executor = None


@dataclass
class _Sharing:
    """In a worker process: the calls on its device, now and at most."""

    now: int = 1
    most: int = 1


_pipe: Connection | None = None
_sharing = _Sharing()


def _begin(pipe: Connection, gpu: int | None, jobs: int) -> None:
    """At the start of a process: take a GPU and a share of the cores; exit with the parent."""
    global _pipe
    _pipe = pipe

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):  # the parent's end is closed
            while True:
                _sharing.now = pipe.recv()
                _sharing.most = max(_sharing.most, _sharing.now)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    if gpu is not None:
        torch.cuda.set_device(gpu)
    share_cores(jobs)
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
