"""Run a plan: what is left of it, wherever its engine is, and all results together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from holdfast._torch.checks import whole
from holdfast.comparison.plan import Plan
from holdfast.comparison.results import Results, RunResult
from holdfast.comparison.scheduler import Finished, Tell, refuse_in_import, run_locally, run_on_ray
from holdfast.io import codec as _codec
from holdfast.io.files import locked
from holdfast.io.storage import Place, read_result

__all__ = ["compare", "finished_runs"]


def compare(
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    jobs: int = 1,
    engine: str = "local",
    gpus: float = 0,
    address: str | None = None,
    config: str | None = None,
    on_finished: Callable[[Finished], None] | None = None,
    on_progress: Tell | None = None,
) -> Results:
    """Do every run of a plan that is not done yet, and put the results together.

    A plan that was stopped, however it was, goes on; the results are those of one that was not.
    Failed runs do not stop the rest: their tracebacks lie in ``failed/``, and they are tried again
    when the plan is run again.

    In a script the call stands under ``if __name__ == "__main__":``, since the processes import it.

    Args:
        plan: what to compare.
        out: where the results go: ``runs/*/result.json``, ``failed/*.txt``, ``results.json``; a
            folder, or an address that fsspec can write to, such as ``s3://bucket/name``. Two plans
            at once in one folder, or from one machine at one address, are refused. Two machines at
            one address do the work twice, and both are right.
        jobs: how many runs at a time. On a CPU they share its cores, and the last digits of the
            results depend on how many each has (``OMP_NUM_THREADS`` fixes it).
        engine: ``"local"`` processes, or ``"ray"``.
        gpus: what a run asks of Ray.
        address: of the Ray cluster.
        config: what the plan was read from, for ``config.yaml``.
        on_finished: told of each run that ends.
        on_progress: told of each run at work, how far it is (of local processes).
    """
    refuse_in_import("compare")
    whole("jobs", jobs, 1)
    if engine not in ("local", "ray"):
        raise ValueError(f"engine must be local or ray, got {engine!r}")
    specs = list(plan.runs())
    place = Place.at(out)
    with locked(place.folder, place.name):
        if config is not None:
            (place / "config.yaml").write_text(config)
        results = finished_runs(plan, place)
        left = [spec for spec in specs if spec.id not in results]
        failed: dict[str, str] = {}
        if engine == "ray" and left:
            ended: Iterator[Finished] = run_on_ray(plan, left, place, gpus, address)
        else:
            ended = run_locally(plan, left, place, jobs, on_progress)
        with contextlib.closing(ended):  # type: ignore[type-var]
            for finished in ended:
                spec, note = finished.spec, place / "failed" / f"{finished.spec.id}.txt"
                if finished.result is not None:
                    results[spec.id] = finished.result
                    note.remove()
                else:
                    failed[spec.id] = finished.error or ""
                    note.write_text(failed[spec.id])
                if on_finished:
                    on_finished(finished)
        together = Results(
            runs=tuple(results[spec.id] for spec in specs if spec.id in results),
            failed={name: text.strip().rpartition("\n")[2] for name, text in failed.items()},
            plan=_codec.encode(plan),
        )
        (place / "results.json").write_text(together.to_json() + "\n")
    return together


def finished_runs(plan: Plan, place: Place) -> dict[str, RunResult]:
    """The results that are there already, by the run's id."""
    read = {spec.id: read_result(place / "runs" / spec.id / "result.json") for spec in plan.runs()}
    return {name: result for name, result in read.items() if result is not None}
