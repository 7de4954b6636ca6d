"""Many runs, each a record of its own: several processes share them, and a stop loses one at most.

A process claims a run by making its ``.claim`` file; a run is done when its ``.json`` is there.
Claims of processes that died are stale: remove ``*.claim`` before starting again. What a results
file holds need not be run again:

    python benchmarks/papers/_jobs.py benchmarks/papers/results/vision.json RUNS
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _common import default_device, describe, versions

Record = dict[str, Any]
Job = Callable[[], Record]


class Parser(argparse.ArgumentParser):
    """The arguments that all tables have; what the runs need is asked for only to run."""

    def __init__(self, about: str | None) -> None:
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.inputs: list[str] = []
        self.add_argument("--runs", type=Path, required=True, help="where the runs' records go")
        self.add_argument(
            "--only", default="", help="runs whose names hold one of these, by commas"
        )
        self.add_argument("--seconds", type=float, default=math.inf, help="begin none later")
        self.add_argument(
            "--collect", type=Path, metavar="FILE.json", help="only put the finished runs together"
        )

    def add_input(self, name: str, **options: Any) -> None:
        """A path that the runs read."""
        self.inputs.append(name)
        self.add_argument(name, type=Path, **options)

    def parse_args(self, *given: Any, **more: Any) -> Any:
        args = super().parse_args(*given, **more)
        missing = [
            name
            for name in self.inputs
            if getattr(args, name.lstrip("-").replace("-", "_")) is None
        ]
        if missing and args.collect is None:
            self.error(f"to run, pass {', '.join(missing)}")
        return args


def work(jobs: Mapping[str, Job], folder: Path, seconds: float = math.inf) -> list[str]:
    """Run what nobody has run or claimed, as long as there is time; return what failed."""
    folder.mkdir(parents=True, exist_ok=True)
    begin, failed = time.monotonic(), []
    for name, job in jobs.items():
        if time.monotonic() - begin > seconds:
            break
        done, claim = folder / f"{name}.json", folder / f"{name}.claim"
        if done.exists() or not _claimed(claim):
            continue
        started = time.monotonic()
        (folder / f"{name}.error").unlink(missing_ok=True)  # of an earlier attempt
        try:
            record = job()
        except Exception:
            failed.append(name)
            (folder / f"{name}.error").write_text(traceback.format_exc(), encoding="utf-8")
            print(f"{name}: failed, see {name}.error", flush=True)
            continue
        took = round(time.monotonic() - started, 1)
        record = {"run": name, **record, "seconds": took, "made": made()}
        part = folder / f"{name}.part"
        part.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
        part.rename(done)
        claim.unlink(missing_ok=True)
        shown = {k: v for k, v in record.items() if isinstance(v, int | float)}
        print(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in shown.items()), flush=True)
    return failed


def selected(jobs: Mapping[str, Job], only: str) -> dict[str, Job]:
    """The jobs that ``--only`` names."""
    return {name: job for name, job in jobs.items() if any(x in name for x in only.split(","))}


def work_first(jobs: Mapping[str, Job], args: Any) -> None:
    """Run the first of two stages, and wait for other processes; next is ``--stage more``."""
    jobs, begin = selected(jobs, args.only), time.monotonic()
    work(jobs, args.runs, args.seconds)
    wait_for_others(jobs, args.runs)
    args.stage, args.seconds = "more", args.seconds - (time.monotonic() - begin)


def work_or_collect(jobs: Mapping[str, Job], args: Any, protocol: Record) -> dict[str, Job]:
    """Run the chosen jobs and exit, or put the finished runs together; returns the chosen jobs."""
    jobs = selected(jobs, args.only)
    if args.collect is None:
        sys.exit(1 if work(jobs, args.runs, args.seconds) else 0)
    collect(args.runs, jobs, args.collect, protocol)
    return jobs


def _claimed(claim: Path) -> bool:
    own = claim.with_name(f"{claim.name}.{os.getpid()}")
    own.write_text(str(os.getpid()), encoding="utf-8")
    try:
        os.link(own, claim)  # so that nobody reads an empty one
    except FileExistsError:
        return False
    finally:
        own.unlink()
    return True


def wait_for_others(names: Iterable[str], folder: Path) -> None:
    """Wait until other processes have done, or tried in vain, what they claimed."""

    def under_way(name: str) -> bool:
        ends = (folder / f"{name}.json", folder / f"{name}.error")
        return not any(file.exists() for file in ends) and _is_worked_on(folder / f"{name}.claim")

    while any(map(under_way, names)):
        time.sleep(1)


def _is_worked_on(claim: Path) -> bool:
    """Whether the process that claimed a run still exists; all are on one machine."""
    try:
        os.kill(int(claim.read_text(encoding="utf-8")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except PermissionError:
        pass  # it exists, and is somebody else's
    return True


def failed(folder: Path, names: Iterable[str]) -> list[str]:
    """Those that a process has tried in vain."""
    return [name for name in names if (folder / f"{name}.error").exists()]


def records(folder: Path) -> dict[str, Record]:
    """What is done, by the names of the runs."""
    found = (json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json")))
    return {record["run"]: record for record in found}


def made() -> Record:
    """On what, with which versions, and of which commit."""
    found = {name: version for name, version in versions("transformers", "peft").items() if version}
    return {
        "device": describe(default_device()),
        "versions": found,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def collect(folder: Path, names: Iterable[str], out: Path, protocol: Record) -> None:
    """Put the runs of a table into one file, which names those that are missing."""
    done, names = records(folder), list(names)
    missing = [name for name in names if name not in done]
    runs, machines = [], []
    for name in names:
        if name in done:
            run = dict(done[name])
            machine = run.pop("made")
            if machine not in machines:
                machines.append(machine)
            runs.append({**run, "made": machines.index(machine)})
    write_runs(out, protocol, machines, missing, runs)


def write_runs(
    out: Path, protocol: Record, made: list[Record], missing: list[str], runs: list[Record]
) -> None:
    """Write the runs of a table, with the machines that made them, into one file."""
    record = {"protocol": protocol, "made": made, "missing": missing, "runs": runs}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_readable(record), encoding="utf-8")
    print(f"{out}: {len(runs)} runs" + (f", {len(missing)} are missing" if missing else ""))


def _readable(record: Record) -> str:
    """Indented, but a run a line."""
    runs = record.pop("runs")
    head = json.dumps(record, indent=2, ensure_ascii=False)[:-2]
    lines = ",\n    ".join(json.dumps(run, ensure_ascii=False) for run in runs)
    return f'{head},\n  "runs": [\n    {lines}\n  ]\n}}\n'


def restore(results: Path, folder: Path) -> None:
    """Put the runs of a results file back, each into a file of its own."""
    record = json.loads(results.read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    for run in record["runs"]:
        run["made"] = record["made"][run["made"]]
        text = json.dumps(run, ensure_ascii=False)
        (folder / f"{run['run']}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Put the runs of a results file back.")
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    restore(**vars(parser.parse_args()))
