import pytest

from holdfast.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--data", "train.jsonl"],
            "unknown option --data; plan reads no data: give the number of",
        ),
        (["--samples", "1000"], "training samples as --data-size N\n"),
        (["DIR"], "unexpected argument 'DIR': a model is given as --model DIR; `holdfast plan"),
    ],
)
def test_what_to_give_instead(words, said, capsys):
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err
