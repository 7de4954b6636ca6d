"""``holdfast data``: what a model would learn from data."""

import json

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")

import holdfast
from comparison.tiny import save_bert, save_images, save_llama, save_vit
from holdfast.cli import main
from small import make_tokenizer

ROWS = [
    {"instruction": "two plus", "input": "three", "output": "five", "topic": "a", "n": 1},
    {"instruction": "the cat", "input": "", "output": "sat on the mat and the log", "n": 2},
    {"instruction": "a dog", "input": None, "output": "ran"},
    {"instruction": "a " * 20, "input": None, "output": "four"},
]


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write("train.jsonl", ROWS)


def write(name, rows):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def llama(tmp_path, capsys):
    source = save_llama(tmp_path / "llama")
    capsys.readouterr()
    return source


def shown(capsys, *words):
    assert main(["data", *words]) == 0
    return capsys.readouterr().out


def test_samples_lengths_and_columns(llama, capsys):
    said = shown(capsys, "train.jsonl", f"--model={llama}", "--max-length=8")
    first, *samples, rest = said.split("\nrow ")
    third, _, sentences = rest.partition("\n\n")
    assert first.strip().endswith("4 rows of prompts and answers, 3 training samples")
    assert samples[0].strip() == "0: 5 tokens, 2 trained\ntwo plus three⟦ five </s>⟧"
    assert samples[1].strip().endswith("the cat⟦ sat on the mat and the log </s>⟧")
    assert third == "2: 4 tokens, 2 trained\na dog⟦ ran </s>⟧"
    assert sentences.splitlines() == [
        "Trained parts are in ⟦ ⟧.",
        "Tokens per sample: 4 (min), 7.5 (median), 22 (max).",
        "Cut: 2 of 4 samples (50.0 %) have more than 8 tokens: the end is cut off (left out, "
        "without a trained part: 1).",
        "Columns that are not used: topic, n.",
    ]


@pytest.mark.filterwarnings("ignore:.*columns that are not used")
def test_the_json_has_the_figures_of_a_training(llama, capsys):
    found = json.loads(shown(capsys, "train.jsonl", f"--model={llama}", "--max-length=8", "--json"))
    assert (found["rows"], found["samples"], found["kind"]) == (4, 3, "completion")
    assert found["unused"] == ["topic", "n"]
    assert found["lengths"] == {"min": 4, "median": 7.5, "max": 22, "limit": 8, "cut": 2, "lost": 1}
    assert found["first"][0]["pieces"] == [
        {"text": "two plus three", "trained": False}, {"text": " five </s>", "trained": True},
    ]  # fmt: skip
    given = [f"--model={llama}", "--data=train.jsonl", "--out=out", "--recipe=standard"]
    assert main(["finetune", *given, "--max-length=8", "--max-updates=1", "--lr=1e-3"]) == 0
    assert "standard: 3 samples\n" in capsys.readouterr().err


def test_the_same_in_python(llama, capsys):
    printed = shown(capsys, "train.jsonl", f"--model={llama}", "--max-length=8")
    found = holdfast.preview(llama, "train.jsonl", loader=holdfast.Loader(max_length=8))
    assert (found.samples, found.kind, found.unused) == (3, "completion", ["topic", "n"])
    found.to_terminal()
    assert capsys.readouterr().out == printed
    few = holdfast.preview(llama, ["train.jsonl"], samples=1, columns={"answer": "topic"})
    assert [piece.text for piece in few.first[0].pieces] == ["two plus three", " a </s>"]


@pytest.mark.filterwarnings("default:.*ignores the tools")
def test_tools_that_the_template_ignores(tmp_path, capsys):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    model = save_llama(tmp_path / "chat")
    tokenizer.save_pretrained(model)
    turns = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "cat"}]
    write("chat.jsonl", [{"messages": turns, "tools": [{"function": {"name": "plus"}}]}])
    assert main(["data", "chat.jsonl", f"--model={model}"]) == 0
    assert "warning: chat.jsonl: the chat template ignores the tools" in capsys.readouterr().err


def test_texts_become_several_samples(llama, capsys):
    write("texts.jsonl", [{"body": "the cat sat on the mat"}, {"body": "a dog"}])
    words = ["texts.jsonl", f"--model={llama}", "--max-length=4", "--columns", "text=body"]
    said = shown(capsys, *words)
    assert "2 rows of texts, 3 training samples" in said
    assert "\nrow 0: 6 tokens, 6 trained\n⟦the cat sat on the mat⟧\n" in said
    assert (
        "Cut: 1 of 2 texts (50.0 %) have more than 4 tokens: they become several samples." in said
    )
    assert said.endswith("All columns are used.\n")


def test_only_the_answers_of_conversations_are_trained(llama, capsys):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<s> ' if m['role'] == 'user' else '[SEP] ' }}{{ m['content'] }}"
        " {% endfor %}{% if add_generation_prompt %}[SEP] {% endif %}"
    )
    tokenizer.save_pretrained(llama)
    turns = [("human", "two plus two"), ("gpt", "four"), ("human", "plus two"), ("gpt", "six")]
    write("chat.jsonl", [{"conversations": [{"from": a, "value": b} for a, b in turns], "id": "x"}])
    said = shown(capsys, "chat.jsonl", f"--model={llama}")
    assert "<s> two plus two [SEP]⟦ four⟧ <s> plus two [SEP]⟦ six⟧" in said
    assert "Columns that are not used: id." in said


def test_labels_are_what_a_classifier_learns(tmp_path, capsys):
    pairs = [{"q": "the cat", "p": "a dog", "a": label, "id": "7"} for label in ("yes", "no")]
    write("pairs.jsonl", pairs)
    source = save_bert(tmp_path / "bert")
    capsys.readouterr()
    columns = ["--columns", "text1=q", "text2=p", "label=a"]
    said = shown(capsys, "pairs.jsonl", f"--model={source}", *columns)
    assert "2 rows of inputs and labels, 2 training samples, new head (2 classes)" in said
    assert "the cat a dog⟦ yes⟧" in said
    assert "Columns that are not used: id." in said


def test_images_and_their_labels(tmp_path, capsys):
    data, source = save_images(tmp_path / "images"), save_vit(tmp_path / "vit", num_labels=5)
    capsys.readouterr()
    said = shown(capsys, data, f"--model={source}")
    assert "images/blue/0.png, as 3×16×16 numbers⟦ blue⟧" in said
    assert "Tokens" not in said


def test_text_of_others_does_not_control_the_terminal(llama, capsys):
    write("evil.jsonl", [{"text": "a \x1b[2J cat", "x\x1b[2J": "a"}])
    assert "\x1b" not in shown(capsys, "evil.jsonl", f"--model={llama}")


def test_trained_parts_are_green_in_a_terminal(llama, capsys, monkeypatch):
    pytest.importorskip("rich", reason="the cli extra is not installed")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any output for a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    said = shown(capsys, "train.jsonl", f"--model={llama}")
    assert "two plus three\x1b[1;32m five </s>\x1b[0m" in said
    assert "⟦" not in said
    assert "Trained parts are green." in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.jsonl"], "--model must be given"),
        (["--model=llama"], "FILE"),
        (["gone.jsonl", "--model=llama"], "no such file: gone.jsonl"),
        (["*.csv", "--model=llama"], "no file matches *.csv"),
        (["train.jsonl", "--model=llama", "--columns", "text=bdy"], "has no column 'bdy'"),
        (["train.jsonl", "--model=llama", "--columns", "txt=n"], "a column map has no name 'txt'"),
        (["some/data:train", "--model=llama"], "some/data"),
    ],
)
def test_bad_input_is_one_sentence(words, message, llama, capsys, monkeypatch):
    monkeypatch.setattr("holdfast.io.hub._is_reachable", lambda: False)
    assert main(["data", *words]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert message in said[0]
