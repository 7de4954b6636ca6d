"""Do two ranks train the weights of one process? The largest difference after 50 updates.

Methods that look at θ* or at the whole model (the largest momenta, a norm), on two gloo ranks
under DistributedDataParallel and FSDP2, in float64 and float32. A minute on a CPU.

    python benchmarks/ranks.py --json FILE
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from _common import write_results

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import sharded  # type: ignore[import-not-found]

DTYPES = (torch.float64, torch.float32)


def compare(dtype: torch.dtype) -> list[dict[str, object]]:
    """A row a method: max |Δ| of each kind, and how far training has moved a weight."""
    with tempfile.TemporaryDirectory() as folder:
        found = {
            kind: sharded.on_two_ranks(kind, sharded.RECIPES, dtype, folder)
            for kind in sharded.KINDS
        }
    start = sharded.whole_state(sharded.make_model().to(dtype))
    rows = []
    for names in sharded.RECIPES:
        single = sharded.on_one_process(names, dtype)
        apart = {kind: sharded.furthest(found[kind][names], single) for kind in sharded.KINDS}
        moved = sharded.furthest(single, start)
        name = str(dtype).removeprefix("torch.")
        rows.append({"recipe": names, "dtype": name, "moved": moved, **apart})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    torch.set_num_threads(1)
    print(f"{'max |Δ| to one process':24}" + "".join(f"{k:>10}" for k in [*sharded.KINDS, "moved"]))
    rows = [row for dtype in DTYPES for row in compare(dtype)]
    for row in rows:
        figures = "".join(f"{row[kind]:10.1e}" for kind in [*sharded.KINDS, "moved"])
        print(f"{row['recipe']!s:12}{row['dtype']!s:12}{figures}")
    if args.json:
        protocol = {
            "ranks": 2, "backend": "gloo", "updates": sharded.STEPS, "seeds": sharded.SEEDS,
            "recipes": sharded.RECIPES,
        }  # fmt: skip
        write_results(args.json, torch.device("cpu"), protocol, rows=rows)


if __name__ == "__main__":
    main()
