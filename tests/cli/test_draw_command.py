"""``holdfast draw`` on a tiny model."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")

from comparison.tiny import save_bert, save_llama
from holdfast.cli import main


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


def test_texts_are_shown_and_can_be_removed(capsys):
    model = save_llama("llama")
    capsys.readouterr()
    assert main(["draw", f"--model={model}", "--texts=3", "--json", "--out=drawn"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    rows = [json.loads(line) for line in Path("drawn/texts.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == found["texts"]
    assert len({*found["texts"]}) == 3
    assert f"stored in {found['stored']}; they may contain memorized text. Delete" in told.err
    shutil.rmtree(found["stored"])
    assert main(["draw", f"--model={model}", "--texts=2"]) == 0  # drawn again, the same
    shown = capsys.readouterr().out.splitlines()
    assert " ".join(found["texts"][0].split()) == shown[0].removeprefix("  1  ")


def test_they_are_those_that_finetune_rehearses(capsys):
    row = {"prompt": "two plus two is", "completion": "four"}
    Path("train.jsonl").write_text(json.dumps(row))
    model = save_llama("llama")
    given = [f"--model={model}", "--data=train.jsonl", "--out=out", "--max-updates=1"]
    assert main(["finetune", *given]) == 0
    (stored,) = Path("cache/pools").iterdir()
    capsys.readouterr()
    assert main(["draw", f"--model={model}", "--texts=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stored"] == str(stored.absolute())


def test_no_texts_and_no_model(capsys):
    assert main(["draw", f"--model={save_llama('llama')}", "--texts=0", "--out=drawn"]) == 2
    assert capsys.readouterr().err.endswith("holdfast: --texts must be at least 1, got 0\n")
    assert not Path("drawn").exists()
    assert main(["draw", "--model=no/such/directory"]) == 2
    assert capsys.readouterr().err == "holdfast: no such model directory: no/such/directory\n"


def test_a_model_that_does_not_write_is_one_sentence(capsys):
    assert main(["draw", f"--model={save_bert('bert')}"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "Traceback" not in said
    assert "causal language model" in said
