import pytest

from holdfast.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--data", "train.jsonl"],
            "unknown option --data; plan reads no data: give the number of",
        ),
        (["--train-file", "t.jsonl"], "unknown option --train-file; plan reads no data: give"),
        (["--dataset", "t.jsonl"], "unknown option --dataset; plan reads no data: give the"),
        (["--config", "of_finetune.yaml"], "unknown option 'data'; plan reads no data: give"),
        (["--config", "of_others.yaml"], "unknown option 'train-file'; plan reads no data: give"),
        (["--samples", "1000"], "training samples as --data-size N\n"),
        (["DIR"], "unexpected argument 'DIR': a model is given as --model DIR; `holdfast plan"),
        (["--recipe", "standard", "recadam"], "unexpected argument 'recadam'; `holdfast plan"),
    ],
)
def test_what_to_give_instead(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_finetune.yaml").write_text("model: DIR\ndata: train.jsonl\n")
    (tmp_path / "of_others.yaml").write_text("train-file: train.jsonl\n")
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err
