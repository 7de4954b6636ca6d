"""Where the runs of a plan are done: processes of this machine, or a Ray cluster.

Neither decides anything: an engine is handed runs, and gives back results and errors as they come.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch

from holdfast.comparison.plan import Plan, RunSpec
from holdfast.comparison.result import RunResult
from holdfast.io.storage import Place

__all__ = [
    "Finished",
    "no_interrupts",
    "refuse_in_import",
    "run_locally",
    "run_on_ray",
    "take_share",
    "unguarded",
]

#: Told of a run at work: what it does, how much of it is done, and of how much.
Tell = Callable[[RunSpec, str, int, int], None]

#: How often Ray does a run again that a node or a process has taken with it.
RETRIES = 3


@dataclass(frozen=True)
class Finished:
    """A run that has ended: with its result, or with a traceback."""

    spec: RunSpec
    result: RunResult | None
    error: str | None


def run_locally(
    plan: Plan, specs: Sequence[RunSpec], out: Place, jobs: int, tell: Tell | None = None
) -> Iterator[Finished]:
    """Side by side in processes, a GPU each where there are any.

    A process that dies (for want of memory, say) takes its run with it, which goes on when all
    others are finished, alone; if it dies again, the run has failed. If none so much as begins, the
    main script is to blame, which they import.
    """
    waiting = deque(specs)
    begun = False
    died: set[str] = set()
    at_work: list[_Process] = []
    try:
        while waiting or at_work:
            while waiting and len(at_work) < jobs and not (at_work and waiting[0].id in died):
                number = min(set(range(jobs)) - {process.number for process in at_work})
                at_work.append(_Process(plan, out, number, jobs, waiting.popleft()))
            for process in _heard(at_work):
                spec, message = process.spec, process.receive()
                begun = begun or message is not None
                if not begun and process.failed_to_begin():
                    raise unguarded("compare")
                if isinstance(message, tuple):
                    if tell:
                        tell(spec, *message)
                    continue
                # After an error a GPU may be of no use to its process any more.
                spoilt = message is not None and message.error and torch.cuda.is_available()
                if message is not None and not spoilt and waiting and waiting[0].id not in died:
                    process.give(waiting.popleft())
                else:
                    at_work.remove(process)
                    process.end()
                if message is not None:
                    yield message
                elif spec.id in died:
                    yield Finished(spec, None, "its process died twice: was there enough memory?")
                else:
                    died.add(spec.id)
                    waiting.append(spec)
    finally:
        for process in at_work:
            process.end(now=True)


class _Process:
    """A process of this machine that does one run at a time, and the run that it does."""

    def __init__(self, plan: Plan, out: Place, number: int, jobs: int, spec: RunSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self.number = number
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, plan, out, number, jobs))
        with no_interrupts():
            self.process.start()
            theirs.close()  # else its end would not be heard
            self.give(spec)

    def give(self, spec: RunSpec) -> None:
        self.spec = spec
        with contextlib.suppress(BrokenPipeError):  # it has died: that is heard next
            self.pipe.send(spec)

    def receive(self) -> Finished | tuple[str, int, int] | None:
        """How far it is, or what came of its run; None if it has died."""
        try:
            message: Finished | tuple[str, int, int] | None = (
                self.pipe.recv() if self.pipe.poll() else None
            )
        except (EOFError, OSError):
            return None
        return message

    def failed_to_begin(self) -> bool:
        """Whether it has ended by an exception: of a run it would be a message."""
        self.process.join(10)
        return self.process.exitcode == 1

    def end(self, now: bool = False) -> None:
        self.pipe.close()
        if not now:
            self.process.join(10)
        self.process.kill()
        self.process.join()


def _heard(at_work: Sequence[_Process]) -> list[_Process]:
    """Those with something to say, or that have died: at least one."""
    ready = wait([end for one in at_work for end in (one.pipe, one.process.sentinel)])
    return [one for one in at_work if one.pipe in ready or one.process.sentinel in ready]


def refuse_in_import(name: str) -> None:
    """Refuse a call in a process that has yet to begin: it imports the script that made the call.

    Without the guard of the main module the script runs again in every process.
    """
    # Set by multiprocessing for that time; it refuses processes of such a process by it, too.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(_guard(name))


def unguarded(name: str) -> RuntimeError:
    """What the caller is told of processes that have failed to begin."""
    return RuntimeError(
        f"no process could begin; if what it raised, printed above, does not tell: {_guard(name)}"
    )


def _guard(name: str) -> str:
    return (
        f"{name} starts processes, each of which imports the main script again: put the call under "
        '`if __name__ == "__main__":`'
    )


@contextlib.contextmanager
def no_interrupts() -> Iterator[None]:
    """Ctrl-C is for this process alone, and a process that begins has it from this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(pipe: Connection, plan: Plan, out: Place, number: int, jobs: int) -> None:
    """In a process of its own: one run after the other, as long as there are any."""
    take_share(number, jobs)
    while True:
        try:
            spec = pipe.recv()
        except EOFError:
            return
        pipe.send(_finish(plan, spec, out, lambda *done: pipe.send(done)))


def take_share(number: int, jobs: int) -> None:
    """At the start of a process, one of several: a GPU and its share of the cores."""
    _end_with_parent()
    if gpus := torch.cuda.device_count():
        torch.cuda.set_device(number % gpus)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))


def _end_with_parent() -> None:
    """Nobody would hear of what an orphan does, and the next start would do it as well."""
    parent: Any = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


_worker: Any = None


def _finish(
    plan: Plan, spec: RunSpec, out: Place, progress: Callable[[str, int, int], None] | None = None
) -> Finished:
    """One run, by the worker that this process has. What it raises is its own affair."""
    global _worker
    from holdfast.comparison.worker import Worker

    try:
        folder = out.folder / "runs"
        if _worker is None or (_worker.plan, _worker.folder) != (plan, folder):
            _worker = Worker(plan, folder)
        return Finished(spec, _worker(spec, progress, out / "runs"), None)
    except Exception as error:
        return Finished(spec, None, "".join(traceback.format_exception(error)))


def run_on_ray(
    plan: Plan, specs: Sequence[RunSpec], out: Place, gpus: float = 0, address: str | None = None
) -> Iterator[Finished]:
    """As tasks of a Ray cluster; a task whose node dies is done again on another.

    Args:
        plan, specs: what to do.
        out: a place that all nodes see. In a shared folder a run goes on from where another node
            stopped; elsewhere (``s3://…``) it begins again.
        gpus: what each run asks for, beside a CPU.
        address: of the cluster; None takes the one that is running, or starts one here.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError('--engine ray needs Ray: pip install "holdfast[ray]"') from error
    joined = not ray.is_initialized()
    if joined:
        _join(ray, address)
    pending: dict[Any, RunSpec] = {}
    try:
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(_finish_on_node)
        if gpus > (there := cast(Any, ray).cluster_resources().get("GPU", 0)):
            warnings.warn(
                f"a run asks for {gpus:g} GPUs and the cluster has {there:g}: it waits for more",
                stacklevel=2,
            )
        for spec in specs:
            pending[task.remote(plan, spec, out, os.getcwd())] = spec
        while pending:
            (done, *_), _ = ray.wait(list(pending))
            spec = pending.pop(done)
            try:
                finished = ray.get(done)
            except ray.exceptions.RayError as error:  # it has taken one node after the other
                finished = Finished(spec, None, str(error))
            yield finished
    finally:
        for left in pending:
            ray.cancel(left, force=True)
        if joined:
            ray.shutdown()


def _join(ray: Any, address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is started here
    address = address or os.environ.get("RAY_ADDRESS")
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself would ask for many minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # of many kinds, by what is wrong with the address
        where = f" at {address}" if address else ""
        raise ConnectionError(f"no Ray cluster can be joined{where}: {error}") from error


def _finish_on_node(plan: Plan, spec: RunSpec, out: Place, here: str) -> Finished:
    """In a Ray task: a relative path means what it does where the plan was started."""
    if Path(here).is_dir():
        os.chdir(here)
    torch.set_num_threads(1)  # the one CPU that it has asked for
    return _finish(plan, spec, out)
