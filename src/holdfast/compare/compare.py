"""Run a plan: what is left of it, wherever its engine is, and all results together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast._checks import whole
from holdfast._files import write_whole
from holdfast.compare.engine import Finished, run_locally, run_on_ray
from holdfast.compare.plan import Plan
from holdfast.compare.results import Results, RunResult
from holdfast.forgetting import _codec

__all__ = ["compare"]

Seen = Callable[[Finished, int, int], None]


def compare(
    plan: Plan,
    out: Path,
    *,
    jobs: int = 1,
    engine: str = "local",
    gpus: float = 0,
    address: str | None = None,
    on_finished: Seen | None = None,
) -> Results:
    """Do every run of a plan that is not done yet, and put the results together.

    A plan that was stopped, however it was, goes on; the results are those of one that was not.
    Failed runs do not stop the rest: their tracebacks lie in ``failed/``, and they are tried again
    when the plan is run again.

    Args:
        plan: what to compare.
        out: where the results go: ``runs/*/result.json``, ``failed/*.txt``, ``results.json``.
        jobs: how many runs at a time.
        engine: ``"local"`` processes, or ``"ray"``.
        gpus: what a run asks of Ray.
        address: of the Ray cluster.
        on_finished: told of each run that ends, with how many are done and how many there are.
    """
    whole("jobs", jobs, 1)
    if engine not in ("local", "ray"):
        raise ValueError(f"engine must be local or ray, got {engine!r}")
    specs = list(plan.runs())
    runs, failures = out / "runs", out / "failed"
    runs.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        results: dict[str, RunResult] = {}
        for spec in specs:
            if (found := _read(runs / spec.id / "result.json")) is not None:
                results[spec.id] = found
        left = [spec for spec in specs if spec.id not in results]
        failed: dict[str, str] = {}
        if engine == "ray":
            ended: Iterator[Finished] = run_on_ray(plan, left, runs, gpus, address)
        else:
            ended = run_locally(plan, left, runs, jobs)
        with contextlib.closing(ended):  # type: ignore[type-var]
            for finished in ended:
                spec, note = finished.spec, failures / f"{finished.spec.id}.txt"
                if finished.result is not None:
                    results[spec.id] = finished.result
                    note.unlink(missing_ok=True)
                else:
                    failures.mkdir(exist_ok=True)
                    failed[spec.id] = finished.error or ""
                    text = failed[spec.id]
                    write_whole(note, lambda path, text=text: path.write_text(text))  # type: ignore[misc]
                if on_finished:
                    on_finished(finished, len(results) + len(failed), len(specs))
        together = Results(
            runs=tuple(results[spec.id] for spec in specs if spec.id in results),
            failed={name: text.strip().rpartition("\n")[2] for name, text in failed.items()},
            plan=_codec.encode(plan),
        )
        write_whole(
            out / "results.json",
            lambda path: path.write_text(together.to_json() + "\n", encoding="utf-8"),
        )
    return together


def _read(file: Path) -> RunResult | None:
    """A finished run; None if it is not there. One that cannot be read is done again."""
    try:
        return RunResult.from_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        file.unlink()
        return None


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """No two plans at work in one place: the second is told so."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(out / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"another comparison is at work in {out}: give another --out"
            ) from None
        yield
