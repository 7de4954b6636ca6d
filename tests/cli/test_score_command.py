"""``holdfast score`` on the small model that comes with the package."""

import json
import re

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast import Flow, Scores
from holdfast.builtin import MODEL
from holdfast.cli import main
from holdfast.report.scored import Sample, Scored
from holdfast.report.text import to_markdown

ROWS = [
    {"prompt": "two plus two is", "completion": "four", "id": 7},
    {"prompt": "the cat sat on", "completion": "the mat, and the dog sat by it", "id": 8},
    {"prompt": "once upon a time", "completion": "zqx jvw kkk", "id": 9},
]


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    write("train.jsonl", ROWS)


def write(name, rows):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(name):
    with open(name) as file:
        return [json.loads(line) for line in file]


def score(*more):
    return main(["score", f"--model={MODEL}", "--data=train.jsonl", *more])


def test_scores_and_weights_on_disk(capsys):
    assert score("--out=scores") == 0
    scores, lines = Scores.load("scores"), read("scores/weights.jsonl")
    assert [line["loss"] for line in lines] == scores.losses.tolist()
    assert [line["targets"] for line in lines] == scores.counts.tolist()
    weights = torch.exp(-scores.losses / scores.losses.median())
    assert [line["weight"] for line in lines] == pytest.approx(weights.tolist())
    assert [(line["index"], line["row"]) for line in lines] == [(0, 0), (1, 1), (2, 2)]
    out = capsys.readouterr().out
    assert re.search(rf"median loss \(τ\) +{scores.losses.median():.4g}", out)
    hardest = ROWS[int(scores.losses.argmax())]["prompt"]
    assert hardest in out.partition("Hardest")[2].splitlines()[3]


@pytest.mark.parametrize("more", [[], ["--json"], ["--out=\x1b[2Jout"], ["--\x1b[2J=1"]])
def test_words_of_rows_control_no_terminal(more, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    write("train.jsonl", [*ROWS, {"prompt": "\x1b[31mred\x9b2J", "completion": "\x1b]0;t\x07"}])
    score(*more)
    told = capsys.readouterr()
    assert "red" in told.out or more
    assert not {"\x1b", "\x9b", "\x07"} & {*told.out, *told.err}


def test_weighted_rows_keep_the_names_of_their_columns():
    rows = [{"ask": row["prompt"], "reply": row["completion"], "prompt": "no"} for row in ROWS]
    write("train.jsonl", rows)
    assert score("--weighted=new.jsonl", "--columns", "question=ask", "answer=reply") == 0
    found = read("new.jsonl")
    assert [{**row, "weight": None} for row in found] == [{**row, "weight": None} for row in rows]
    write("train.jsonl", ROWS)
    assert score("--weighted=other.jsonl") == 0
    assert [row["weight"] for row in found] == [row["weight"] for row in read("other.jsonl")]


def test_rows_with_weights_for_any_trainer(capsys):
    assert score("--weighted=new/weighted.jsonl", "--normalize", "--json") == 0
    rows = read("new/weighted.jsonl")
    assert [{k: v for k, v in row.items() if k != "weight"} for row in rows] == ROWS
    assert sum(row["weight"] for row in rows) == pytest.approx(3)
    told = json.loads(capsys.readouterr().out)
    assert told["mean_weight"] == pytest.approx(1)
    assert told["hardest"][0]["weight"] == min(row["weight"] for row in rows)
    assert sum(column["samples"] for column in told["histogram"]) == 3


def test_tau_is_a_number_and_said_so(capsys):
    assert score("--tau=2", "--out=scores") == 0
    scores = Scores.load("scores")
    weights = [line["weight"] for line in read("scores/weights.jsonl")]
    assert weights == pytest.approx(torch.exp(-scores.losses / 2).tolist())
    assert re.search(r"τ +2 *\n", capsys.readouterr().out)


def test_tokens(capsys):
    assert score("--level=token", "--out=scores") == 0
    scores = Scores.load("scores")
    weights = scores.split(Flow(level="token").weigh(scores))
    assert [x["weight"] for x in read("scores/weights.jsonl")] == [w.tolist() for w in weights]
    assert "tokens (" in capsys.readouterr().out


def test_a_row_without_targets_weighs_nothing(capsys):
    texts = ["the cat sat", "", "once upon a time"]
    write("train.jsonl", [{"text": text} for text in texts])
    assert score("--weighted=weighted.jsonl", "--out=scores") == 0
    out = capsys.readouterr().out
    assert re.search("samples +2 of 3 rows", out)
    assert re.search("without targets +1", out)
    lines = read("scores/weights.jsonl")
    assert [(line["index"], line["row"]) for line in lines] == [(0, 0), (1, 2)]
    weights = [row["weight"] for row in read("weighted.jsonl")]
    assert weights == [lines[0]["weight"], 0.0, lines[1]["weight"]]


def test_text_is_cut_and_has_no_weight_a_row(capsys, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "the cat sat on the mat . " * 40}))
    assert score("--max-length=32", "--out=scores") == 0
    lines = read("scores/weights.jsonl")
    assert len(lines) > 3
    assert {line["row"] for line in lines} == {0}
    assert "of 1 row, cut to length" in capsys.readouterr().out
    assert score("--max-length=32", "--weighted=w.jsonl") == 2
    said = capsys.readouterr().err
    assert f"row 1 of train.jsonl is cut into {len(lines)} samples" in said
    assert not (tmp_path / "w.jsonl").exists()


def test_a_weight_column_is_not_replaced(capsys):
    write("train.jsonl", [{**row, "weight": 1} for row in ROWS])
    assert score("--weighted=w.jsonl") == 2
    assert "already has a column 'weight'" in capsys.readouterr().err


def test_a_config_says_the_same(capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"model: {MODEL}\ndata: train.jsonl\ntau: 2.0\n")
    assert main(["score", "--config=mine.yaml", "--tau=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tau"] == 3


def test_finetune_by_flow_reads_what_was_scored(tmp_path):
    assert score() == 0
    kept = list((tmp_path / "cache" / "scores").iterdir())
    small = ["--max-updates=1", "--batch-size=2", "--max-length=512"]
    given = [f"--model={MODEL}", "--data=train.jsonl", "--recipe=flow", "--out=tuned"]
    assert main(["finetune", *given, *small]) == 0
    assert list((tmp_path / "cache" / "scores").iterdir()) == kept


def test_extremes_are_shown():
    one = Scored("m", "d", 1, 0.5, [Sample(0, 0, 0.5, 0.37, 3)], ["a" * 200])
    assert one.summary()["histogram"] == [{"low": 0.5, "high": 0.5, "samples": 1}]
    assert "aaa…" in to_markdown(one.document())
    losses = [1.0] * 99 + [50.0]
    samples = [Sample(i, i, loss, 0.4, 1) for i, loss in enumerate(losses)]
    many = Scored("m", "d", 100, 1.0, samples, ["x"] * 100)
    assert sum(row["samples"] for row in many.summary()["histogram"]) == 100
    assert many.summary()["effective_size"] == pytest.approx(100)
    nothing = Scored(
        "m", "d", 3, 1.0, [Sample(0, 0, 1.0, 0.4, 1), Sample(1, 1, None, 0.0, 0)], "xy"
    )
    assert nothing.summary()["without_targets"] == 2  # the third row gave no sample


def test_rows_of_other_columns_have_their_samples():
    rows = [{"prompt": "two plus two is", "completion": "four"}, {"question": "a", "answer": "b"}]
    write("train.jsonl", rows)
    assert score("--weighted=weighted.jsonl") == 0
    assert [row["weight"] > 0 for row in read("weighted.jsonl")] == [True, True]


def test_a_classifier_and_one_without_a_head(tmp_path, capsys):
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    from small import make_tokenizer, save

    small = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    save(BertForSequenceClassification(small), tmp_path / "head", make_tokenizer())
    save(BertModel(small), tmp_path / "body", make_tokenizer())
    rows = [{"text": "the cat sat", "label": 0}, {"text": "two plus two", "label": 1}]
    write("train.jsonl", rows)
    given = ["--data=train.jsonl", "--weighted=weighted.jsonl", "--max-length=16"]
    assert main(["score", "--model=head", *given, "--out=scores"]) == 0
    weights = [line["weight"] for line in read("scores/weights.jsonl")]
    assert read("weighted.jsonl") == [
        {**row, "weight": weight} for row, weight in zip(rows, weights, strict=True)
    ]
    capsys.readouterr()
    assert main(["score", "--model=body", *given, "--out=fitted"]) == 0
    assert "new head (2 classes), fitted first: classifier" in capsys.readouterr().err
    assert all(line["loss"] < 0.1 for line in read("fitted/weights.jsonl"))  # not log 2


def test_images(tmp_path):
    from comparison.tiny import save_images, save_resnet

    images, model = save_images(tmp_path / "images", n=2), save_resnet(tmp_path / "resnet")
    assert main(["score", f"--model={model}", f"--data={images}", "--out=scores"]) == 0
    losses = [line["loss"] for line in read("scores/weights.jsonl")]
    assert len(losses) == 6
    assert sum(losses) / 6 < 0.5
