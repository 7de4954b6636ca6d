"""Run ``holdfast compare`` and ``tune`` as users would, and keep what came of them.

python benchmarks/comparisons.py default --json FILE         # holdfast compare
python benchmarks/comparisons.py methods --json FILE         # the same with more recipes
python benchmarks/comparisons.py tune --json FILE            # holdfast tune
python benchmarks/comparisons.py minilm_rte --json FILE      # examples/compare/*.yaml: they need
python benchmarks/comparisons.py smollm2_gsm8k --json FILE   # models/ and data/ here

What is kept is results.json (of ``tune``: tune.json, and of its models the scores alone) without
the curves over the updates.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from _common import default_device, write_results

from holdfast.cli import main as holdfast

MANY = (
    "standard", "holdfast", "spd", "recadam", "flow", "recadam+flow", "l2-sp", "ewc", "mofo", "hft",
    "lora", "wise-ft", "recadam+flow+wise-ft", "sfa",
)  # fmt: skip
COMMANDS = {
    "default": ["compare"],
    "methods": ["compare", "--recipes", *MANY],
    "tune": ["tune", "--trials=20"],
    "minilm_rte": ["compare", "--config=examples/compare/minilm_rte.yaml"],
    "smollm2_gsm8k": ["compare", "--config=examples/compare/smollm2_gsm8k.yaml"],
}


def slim(kept: Any) -> Any:
    """Without curves, and paths by their last name."""
    if isinstance(kept, dict):
        return {name: slim(value) for name, value in kept.items() if name != "curves"}
    if isinstance(kept, list):
        return [slim(value) for value in kept]
    return Path(kept).name if isinstance(kept, str) and kept.startswith("/") else kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=list(COMMANDS))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    given, more = parser.parse_known_args()
    out = given.out or Path("runs") / given.which
    command = [*COMMANDS[given.which], f"--out={out}", *more]
    begin = time.monotonic()
    if status := holdfast(command):
        sys.exit(status)
    seconds = time.monotonic() - begin
    file = "tune.json" if given.which == "tune" else "results.json"
    kept = slim(json.loads((out / file).read_text(encoding="utf-8")))
    if given.which == "tune":
        best = [recipe["best"] for recipe in kept["recipes"]]
        for point in (kept["taken"], kept["default"], *kept["frontier"], *best):
            for half in ("chosen", "reported"):
                del point[half]["versions"], point[half]["kl"], point[half]["drift"]
    shown = [word for word in command if not word.startswith("--out")]
    protocol = {"command": " ".join(["holdfast", *shown]), "seconds": round(seconds, 1)}
    write_results(given.json, default_device(), protocol, **kept)


if __name__ == "__main__":
    main()
