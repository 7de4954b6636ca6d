"""Claims of output directories: inputs and foreign files are never written over."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from holdfast.io.files import remove_cut_line, write_whole
from holdfast.io.outputs import (
    claim,
    claim_file,
    finished,
    local_path,
    write_changed,
    written_aside,
)
from holdfast.io.storage import Place

FULL = "/dev/full"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("mine")


def refused(words, out, command="score", inputs=("data.jsonl",), **more):
    with pytest.raises(ValueError, match=words), claim(out, command, inputs, **more):
        raise AssertionError


def test_an_empty_directory_is_left_as_it_was(tmp_path):
    with claim("out", "score") as stopped:
        assert not stopped
        assert (tmp_path / "out" / ".holdfast").read_text() == "score\n"
    assert not (tmp_path / "out").exists()
    with claim("out", "score"):
        (tmp_path / "out" / "weights.jsonl").write_text("")
    with claim("out", "score") as stopped:
        assert stopped
    assert {p.name for p in (tmp_path / "out").iterdir()} == {".holdfast", "weights.jsonl"}
    finished(tmp_path / "out")
    refused("is not empty", "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"weights.jsonl"}


@pytest.mark.parametrize(
    "name", ["notes.txt", "config.yaml", "tokenizer.json", "model.safetensors", "history.jsonl"]
)
@pytest.mark.parametrize("command", ["finetune", "compare", "tune", "score", "draw"])
def test_foreign_files(tmp_path, command, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("a: 1")
    refused(f"is not empty, and holdfast {command} did not write", "out", command)
    assert [p.name for p in (tmp_path / "out").iterdir()] == [name]
    assert (tmp_path / "out" / name).read_text() == "a: 1"


@pytest.mark.parametrize(
    ("command", "name", "keys"),
    [
        ("finetune", "config.yaml", ["model", "recipe", "data", "lr"]),
        ("tune", "config.yaml", ["model", "recipe", "data", "lr", "trials"]),
        ("compare", "config.yaml", ["model", "recipes", "data", "lr"]),
        ("compare", "results.json", ["runs", "schema_version"]),
        ("compare", "runs/one/result.json", ["id", "recipe", "target"]),
        ("measure", "report.json", ["base", "tuned", "schema_version"]),
        ("merge --sweep", "sweep.json", ["points", "tuned", "schema_version"]),
        ("score", "scores.json", ["task", "tokens"]),
        ("report", "report.html", ["schema_version"]),
    ],
)
def test_results_of_earlier_versions(tmp_path, command, name, keys):
    (tmp_path / "out" / name).parent.mkdir(parents=True)
    (tmp_path / "out" / name).write_text(json.dumps(dict.fromkeys(keys, 1)))
    (tmp_path / "out" / ".lock").write_text("")
    with claim("out", command):
        pass
    refused("is not empty", "out", "draw")


def test_results_of_another_command(tmp_path):
    with claim("out", "compare"):
        (tmp_path / "out" / "results.json").write_text("{}")
    refused("contains results of holdfast compare", "out", "finetune")
    with claim("out", "report", also=("compare",)):
        pass


@pytest.mark.parametrize(
    ("out", "given", "files"),
    [
        (".", "data.jsonl", None),
        (".", "data.jsonl", ["data.jsonl"]),
        ("link", "data.jsonl", ["data.jsonl"]),
        (".", "elsewhere.jsonl", ["data.jsonl"]),
        (".", "hard.jsonl", ["data.jsonl"]),
        (".", "sub/link.jsonl", ["data.jsonl"]),
        ("sub", "sub", ["data.jsonl"]),
        ("sub/deep", "sub", None),
        ("sub", "sub/saved:train", None),
    ],
)
def test_inputs(tmp_path, out, given, files):
    (tmp_path / ".holdfast").write_text("score\n")  # even where all is ours
    (tmp_path / "sub" / "saved").mkdir(parents=True)
    (tmp_path / "sub" / "link.jsonl").symlink_to(tmp_path / "data.jsonl")
    (tmp_path / "elsewhere.jsonl").symlink_to("data.jsonl")
    (tmp_path / "link").symlink_to(".")
    os.link("data.jsonl", "hard.jsonl")
    refused("the input", out, inputs=[given], files=files)
    assert (tmp_path / "data.jsonl").read_text() == "mine"


def test_an_input_may_lie_beside_files_that_are_written(tmp_path):
    (tmp_path / ".holdfast").write_text("score\n")
    with claim(".", "score", ["data.jsonl", "no/such/name:train"], files=["weights.jsonl"]):
        pass


@pytest.mark.parametrize("name", [".holdfast", "out/.holdfast"])
def test_a_link_is_not_followed(tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "data.jsonl")
    refused("is a symbolic link", str((tmp_path / name).parent), inputs=())
    assert (tmp_path / "data.jsonl").read_text() == "mine"


HOLD = """
from holdfast.io.outputs import claim
with claim("out", "score"):
    print(flush=True)
    input()
"""


def test_two_processes(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLD], **pipes)
    process.stdout.readline()
    refused("another holdfast process is writing to out", "out")
    process.kill()  # then the lock is free, and what it left is removed
    process.communicate()
    (tmp_path / "out" / ".a.json.0123abcd.tmp").write_text("cut")
    (tmp_path / "out" / ".model.0123abcd.tmp").mkdir()
    (tmp_path / "out" / ".model.0123abcd.tmp" / "model.safetensors").write_text("cut")
    with claim("out", "score"):
        assert [p.name for p in (tmp_path / "out").iterdir()] == [".holdfast"]


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("", "must name a place"),
        ("  ", "must name a place"),
        ("a\udcff", "must be valid UTF-8"),
        ("a\0b", "null character"),
        ("data.jsonl", "is a file"),
        ("data.jsonl/in", "cannot be written"),
    ],
)
def test_names(tmp_path, out, words):
    refused(words, out)
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]


def test_files(tmp_path):
    (tmp_path / "other.jsonl").write_text("foreign")
    assert claim_file("new.jsonl", ["data.jsonl"], ours=lambda _: False).name == "new.jsonl"
    assert claim_file("other.jsonl", ["data.jsonl"], ours=lambda _: True).name == "other.jsonl"
    with pytest.raises(ValueError, match="overwrite the input"):
        claim_file("data.jsonl", ["./data.jsonl"], ours=lambda _: True)
    with pytest.raises(ValueError, match="did not write it"):
        claim_file("other.jsonl", ["data.jsonl"], ours=lambda _: False)


def test_a_model_is_moved_when_it_is_complete(tmp_path):
    seen = []
    with pytest.raises(ZeroDivisionError), written_aside(tmp_path, lambda: 1 / 0) as aside:
        (aside / "config.json").write_text("")
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]

    def look():
        seen.extend(p.name for p in tmp_path.iterdir() if p.is_file())

    with written_aside(tmp_path, look) as aside:
        (aside / "config.json").write_text("")
        (aside / "model.safetensors").write_text("")
    assert seen == ["data.jsonl"]
    assert {p.name for p in tmp_path.iterdir()} == {
        "data.jsonl", "config.json", "model.safetensors",
    }  # fmt: skip


def test_equal_values_are_not_written_again(tmp_path):
    file = Place.at(tmp_path / "config.yaml")
    file.write_text("a: 1 # mine\n")
    write_changed(file, "a: 1\n")
    assert file.read_text() == "a: 1 # mine\n"
    write_changed(file, "a: 2\n")
    assert file.read_text() == "a: 2\n"


def test_local_path(tmp_path):
    assert local_path("data.jsonl").name == "data.jsonl"
    assert local_path("data.jsonl:train").name == "data.jsonl"
    assert local_path("openai/gsm8k:main:train") is None
    assert local_path("x" * 5000) is None


def to_full(write):
    """Write to a device without space, under the name of the temporary file."""

    def to_device(path):
        path.symlink_to(FULL)
        write(path)

    return to_device


@pytest.mark.skipif(not os.path.exists(FULL), reason="needs /dev/full")
@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text("text"),
        lambda path: torch.save({"a": torch.zeros(1000)}, path),
    ],
)
def test_a_full_disk_is_said_with_the_name(tmp_path, write):
    with pytest.raises(OSError, match=r"No space left|is the disk full") as caught:
        write_whole(tmp_path / "kept", to_full(write))
    assert caught.value.filename == str(tmp_path / "kept")
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]


def test_safetensors_that_cannot_be_written(tmp_path):
    """Their error is no OSError."""
    with pytest.raises(OSError, match="No such file") as caught:
        write_whole(tmp_path / "no" / "kept", lambda path: save_file({"a": torch.ones(1)}, path))
    assert caught.value.filename == str(tmp_path / "no" / "kept")


def test_a_line_that_was_cut_short(tmp_path):
    for before, after in ((b"a\nb\n", b"a\nb\n"), (b"a\nb", b"a\n"), (b"a", b""), (b"", b"")):
        (tmp_path / "log").write_bytes(before)
        remove_cut_line(tmp_path / "log")
        assert (tmp_path / "log").read_bytes() == after
