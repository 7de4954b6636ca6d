"""``holdfast finetune`` on the small model that comes with the package."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("jsonargparse", reason="the cli extra is not installed")

from holdfast.cli import main  # noqa: E402
from holdfast.compare.default import paths  # noqa: E402

ROWS = [{"prompt": "two plus two is", "completion": "four"}] * 8
SMALL = ["--training.max_updates=3", "--training.batch_size=2", "--training.lr=1e-3"]


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))


def finetune(*more, out="out"):
    given = [f"--model={paths().model}", "--data=train.jsonl", f"--out={out}", *SMALL]
    return main(["finetune", *given, *more])


def weights(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_recipe_and_its_config_again(tmp_path, capsys):
    assert finetune("--recipe=recadam+flow") == 0
    assert "the model is in out" in capsys.readouterr().out
    base, tuned = weights(paths().model), weights("out")
    assert any(not torch.equal(base[name].float(), tuned[name]) for name in base)
    assert main(["finetune", "--config=out/config.yaml", "--out=again"]) == 0
    again = weights("again")
    assert all(torch.equal(tuned[name], again[name]) for name in tuned)


def test_lora_saves_its_adapter():
    pytest.importorskip("peft", reason="the peft extra is not installed")
    assert finetune("--recipe=lora") == 0
    assert main(["measure", str(paths().model), "out", "--context-free=2"]) == 0


@pytest.mark.parametrize(
    "row",
    [
        {"text": "the cat sat on the mat . " * 20},
        {"question": "two plus two is", "answer": "four"},
    ],
)
def test_other_rows(row, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    assert finetune() == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--recipe=recadm"], "did you mean 'recadam'"),
        (["--recipe=mine.yaml"], "no such recipe file: mine.yaml"),
        (["--training.lrr=1"], "there is no setting 'training.lrr'; did you mean training.lr?"),
        (["--training.lr=0"], "lr must be a finite number > 0"),
        (["--data=gone.jsonl"], "no such file: gone.jsonl"),
        (["--data=odd.jsonl"], "cannot tell what to learn from the columns x"),
        (["--data=empty.jsonl"], "empty.jsonl is empty"),
        (["--model=/no/model"], "no such directory"),
        (["--out=train.jsonl"], "is a file"),
        (["--config=gone.yaml"], "File does not exist"),
    ],
)
def test_bad_input_is_one_sentence(given, words, tmp_path, capsys):
    (tmp_path / "odd.jsonl").write_text('{"x": 1}')
    (tmp_path / "empty.jsonl").write_text("\n")
    assert finetune(*given) == 1
    said = capsys.readouterr().err
    assert words in said.splitlines()[-1]
    assert "Traceback" not in said


def test_a_model_is_not_written_over(capsys):
    assert finetune() == 0
    assert finetune() == 1
    assert "holds a model already" in capsys.readouterr().err
