"""Fine-tune a language model with several settings, and let ``holdfast check`` judge each of them.

python benchmarks/gate.py --model SMOLLM2 --data DATA --json FILE

SMOLLM2 is a directory that transformers reads, DATA holds lm/*.gz. Every model is trained by
``holdfast finetune`` for one epoch of GSM8K and checked by ``holdfast check``, as a pipeline would;
what is kept of a check is its exit code and its figures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _common import default_device, write_results

RUNS = {
    "standard, lr 1e-3": ["--recipe=standard", "--lr=1e-3"],
    "standard, lr 5e-4": ["--recipe=standard", "--lr=5e-4"],
    "standard, lr 1e-4": ["--recipe=standard", "--lr=1e-4"],
    "holdfast": ["--recipe=holdfast"],
}
TRAINING = ["--epochs=1", "--batch-size=32"]
LIMITS = ["--max-perplexity-rise=3%", "--max-skill-rise=30%", "--max-kl=0.15"]
TESTS = ["--skills", "--limit-tokens=50000"]


def holdfast(*arguments: str) -> tuple[int, float, str]:
    """Run a command as a pipeline does; return its exit code, its seconds and what it printed."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "holdfast", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return done.returncode, round(time.monotonic() - begin, 1), done.stdout


def row(name: str, model: Path, data: Path, out: Path) -> dict[str, Any]:
    """Train one model and check it."""
    tuned, train = out / "tuned", data / "gsm8k-train.jsonl.gz"
    given = [f"--model={model}", f"--data={train}", *RUNS[name], *TRAINING, f"--out={tuned}"]
    code, trained, said = holdfast("finetune", *given)
    if code:
        raise SystemExit(said)
    texts = [f"--text={data / 'wikitext2-test.txt.gz'}", f"--target={data / 'gsm8k-test.jsonl.gz'}"]
    code, checked, said = holdfast(
        "check", str(model), str(tuned), *LIMITS, *texts, *TESTS, f"--out={out / 'gate'}"
    )
    print(said, flush=True)
    gate = json.loads((out / "gate" / "gate.json").read_text(encoding="utf-8"))
    figures = [
        {"limit": c["limit"], "name": c["name"], "value": c["value"]["value"], "most": c["most"],
         "passed": c["passed"]} for c in gate["checks"]
    ]  # fmt: skip
    targets = [s for s in gate["report"]["scores"] if s["role"] == "target"]
    return {
        "name": name, "exit_code": code, "training_seconds": trained, "check_seconds": checked,
        "checks": figures,
        "target": {s["metric"]: [s["before"]["value"], s["after"]["value"]] for s in targets},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs") / "gate")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--jobs", type=int, default=1, help="models side by side")
    given = parser.parse_args()
    shutil.rmtree(given.out, ignore_errors=True)
    with ThreadPoolExecutor(given.jobs) as jobs:  # each waits for its commands
        started = [
            jobs.submit(row, name, given.model, given.data / "lm", given.out / str(number))
            for number, name in enumerate(given.only)
        ]
        rows = [job.result() for job in started]
    options = " ".join([*TRAINING, *LIMITS, *TESTS])
    protocol = {"model": "SmolLM2-135M-Instruct", "data": "GSM8K", "options": options, "seeds": 1}
    protocol |= {"side by side": given.jobs}
    write_results(given.json, default_device(), protocol, rows=rows)


if __name__ == "__main__":
    main()
