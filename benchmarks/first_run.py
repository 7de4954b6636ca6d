"""What the README's first commands print, and the same after plain fine-tuning.

    python benchmarks/first_run.py

The plain run has the learning rate that the recipe ``holdfast`` chose, and the same updates.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from _common import write_results

RESULTS = Path(__file__).parent / "results" / "first_run.json"
TRAIN = ["finetune", "--model", "builtin", "--data", "builtin"]
TESTS = ["--target", "builtin:dev", "--text", "builtin"]


def holdfast(*words: str, cwd: str) -> None:
    subprocess.run([sys.executable, "-m", "holdfast", *words], cwd=cwd, check=True)


def main() -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        plain: list[str] = []
        for recipe, options in (("holdfast", []), ("standard", plain)):
            holdfast(*TRAIN, *options, "--out", recipe, cwd=folder)
            holdfast("measure", "builtin", recipe, *TESTS, "--out", f"{recipe}-report", cwd=folder)
            report = json.loads(Path(folder, f"{recipe}-report", "report.json").read_text("utf-8"))
            trained = Path(folder, recipe, "holdfast_recipe.yaml").read_text("utf-8")
            lr = yaml.safe_load(trained)["update"]["lr"]
            plain += ["--recipe", "standard", "--lr", repr(lr)]
            rows.append({"recipe": recipe, "lr": lr, "scores": report["scores"]})
            text = Path(folder, f"{recipe}-report", "report.md").read_text("utf-8")
            rows[-1]["printed"] = text.split("\n## ")[0]
    protocol = f"holdfast {' '.join(TRAIN)}; holdfast measure builtin OUT {' '.join(TESTS)}"
    write_results(RESULTS, torch.device("cpu"), protocol, rows=rows)


if __name__ == "__main__":
    main()
