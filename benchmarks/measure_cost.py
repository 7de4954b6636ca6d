"""The cost of ``holdfast measure`` on a CPU, before and now.

    python benchmarks/measure_cost.py --base DIR --tuned DIR --text wiki.txt --target gsm8k.jsonl \\
        --rows 40 --kilobytes 60 --before OTHER_CHECKOUT/src

Measures a tuned model on the first rows of a file and the beginning of a text, each version as a
process of its own, in turns. The wall time needs an idle machine; the time on processors is less
disturbed by other work.
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
RESULTS = Path(__file__).parent / "results" / "measure_cost.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("base", "tuned", "text", "target"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--before", type=Path, help="the folder src of another version")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--kilobytes", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    sources = {"measure": SOURCE}
    if options.before:
        sources = {"measure_before": options.before, **sources}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    with tempfile.TemporaryDirectory() as folder:
        text, rows = Path(folder, "text.txt"), Path(folder, "rows.jsonl")
        text.write_bytes(Path(options.text).read_bytes()[: 1000 * options.kilobytes])
        lines = Path(options.target).read_text(encoding="utf-8").splitlines(keepends=True)
        rows.write_text("".join(lines[: options.rows]), encoding="utf-8")
        words = ["measure", options.base, options.tuned, "--text", str(text), "--target", str(rows)]
        for _ in range(options.repeats):
            for name, source in sources.items():
                command = [sys.executable, "-m", "holdfast", *words]
                times[name].append(spent(command, source, str(Path(folder, "compiled"))))
    medians = {n: [statistics.median(c) for c in zip(*t, strict=True)] for n, t in times.items()}
    first = medians[next(iter(medians))]
    case = f"{options.rows} rows, {options.kilobytes} kB of text"
    found = []
    for name, (wall, processor) in medians.items():
        row = {"case": case, "impl": name, "ms": round(1e3 * wall), "processor_s": round(processor)}
        found.append({**row, "x_before": round(processor / first[1], 3)})
        print(f"{name:16}{wall:8.0f} s{processor:8.0f} s of CPU time{processor / first[1]:8.2f}")
    protocol = {"repeats": options.repeats, "x_before": "ratio of the CPU times"}
    write_results(options.results, torch.device("cpu"), protocol, rows=found)


if __name__ == "__main__":
    main()
