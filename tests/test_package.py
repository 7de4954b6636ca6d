"""The wheel and the source archive: built, complete, and usable in an environment of their own."""

import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="hatchling, which builds the package, is not installed")
from packaging.metadata import Metadata
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
#: A checkpoint is a folder with these; no optional package is needed to write one.
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8}
SAVE = """
import json, pathlib, sys, torch
from safetensors.torch import save_file
for name, shift in (("base", 0.0), ("tuned", 0.1)):
    folder = pathlib.Path(name)
    folder.mkdir()
    weights = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(4, 4) + shift for i in range(2)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(sys.argv[1])
"""
STEP = """
import torch
from holdfast import RecAdam, finetune_loop
weight = torch.nn.Parameter(torch.ones(3))
optimizer = RecAdam([weight], lr=0.1, gamma=1.0)
weight.grad = torch.ones(3)
optimizer.step()
data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
model = torch.nn.Linear(4, 2)
finetune_loop(model, "recadam+flow+wise-ft", data, lr=1e-2, task="classification", progress=False)
print("trained")
"""


def built(what, folder):
    command = [sys.executable, "-m", "hatchling", "build", "--target", what, "--directory", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = (path for path in folder.iterdir() if (path.suffix == ".whl") == (what == "wheel"))
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built("wheel", tmp_path_factory.mktemp("wheel"))


def required(names, seen):
    """The installed distributions that some packages need, without extras."""
    for name in names:
        found = importlib.metadata.distribution(name)
        if found.metadata["Name"] not in seen:
            seen[found.metadata["Name"]] = found
            needs = map(Requirement, found.requires or ())
            wanted = [n for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
            required([n.name for n in wanted], seen)
    return seen


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """An environment with the wheel and what it says it requires, linked from this one."""
    place = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(place, symlinks=True, with_pip=False)
    (site,) = place.rglob("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        about = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(about))
        archive.extractall(site)
    core = [n.name for n in metadata.requires_dist if n.marker is None]
    for found in required(core, {}).values():
        for top in {Path(file).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(found.locate_file(top)).resolve())
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}

    def run(*arguments, cwd):
        command = [place / "bin" / "python", *arguments]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=clean)

    return run


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"holdfast"}
    for data in (
        "py.typed", "report/page.html.j2", "report/plotly/plotly-cartesian.min.js.gz",
        "report/plotly/LICENSE", "builtin/model/model.safetensors",
    ):  # fmt: skip
        assert f"holdfast/{data}" in names
    assert any(name.endswith("LICENSE") for name in names)


def test_plotly_is_the_file_that_its_page_names(wheel):
    archive = zipfile.ZipFile(wheel)
    script = archive.read("holdfast/report/plotly/plotly-cartesian.min.js.gz")
    about = (ROOT / "src" / "holdfast" / "report" / "plotly" / "README.md").read_text()
    digest = hashlib.sha256(gzip.decompress(script)).hexdigest()
    assert re.findall(r"`([0-9a-f]{64})`", about) == [digest]


def test_the_source_archive_builds(tmp_path):
    archive = built("sdist", tmp_path)
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/holdfast/__init__.py"} <= names
    about = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
    assert {name.split("/")[0] for name in names} <= {"", "src", *about}


def test_the_metadata_is_valid(wheel):
    archive = zipfile.ZipFile(wheel)
    about = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    found = Metadata.from_email(archive.read(about), validate=True)
    assert {"cli", "eval", "gguf", "hf", "peft", "trl"} <= set(found.provides_extra)
    core = {n.name for n in found.requires_dist if n.marker is None}
    assert core == {"torch", "safetensors", "numpy", "fsspec"}
    assert found.description_content_type == "text/markdown"


def test_the_core_trains_in_an_empty_environment(bare, tmp_path):
    found = bare("-c", "import transformers", cwd=tmp_path)
    assert "No module named 'transformers'" in found.stderr  # it is empty
    done = bare("-c", STEP, cwd=tmp_path)
    assert done.stdout == "trained\n", done.stderr


def test_commands_in_an_empty_environment(bare, tmp_path):
    version = bare("-m", "holdfast", "--version", cwd=tmp_path)
    assert importlib.metadata.version("holdfast") in version.stdout, version.stderr
    done = bare("-c", SAVE, json.dumps(CONFIG), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    measured = bare("-m", "holdfast", "measure", "base", "tuned", cwd=tmp_path)
    assert "The weights moved by 10.0 % of their norm" in measured.stdout, measured.stderr
    (tmp_path / "x.jsonl").write_text('{"text": "a"}')
    given = ["--model=base", "--data=x.jsonl", "--out=out"]
    refused = bare("-m", "holdfast", "finetune", *given, cwd=tmp_path)
    assert refused.returncode == 1
    assert 'pip install "holdfast[' in refused.stderr
