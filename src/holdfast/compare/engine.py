"""Where the runs of a plan are done: processes of this machine, or a Ray cluster.

Neither decides anything: an engine is handed runs, and gives back results and errors as they come.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.compare.plan import Plan, RunSpec
from holdfast.compare.results import RunResult

__all__ = ["Finished", "run_locally", "run_on_ray"]


@dataclass(frozen=True)
class Finished:
    """A run that has ended: with its result, or with a traceback."""

    spec: RunSpec
    result: RunResult | None
    error: str | None


def run_locally(
    plan: Plan, specs: Sequence[RunSpec], folder: Path, jobs: int
) -> Iterator[Finished]:
    """Side by side in processes, a GPU each where there are any.

    A process that dies (for want of memory, say) takes its run with it, which is done again alone;
    if it dies again, the run has failed and the others go on.
    """
    left = list(specs)
    died: set[str] = set()
    while left:
        alone = [spec for spec in left if spec.id in died]
        now = alone[:1] or left
        ended: set[str] = set()
        try:
            for finished in _pool(plan, now, folder, 1 if alone else jobs):
                ended.add(finished.spec.id)
                yield finished
        except BrokenProcessPool:
            lost = [spec for spec in now if spec.id not in ended]
            if alone:
                ended.add(lost[0].id)
                yield Finished(lost[0], None, "its process died twice: was there enough memory?")
            else:
                # Which of them it was is not told: each that had begun is done again alone.
                died |= {s.id for s in lost if (folder / s.id).exists()} or {lost[0].id}
        left = [spec for spec in left if spec.id not in ended]


def _pool(plan: Plan, specs: Sequence[RunSpec], folder: Path, jobs: int) -> Iterator[Finished]:
    context = multiprocessing.get_context("spawn")
    gpus = torch.cuda.device_count()
    numbers: Any = context.Queue()
    for number in range(jobs):
        numbers.put(number)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ProcessPoolExecutor(
        min(jobs, len(specs)), context, _begin, (numbers, gpus, threads)
    ) as pool:
        pending: dict[Future[RunResult], RunSpec] = {}
        waiting = list(reversed(specs))
        try:
            while pending or waiting:
                while waiting and len(pending) < jobs:  # no more than can be at work
                    spec = waiting.pop()
                    pending[pool.submit(_work, plan, spec, folder)] = spec
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    yield _finished(pending.pop(future), future)
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.kill()
            raise


def _finished(spec: RunSpec, future: Future[RunResult]) -> Finished:
    try:
        return Finished(spec, future.result(), None)
    except (BrokenProcessPool, KeyboardInterrupt):
        raise
    except Exception as error:
        return Finished(spec, None, "".join(traceback.format_exception(error)))


_worker: Any = None


def _begin(numbers: Any, gpus: int, threads: int) -> None:
    """In a new process: its share of the machine."""
    number = numbers.get()
    if gpus:
        torch.cuda.set_device(number % gpus)
    torch.set_num_threads(threads)


def _work(plan: Plan, spec: RunSpec, folder: Path) -> RunResult:
    """In a process of a pool, or in a Ray task: one run, by the worker that this process has."""
    global _worker
    from holdfast.compare.runs import Worker

    if _worker is None or _worker.plan != plan:
        _worker = Worker(plan, folder)
    result: RunResult = _worker(spec)
    return result


def run_on_ray(
    plan: Plan, specs: Sequence[RunSpec], folder: Path, gpus: float = 0, address: str | None = None
) -> Iterator[Finished]:
    """As tasks of a Ray cluster; a task whose node dies is done again on another.

    Args:
        plan, specs: what to do.
        folder: a place that all nodes see, so that a run goes on from where another stopped.
        gpus: what each run asks for.
        address: of the cluster; None takes the one that is running, or starts one here.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError('--engine ray needs Ray: pip install "holdfast[ray]"') from error
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
    task = ray.remote(num_gpus=gpus, num_cpus=1, max_retries=-1)(_work)
    pending = {task.remote(plan, spec, folder): spec for spec in specs}
    while pending:
        (done, *_), _ = ray.wait(list(pending))
        spec = pending.pop(done)
        try:
            yield Finished(spec, ray.get(done), None)
        except ray.exceptions.RayTaskError as error:
            yield Finished(spec, None, str(error))
