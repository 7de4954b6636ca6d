"""Run a plan: in processes of this machine, or as tasks of a Ray cluster."""

import contextlib
import logging
import os
import socket
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast._torch.checks import named_settings
from holdfast._torch.imports import require
from holdfast.comparison import processes
from holdfast.comparison.crew import Crew, PerGpu, crew_for
from holdfast.comparison.inputs import paths_of, warn_of_known_target
from holdfast.comparison.plan import Plan, RunSpec
from holdfast.comparison.rates import with_rates
from holdfast.comparison.results import Results, RunResult, collect, read_result
from holdfast.comparison.sharing import trainings
from holdfast.comparison.worker import Worker
from holdfast.hosts.tracking import Tracking
from holdfast.io.outputs import claim, output_name, write_changed
from holdfast.io.storage import Place

logger = logging.getLogger(__name__)

#: Called with a run that has ended, its result or None, and its traceback.
OnFinished = Callable[[RunSpec, RunResult | None, str | None], None]


@named_settings
def compare(
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    jobs: int | None = 1,
    per_gpu: PerGpu = "auto",
    engine: str = "local",
    gpus: float = 0,
    address: str | None = None,
    config: str | None = None,
    tracking: Tracking | None = None,
    on_finished: OnFinished | None = None,
    on_progress: Callable[[RunSpec, str, int, int], None] | None = None,
) -> Results:
    """Do all runs of a plan that are not finished yet, and return the results of all of them.

    If a comparison is stopped or killed, call ``compare`` again to continue it. The results are the
    same as without the interruption. A run that fails does not stop the others: its traceback is
    in ``failed/``, and the next call repeats it.

    Runs that differ only in merging are trained once: copies of the trained model are merged and
    tested. Their results are those of separate trainings.

    If neither the plan nor a recipe sets a learning rate, the recipe trains at the rate that the
    default recipe would have with the same trainable set, so that all recipes train alike.

    In a script, put the call under ``if __name__ == "__main__":``: worker processes import it.

    Args:
        plan: what to compare.
        out: where the results go: ``runs/*/result.json``, ``failed/*.txt``, ``results.json``. A
            folder, or an address that fsspec can write to, such as ``s3://bucket/name``. A second
            plan with the same ``out`` on this machine is refused. Two machines with the same
            address both do all runs, and write equal results.
        jobs: number of runs at a time. If None, GPUs do as many as ``per_gpu`` says, a CPU one per
            core, and other devices, such as ``xpu``, one. On a CPU they share its cores, and the
            last digits of the results depend on the number of threads (``OMP_NUM_THREADS`` fixes
            it).
        per_gpu: the most runs at a time on each GPU. With ``"auto"``, ``jobs`` decides. If that is
            None, GPUs do several runs of a small model at a time, as many as their memory and the
            cores of the CPU allow. Results do not depend on it.
        engine: ``"local"`` processes, or ``"ray"``.
        gpus: GPUs per run on Ray.
        address: address of the Ray cluster.
        config: text for ``config.yaml``.
        tracking: trackers that get the log and the final scores of each run. Results do not depend
            on it.
        on_finished: called with each run that has ended, its result or None, and its traceback.
        on_progress: called with a run, the name of its activity, the amount done and the total
            amount (local engine only).
    """
    if engine not in ("local", "ray"):
        raise ValueError(f"engine must be local or ray, got {engine!r}")
    with claim(place := Place.at(output_name(out)), "compare", paths_of(plan)):
        processes.refuse_in_import("compare")
        plan = with_rates(plan)
        works = engine == "local" and len(finished_runs(plan, place)) < len(plan.runs)
        return compare_in(
            place, plan, crew=crew_for(plan, jobs, per_gpu, works=works), engine=engine, gpus=gpus,
            address=address, config=config, tracking=tracking, on_finished=on_finished,
            on_progress=on_progress,
        )  # fmt: skip


def compare_in(
    place: Place,
    plan: Plan,
    *,
    crew: Crew,
    engine: str,
    gpus: float,
    address: str | None,
    config: str | None,
    tracking: Tracking | None,
    on_finished: OnFinished | None,
    on_progress: Callable[[RunSpec, str, int, int], None] | None,
) -> Results:
    """:func:`compare` in a place that is claimed, with a plan that has all rates."""
    warn_of_known_target(plan.data, plan.target)
    if config is not None:
        write_changed(place / "config.yaml", config)
    results = finished_runs(plan, place)
    left = [spec for spec in plan.runs if spec.id not in results]
    failed: dict[str, str] = {}
    if tracking and left:
        tracking.prepare(place.folder / "tracking")

    def ended(spec: RunSpec, result: RunResult | None, error: str | None) -> None:
        note = place / "failed" / f"{spec.id}.txt"
        if result is not None:
            results[spec.id] = result
            note.remove()
        else:
            failed[spec.id] = error or ""
            note.write_text(failed[spec.id])
        if on_finished:
            on_finished(spec, result, error)

    if engine == "ray" and left:
        _run_on_ray(plan, left, place, ended, gpus, address, tracking)
    else:
        _run_locally(plan, left, place, ended, crew, on_progress, tracking)
    everything = collect(results, failed, plan)
    (place / "results.json").write_text(everything.to_json())
    return everything


def finished_runs(plan: Plan, place: Place) -> dict[str, RunResult]:
    read = {spec.id: read_result(_result_file(place, spec), spec) for spec in plan.runs}
    return {name: result for name, result in read.items() if result is not None}


def _result_file(place: Place, spec: RunSpec) -> Place:
    return place / "runs" / spec.id / "result.json"


def _run_locally(
    plan: Plan,
    specs: Sequence[RunSpec],
    out: Place,
    on_finished: OnFinished,
    crew: Crew,
    on_progress: Callable[..., None] | None,
    tracking: Tracking | None = None,
) -> None:
    """Run the specs in parallel processes. A run has ended when its result is written.

    If a run fails because of others on its GPU, it is resumed after them, alone on a GPU. If a
    process dies, for example because the machine is out of memory, its run is resumed after all
    other runs have ended, with no other run in parallel. If the process dies again, the run has
    failed.
    """
    told: set[str] = set()

    def end(spec: RunSpec, result: RunResult | None, error: str | None = None) -> None:
        if spec.id in told:  # before the rest of its group
            return
        told.add(spec.id)
        if result is not None:
            crew.learn(result.peak_memory)
        on_finished(spec, result, error)

    def on_message(call: tuple[Any, ...], kind: str, number: int, *values: Any) -> None:
        spec = call[1][number]
        if kind == "result":
            end(spec, *values)
        elif on_progress:
            on_progress(spec, *values)

    run = partial(
        run_group, progress=partial(processes.report_progress, "progress"), tracking=tracking,
        on_result=partial(processes.report_progress, "result"),
    )  # fmt: skip
    disturbed: list[RunSpec] = []
    died: list[RunSpec] = []
    passes = (specs, crew.workers), (disturbed, crew.alone), (died, crew.alone[:1])
    # If the first run tells how much memory one needs, all workers may run after it.
    jobs = crew.at_a_time if crew.need else len(crew.workers)
    for some, workers in passes:
        ended = processes.call_in_processes(
            run, deque((plan, group, out) for group in trainings(some)),
            caller="compare", jobs=jobs, workers=workers,
            admits=crew.admits, on_progress=on_message,
        )  # fmt: skip
        with contextlib.closing(ended):
            for one in ended:
                group = one.call[1]
                if one.disturbed:
                    crew.lower(one.gpu, one.at_a_time, one.error or "")
                    disturbed += group
                    logger.warning(
                        f"{group[-1].label}, seed {group[-1].seed}, failed beside other runs "
                        f"and is repeated alone: {processes.reason(one.error or '')[:200]}"
                    )
                    continue
                if one.died and some is not died:
                    died += group
                    continue
                twice = "the worker process died twice, possibly out of memory"
                error = twice if one.died else one.error
                for ending in _endings(group, out, one.value, error):
                    end(*ending)


def _endings(
    group: Sequence[RunSpec],
    out: Place,
    ended: Sequence[tuple[RunResult | None, str | None]] | None,
    error: str | None,
) -> Iterator[tuple[RunSpec, RunResult | None, str | None]]:
    """The endings of all runs of a group; if it was cut short, of those without a result."""
    for number, spec in enumerate(group):
        if ended is not None:
            yield spec, *ended[number]
        else:
            found = read_result(_result_file(out, spec), spec)
            yield spec, found, None if found else error


def _run_on_ray(
    plan: Plan,
    specs: Sequence[RunSpec],
    out: Place,
    on_finished: OnFinished,
    gpus: float,
    address: str | None,
    tracking: Tracking | None,
) -> None:
    """Run as tasks of a Ray cluster. If a node dies, Ray retries its task on another node.

    All nodes must be able to reach ``out``. In a shared folder a repeated run resumes; at an
    address (``s3://…``) it starts again.
    """
    ray = require("ray", extra="ray", what="engine ray")
    joined = not ray.is_initialized()
    if joined:
        _join(ray, address)
    pending: dict[Any, tuple[RunSpec, ...]] = {}
    try:
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=3)(_run_on_node)
        if gpus > (available := ray.cluster_resources().get("GPU", 0)):
            warnings.warn(
                f"each run needs {gpus:g} GPUs, but the cluster has {available:g}: the runs wait "
                "until it has more",
                stacklevel=2,
            )
        for group in trainings(specs):
            pending[task.remote(plan, group, out, os.getcwd(), tracking)] = group
        while pending:
            (done, *_), _ = ray.wait(list(pending))
            group = pending.pop(done)
            try:
                ended, error = ray.get(done)
            except ray.exceptions.RayError as failure:  # its nodes died, one after the other
                ended, error = None, str(failure)
            for ending in _endings(group, out, ended, error):
                on_finished(*ending)
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
        if host and port.isdigit():  # Ray itself would retry for many minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # of many kinds
        where = f" at {address}" if address else ""
        raise ConnectionError(f"cannot join a Ray cluster{where}: {error}") from error


def _run_on_node(
    plan: Plan, group: Sequence[RunSpec], out: Place, here: str, tracking: Tracking | None
) -> tuple[Any, str | None]:
    """In a Ray task. Relative paths refer to the directory in which the plan was started."""
    if Path(here).is_dir():
        os.chdir(here)
    torch.set_num_threads(1)  # the one CPU that the task asked for
    ended, error, _ = processes.attempt(run_group, (plan, group, out, None, tracking))
    return ended, error


_worker: Worker | None = None


def run_group(
    plan: Plan,
    group: Sequence[RunSpec],
    out: Place,
    progress: Callable[..., None] | None = None,
    tracking: Tracking | None = None,
    on_result: Callable[[int, RunResult], None] | None = None,
) -> list[tuple[RunResult | None, str | None]]:
    """Do runs that share a training with the worker of this process.

    Return the result or the traceback of each. The last run trains for all. A run that has no
    result after that is done alone.

    The worker keeps what all runs of a plan share. ``progress`` is called with the number of a run
    in the group, the name of its activity, the amount done and the total amount; ``on_result`` with
    the number of a run and its result when that is written, and once more at its turn if it shared.
    """
    global _worker
    folder = out.folder / "runs"
    given = plan, folder, tracking or Tracking()
    if _worker is None or (_worker.plan, _worker.folder, _worker.tracking) != given:
        _worker = Worker(*given, group=out.path.rpartition("/")[2])
    *others, last = range(len(group))
    ended: dict[int, tuple[RunResult | None, str | None]] = {}
    for number in (last, *others):
        tell = partial(progress, number) if progress else None
        sharing = group[:-1] if number == last else ()
        try:
            result = _worker(group[number], tell, out / "runs", sharing, on_result)
            ended[number] = result, None
        except Exception as error:
            if processes.device_failed(error) and (processes.at_a_time() or 1) > 1:
                raise  # others on the device may be the cause: the group is repeated
            ended[number] = None, "".join(traceback.format_exception(error))
        else:
            if on_result:
                on_result(number, result)
    return [ended[number] for number in sorted(ended)]
