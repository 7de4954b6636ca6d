"""Run the whole proof, one setting after another, in the order of PROTOCOL.md; then collect it.

    python benchmarks/proof/everything.py --models MODELS --data DATA --runs RUNS
    python benchmarks/proof/everything.py … --only smollm2_boolq,minilm --seconds 500
    python benchmarks/proof/everything.py --runs RUNS --collect benchmarks/proof/results

MODELS holds the directories smollm2, qwen-0.5b, qwen-1.5b, minilm, efficientnet and resnet, and the
file mobilenet_v2.pth; only those of the chosen settings are needed. DATA holds lm, glue and vision.
Several processes share the runs of a setting. Finished runs are not repeated, so that the same
command goes on after a stop.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
#: Runs beyond the settings of language models, which need the results of ``smollm2_gsm8k``.
BEYOND = ("ablations", "abilities", "continual")


class Setting(NamedTuple):
    """A script and its arguments; those of ``runs`` are of no use to collect."""

    name: str
    script: str
    runs: Sequence[str]
    always: Sequence[str] = ()


def settings(models: Path, data: Path, runs: Path) -> Iterator[Setting]:
    """All settings, in their order."""

    def common(name: str) -> list[str]:
        return [
            f"--model={models / name}", f"--data={data}", f"--prepared={runs / f'prepared-{name}'}"
        ]  # fmt: skip

    def language(name: str, target: str) -> Setting:
        return Setting(
            f"{name}_{target}", "language_models", [*common(name), "--stage=both"],
            [f"--name={name}", f"--target={target}"],
        )  # fmt: skip

    for target in ("gsm8k", "mbpp", "boolq", "shakespeare"):
        yield language("smollm2", target)
    yield language("qwen-0.5b", "gsm8k")
    yield language("qwen-0.5b", "shakespeare")
    yield language("qwen-1.5b", "gsm8k")
    for target in ("rte", "sst2", "cola", "mrpc"):
        given = [f"--model={models / 'minilm'}", f"--data={data}", "--stage=both"]
        yield Setting(f"minilm_{target}", "sentence_encoders", given, [f"--only={target}-"])
    vision = data / "vision"
    images = [
        f"--weights={models / 'mobilenet_v2.pth'}", f"--efficientnet={models / 'efficientnet'}",
        f"--resnet={models / 'resnet'}", f"--flowers={vision / 'flowers102.tar'}",
        "--imagenet", *(str(vision / f"imagenet-val-{part}.tar") for part in "ab"), "--stage=both",
    ]  # fmt: skip
    for model in ("mobilenet-v2", "efficientnet-lite0", "resnet-50"):
        yield Setting(f"{model}_flowers102", "image_models", images, [f"--only={model}-"])
    for script in BEYOND:
        yield Setting(script, script, common("smollm2"))
    yield Setting("abilities_qwen", "abilities", common("qwen-0.5b"), ["--name=qwen-0.5b"])
    yield language("qwen-0.5b", "mbpp")


def command(setting: Setting, folder: Path, *more: str) -> list[str]:
    script = str(HERE / f"{setting.script}.py")
    return [sys.executable, script, f"--runs={folder}", *setting.always, *more]


def run(setting: Setting, folder: Path, processes: int, seconds: float) -> bool:
    """Run a setting in several processes; returns whether all of them ended well."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.claim"):  # of processes that were stopped
        stale.unlink()
    given = command(setting, folder, *setting.runs, f"--seconds={seconds:.0f}")
    started = [subprocess.Popen(given) for _ in range(processes)]
    try:
        statuses = [process.wait() for process in started]
        return not any(statuses)
    finally:
        for process in started:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--runs", type=Path, required=True, help="where the runs' records go")
    parser.add_argument("--only", default="", help="settings whose names hold one of these")
    parser.add_argument("--processes", type=int, default=4, help="that share the GPU")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run later")
    parser.add_argument("--collect", type=Path, metavar="FOLDER", help="only collect, into files")
    args = parser.parse_args()
    begin, failed = time.monotonic(), []
    for setting in settings(args.models, args.data, args.runs):
        if not any(part in setting.name for part in args.only.split(",")):
            continue
        folder, left = args.runs / setting.name, args.seconds - (time.monotonic() - begin)
        if args.collect is not None:
            if folder.exists():
                file = args.collect / f"{setting.name}.json"
                subprocess.run(command(setting, folder, f"--collect={file}"), check=True)
        elif left > 0:
            print(f"{setting.name}, {left:.0f} s left", flush=True)
            if not run(setting, folder, args.processes, left):
                failed.append(setting.name)
    if failed:
        sys.exit(f"not all runs ended well: {', '.join(failed)}")


if __name__ == "__main__":
    main()
