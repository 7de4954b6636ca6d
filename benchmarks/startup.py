"""The CPU time of starting: Python, torch, holdfast, its main names and its command line.

    python benchmarks/startup.py --before OTHER_CHECKOUT/src

Each row is a process of its own, in turns, with compiled modules as after an installation. Figures
are medians of the time on processors, which other work on the machine disturbs little.
``--before`` measures another version as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from _common import spent, write_results

SOURCE = Path(__file__).resolve().parents[1] / "src"
RESULTS = Path(__file__).parent / "results" / "startup.json"
#: What each process runs, and the one whose time is subtracted from its own.
COMMANDS: dict[str, tuple[list[str], str | None]] = {
    "python": (["-c", "pass"], None),
    "import_torch": (["-c", "import torch"], None),
    "import_holdfast": (["-c", "import torch, holdfast"], "import_torch"),
    "import_main_names": (
        ["-c", "import torch; from holdfast import Recipe, finetune_loop"],
        "import_torch",
    ),
    "help": (["-m", "holdfast", "--help"], "python"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="the folder src of another version")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    sources = {"before": options.before, "now": SOURCE} if options.before else {"now": SOURCE}
    times: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as compiled:
        for number in range(1 + options.repeats):
            for case, source in sources.items():
                for name, (words, _) in COMMANDS.items():
                    found = spent([sys.executable, *words], source, compiled)
                    if number:  # the first round compiles
                        times.setdefault((case, name), []).append(found[1])
    medians = {key: statistics.median(each) for key, each in times.items()}
    rows = []
    for (case, name), value in medians.items():
        beside = COMMANDS[name][1]
        added = None if beside is None else round(value - medians[case, beside], 3)
        row = {"case": case, "impl": name, "processor_s": round(value, 3), "added_s": added}
        rows.append({**row, "x_torch": round(value / medians[case, "import_torch"], 3)})
        print(f"{case:8}{name:20}{value:8.2f} s{'' if added is None else f'{added:+10.3f} s'}")
    protocol = {"repeats": options.repeats, "figure": "median CPU time of a process"}
    write_results(options.results, torch.device("cpu"), protocol, rows=rows)


if __name__ == "__main__":
    main()
