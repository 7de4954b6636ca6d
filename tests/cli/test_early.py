"""What files and settings tell is said before any weights are loaded."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("cattrs", reason="the eval extra is not installed")

from comparison.tiny import save_bert, save_llama
from holdfast.cli import main
from holdfast.io.models import Loader

LABELS = [{"text": "the cat sat", "label": i % 2} for i in range(4)]
PAIRS = [{"prompt": "the cat", "completion": "sat"}] * 4


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in {"labels": LABELS, "pairs": PAIRS, "odd": [{"x": 1}] * 4}.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def refuse(*_, **__):
        raise AssertionError("weights are loaded")

    for load in ("load", "load_with_head"):
        monkeypatch.setattr(Loader, load, refuse)


@pytest.mark.parametrize("command", ["finetune", "compare"])
@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (save_bert, ["--data=labels.jsonl", "lora+flow"], "the head is new and predicts at random"),
        (save_bert, ["--data=labels.jsonl", "self-replay"], "needs a causal language model"),
        (save_bert, ["--data=labels.jsonl", "rehearsal"], "needs data of the old task"),
        (save_bert, ["--data=pairs.jsonl", "standard"], "has no head for pairs.jsonl"),
        (save_llama, ["--data=odd.jsonl", "standard"], "the columns x"),
        (save_llama, ["--data=pairs.jsonl", "--old-data=odd.jsonl", "rehearsal"], "the columns x"),
    ],
)
def test_what_does_not_fit_is_said_first(command, model, given, words, capsys):
    model("model")
    *given, recipe = given
    given += ["--model=model", "--lr=1e-3", "--out=out"]
    if command == "compare":
        given += ["--target=labels.jsonl", "--seeds", "0", "--recipes", "standard"]
        given += [recipe] if recipe != "standard" else []
    else:
        given += [f"--recipe={recipe}"]
    assert main([command, *given]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (save_llama, "--target=labels.jsonl", "LlamaForCausalLM predicts tokens"),
        (save_bert, "--target=pairs.jsonl", "BertModel, which has no head"),
    ],
)
def test_measure_says_first_that_a_head_is_missing(model, given, words, capsys, monkeypatch):
    model("base"), model("tuned")
    monkeypatch.setattr("holdfast.evaluate.measure.measure_drift", lambda *_, **__: 1 / 0)
    assert main(["measure", "base", "tuned", given]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_score_says_first_what_does_not_fit(capsys):
    save_llama("model"), save_bert("bert")
    assert main(["score", "--model=model", "--data=odd.jsonl", "--out=out"]) == 2
    assert "the columns x" in capsys.readouterr().err
    assert main(["score", "--model=bert", "--data=pairs.jsonl", "--out=out"]) == 2
    assert "has no head for" in capsys.readouterr().err
